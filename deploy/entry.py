"""The program `deploy`: loads no more than its verb needs, and makes of every failure a message and an exit code.

All verbs together take over a second to load; those that hooks and CI call, and pure arithmetic, need not wait for the
others.
"""

import errno
import importlib
import os
import signal
import sys

import typer
from rich.console import Console

from deploy import render
from deploy.command_line import verbs
from deploy.errors import DeployError

QUICK = {
    "lock": "deploy.lock_verbs",
    "diff": "deploy.lock_verbs",
    "verify": "deploy.lock_verbs",
    "gap": "deploy.gap_verbs",
    "plan": "deploy.plan_verbs",
}
"""Modules of the verbs that load alone."""
FAILED, INTERRUPTED = 1, 130
# As a shell sees a program that SIGPIPE ended.
PIPE_CLOSED = 141


def main() -> None:
    """Run the command line."""
    if module := QUICK.get(sys.argv[1] if len(sys.argv) > 1 else ""):
        # In a group, because a single verb would otherwise lose its name.
        app = verbs()
        app.add_typer(importlib.import_module(module).app)
    else:
        from deploy.cli import app
    run(app)


def run(app: typer.Typer) -> None:
    """Run verbs; whatever a person can mend becomes a message and an exit code, never a traceback."""
    err = Console(stderr=True, highlight=False)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        app()
    except DeployError as error:
        render.error(err, error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # Whoever read the output has enough. The interpreter must not try to write the rest.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PIPE_CLOSED)
    except OSError as error:
        # The file itself may not be there yet, its folder is.
        fix = f"free some: df -h {os.path.dirname(error.filename or '.')}" if error.errno == errno.ENOSPC else ""  # noqa: PTH120
        render.error(err, DeployError(f"{error.filename or 'a file'}: {error.strerror or error}", "", fix))
        sys.exit(FAILED)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            err.print("interrupted")
        raise
    except Exception as error:
        # Asked for only now: it costs every start a good part of a second.
        from python_on_whales.exceptions import DockerException

        from deploy.stack.compose import words

        if not isinstance(error, DockerException):
            raise
        render.error(err, DeployError("Docker refused a command", words(error), "docker info"))
        sys.exit(FAILED)


def _interrupt(number: int, frame: object) -> None:
    """SIGTERM and SIGHUP end a command as Ctrl-C does: with its clean-up."""
    raise KeyboardInterrupt
