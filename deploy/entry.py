"""The program `deploy`: loads no more than its verb needs, and makes of every failure a message and an exit code.

All verbs together take over a second to load; those that hooks and CI call, pure arithmetic, and those whose arguments
the shell completes need not wait for the others.
"""

import importlib
import io
import locale
import os
import re
import signal
import sys
import traceback
from typing import IO, TYPE_CHECKING

from deploy.cures import OUTPUT, cure

if TYPE_CHECKING:
    import typer

QUICK = {
    "lock": "deploy.lock_verbs",
    "diff": "deploy.lock_verbs",
    "verify": "deploy.lock_verbs",
    "gap": "deploy.gap_verbs",
    "plan": "deploy.plan_verbs",
    **dict.fromkeys(("upgrade", "rollback", "generations", "drain", "restart"), "deploy.generation_verbs"),
}
"""Modules of the verbs that load alone."""
FAILED, INTERRUPTED = 1, 130
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# As a shell sees a program that SIGPIPE ended.
PIPE_CLOSED = 141


def main() -> None:
    """Run the command line."""
    # While the verbs load there is nothing to undo yet, and after them nothing any more: Ctrl-C ends it at once.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _prepare_streams()
    from deploy.command_line import Program, verbs

    first = _first_word()
    if first == "--version":
        from deploy.version import app
    elif module := QUICK.get(first):
        # In a group, because a single verb would otherwise lose its name.
        app = verbs(cls=Program)
        app.add_typer(importlib.import_module(module).app)
    else:
        from deploy.cli import app
    try:
        run(app)
    finally:
        for number in INTERRUPTS:
            if signal.getsignal(number) is _interrupt:
                signal.signal(number, signal.SIG_DFL)


def _first_word() -> str:
    """The verb that is called, or whose arguments the shell asks for at a press of Tab; empty if there is none yet."""
    if "_DEPLOY_COMPLETE" not in os.environ:
        return sys.argv[1] if len(sys.argv) > 1 else ""
    # As Typer's scripts for bash, and for zsh and fish, say it.
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    # What follows a space is another word, be it empty.
    words = re.split(r"\s+", line)
    return words[1] if len(words) > 2 else ""


def run(app: "typer.Typer") -> None:
    """Run verbs; whatever a person can mend becomes a message and an exit code, never a traceback."""
    try:
        _run(app)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):
            # Typer met the closed pipe first, or Rich on the way to a message.
            for stream in (sys.stdout, sys.stderr):
                _drop_output(stream)
            sys.exit(PIPE_CLOSED)
        raise


def _run(app: "typer.Typer") -> None:
    from deploy import render
    from deploy.command_line import console
    from deploy.errors import DeployError

    err = console(stderr=True)
    for number in INTERRUPTS:
        # What the caller has ignored stays so: `nohup deploy watch &` outlives its terminal.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    try:
        try:
            app()
        finally:
            # Here what cannot be written still becomes a message.
            sys.stdout.flush()
    except DeployError as error:
        render.error(err, error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # Whoever read the output has enough.
        _drop_output()
        sys.exit(PIPE_CLOSED)
    except OSError as error:
        what = error.strerror or str(error)
        if error.filename:
            what = f"{error.filename}: {what}"
        elif error.errno in OUTPUT:
            what = f"the output: {what}"
            _drop_output()
        render.error(err, DeployError(what, "", cure(error)))
        sys.exit(FAILED)
    except RecursionError:
        why = "one of the files it read has brackets in brackets, thousands deep"
        render.error(err, DeployError("a file is nested too deeply", why, "name another, or restore it: git status"))
        sys.exit(FAILED)
    except KeyboardInterrupt:
        # Between the verbs' own work, which turns it into an exit code itself.
        err.print("interrupted")
        sys.exit(INTERRUPTED)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            err.print("interrupted")
        raise
    except Exception as error:
        # Asked for only now: it costs every start a good part of a second.
        from python_on_whales.exceptions import DockerException

        from deploy.stack.compose import words

        if isinstance(error, DockerException):
            failure = DeployError("Docker refused a command", words(error), "docker info")
        elif _came_from(error, "python_on_whales"):
            why = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            failure = DeployError("Docker's client answered something that cannot be read", why, "docker version")
        else:
            raise
        render.error(err, failure)
        sys.exit(FAILED)


def _interrupt(number: int, frame: object) -> None:
    """Ctrl-C, SIGTERM and SIGHUP end a command the same way: with its clean-up."""
    raise KeyboardInterrupt


def _prepare_streams() -> None:
    """Have three streams that never fail for the sake of a character, and files in UTF-8, whoever started this."""
    if not sys.flags.utf8_mode and locale.getencoding().lower() not in ("utf-8", "utf8"):
        # As Python does by itself from 3.15 on (PEP 686).
        os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONUTF8": "1"})
    # In place of a stream that the caller has closed.
    sys.stdin = sys.stdin or _nothing("r")
    sys.stdout, sys.stderr = sys.stdout or _nothing("w"), sys.stderr or _nothing("w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _drop_output(stream: IO[str] | None = None) -> None:
    """Keep the interpreter from trying to write the rest at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


def _nothing(mode: str) -> IO[str]:
    return open(os.devnull, mode, encoding="utf-8")  # noqa: PTH123


def _came_from(error: Exception, package: str) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    return any(f"/{package}/" in frame.f_code.co_filename for frame, _ in frames)
