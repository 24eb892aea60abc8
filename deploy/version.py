"""`deploy --version`: which controller this is, and which image the lock in this folder names."""

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from deploy.command_line import verbs
from deploy.errors import DeployError
from deploy.lock.document import FILE_NAME, read_part

PROJECT = "deepseek-v4-flash-sm120"


def show(wanted: bool) -> None:
    """Print it and end the command, if it was asked for."""
    if not wanted:
        return
    sys.stdout.write(f"deploy {metadata.version(PROJECT)}\n")
    if Path(FILE_NAME).exists():
        sys.stdout.write(f"{_locked(Path())}\n")
    raise typer.Exit


def _locked(folder: Path) -> str:
    # Whoever asks for the version may be about to report the very lock that cannot be read.
    try:
        return f"{FILE_NAME}: image of inputs {read_part(folder, 'image')['inputs']}"
    except DeployError as error:
        return f"{error.message} ({error.why})"
    except KeyError:
        return f"{FILE_NAME}: its image names no inputs"
    except (OSError, ValueError) as error:
        return f"{FILE_NAME} cannot be read: {error}"


VersionOption = Annotated[
    bool, typer.Option("--version", callback=show, is_eager=True, help="Show the version and the locked image.")
]

app = verbs(invoke_without_command=True)


@app.callback()
def version(version: VersionOption = False) -> None:
    """Show the version and the locked image."""
