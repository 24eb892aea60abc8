"""What the verbs share on the command line: options that mean the same everywhere, examples, JSON.

Loads next to nothing, so that verbs which are called often start at once.
"""

import json
import os
import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
PIPE_COLUMNS = 1000
SPEC, STATE = ROOT / "deploy.toml", ROOT / ".state"


class Panel(StrEnum):
    """Headings of `deploy --help`, in their order: what a person comes to do."""

    CHANGE = "Start and change"
    LOOK = "Look"
    LOCK = "Image and lock"
    TUNE = "Measure and tune"
    HOST = "Host"


class ProfileName(StrEnum):
    pd = "pd"
    replicas = "replicas"
    cpu = "cpu"


SpecOption = Annotated[
    Path, typer.Option("--spec", envvar="DEPLOY_SPEC", help="The spec to follow.", show_default="deploy.toml")
]
StateOption = Annotated[
    Path,
    typer.Option("--state", envvar="DEPLOY_STATE", help="Folder of the running stack's files.", show_default=".state"),
]
ProfileOption = Annotated[ProfileName | None, typer.Option("--profile", help="Instead of the profile in the spec.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
MirrorOption = Annotated[
    str | None,
    typer.Option(
        "--mirror", envvar="DEBIAN_MIRROR", help="Debian archive.", show_default="the machine's own apt sources"
    ),
]
SecurityMirrorOption = Annotated[
    str | None, typer.Option("--security-mirror", help="Its security archive.", show_default="MIRROR-security")
]
CertificatesOption = Annotated[
    Path | None, typer.Option("--certificates", help="CA file for the Python index.", show_default="the machine's")
]


class Program(TyperGroup):
    """What Typer does not do as we want it: the overview by panels, and what it says of a wrong value."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs under their `rich_help_panel`, as Typer itself does only inside Rich's boxes."""
        width = max(map(len, self.commands))
        for panel in Panel:
            listed = {name: verb for name, verb in self.commands.items() if _panel(verb) == panel}
            with formatter.section(panel.value):
                formatter.write_dl(
                    [
                        (name.ljust(width), verb.get_short_help_str(formatter.width - width - 6))
                        for name, verb in listed.items()
                    ]
                )

    def invoke(self, ctx: Any) -> Any:
        """Run a verb; of a value that it cannot take say what pydantic says, without the name of its exception."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")
            raise


def _panel(verb: Any) -> str | None:
    return verb.rich_help_panel


def verbs(**settings: Any) -> typer.Typer:
    """A group of verbs with the look that all have."""
    return typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        **settings,
    )


def console(stderr: bool = False) -> "Console":
    """Where a verb writes. Not on a terminal, lines stay whole: whoever reads them there folds them or cuts them up."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.file = cast("IO[str]", _Trimmed(stderr))
        if "COLUMNS" not in os.environ:
            made.width = PIPE_COLUMNS
    return made


class _Trimmed:
    """Standard output or error as it is at the moment, without the blanks that fill a table's last column."""

    def __init__(self, stderr: bool) -> None:
        self._name = "stderr" if stderr else "stdout"

    def write(self, text: str) -> int:
        getattr(sys, self._name).write(re.sub(r" +(?=\n)", "", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(sys, self._name), name)


def printable(text: str) -> str:
    """One line without control characters: what a file or a host says cannot command the terminal."""
    return "".join(character if character.isprintable() else " " for character in text)


def examples(*lines: str) -> str:
    """An epilog that keeps its line breaks."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


def print_json(value: Any) -> None:
    """Print a value for programs."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")
