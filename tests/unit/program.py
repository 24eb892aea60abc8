"""The command line by its own description: the program and every verb in it."""

from collections.abc import Iterator
from typing import Any

import typer.main

from deploy.cli import app


def walk(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and all below it, each with the words that lead to it."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*path, name))


PROGRAM: Any = typer.main.get_command(app)
VERBS = list(walk(PROGRAM))
