"""The examples in each verb's help: a person copies them, so they must be commands that there are."""

import re
import shlex
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
import typer
from program import PROGRAM, VERBS

from deploy.command_line import examples

OPERATORS = {"|", "&&", "||", ";"}
REDIRECTIONS = {"<", ">", ">>"}


def commands(line: str) -> Iterator[list[str]]:
    """The commands of `deploy` in one example, without the words that explain it and without the rest of the line."""
    lexer = shlex.shlex(re.split(r" {2,}", line.strip())[0], posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    for operator, words in groupby(lexer, OPERATORS.__contains__):
        command = [] if operator else list(words)
        while command and ("=" in command[0] or command[0] == "sudo"):
            del command[0]
        if command and command[0] == "deploy":
            ends = [place for place, word in enumerate(command) if word in REDIRECTIONS]
            yield command[1 : ends[0] if ends else None]


def parsed(arguments: list[str]) -> tuple[str, ...]:
    """Parse and check a command as the program does before it runs one; the words that lead to its verb."""
    command, name, context, path = PROGRAM, "deploy", None, tuple[str, ...]()
    while True:
        try:
            context = command.make_context(name, list(arguments), parent=context)
        except typer.BadParameter as error:
            # The files of an example are not on this machine.
            if "does not exist" in error.message:
                return path
            raise
        rest: list[str] = [*context._protected_args, *context.args]
        if not hasattr(command, "commands") or not rest:
            return path
        name, command, arguments = command.resolve_command(context, rest)
        path = (*path, name)


def lines(verb: Any) -> list[str]:
    """The examples in a verb's help."""
    text: str = verb.epilog or ""
    return text.partition("Examples:\n")[2].partition("\n\n")[0].splitlines()


@pytest.mark.parametrize(("path", "verb"), VERBS, ids=[" ".join(path) or "deploy" for path, _ in VERBS])
def test_every_verb_has_examples_and_each_is_a_command_that_parses(path: tuple[str, ...], verb: Any) -> None:
    found = [parsed(command) for line in lines(verb) for command in commands(line)]
    assert any(other[: len(path)] == path for other in found), "no example of this verb"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("deploy up --no-such-option", "No such option"),
        ("deploy rollback four", "valid integer"),
        ("deploy nonsense", "No such command"),
        ("deploy bench compare A", "Missing argument"),
        ("true && deploy up --profile x  explained", "is not one of"),
    ],
)
def test_an_example_that_is_no_command_would_be_found(line: str, words: str) -> None:
    (command,) = commands(examples(line).splitlines()[-1])
    with pytest.raises(Exception) as found:
        parsed(command)
    error: Any = found.value
    assert words in error.format_message()
