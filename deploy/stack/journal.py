"""The journal: says on disk that a command is changing the stack, so that the next one knows it was cut off."""

import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime

from deploy.stack.state import State, sync_folder, write


@dataclass(frozen=True)
class Entry:
    """The change under way.

    Attributes:
        verb: the command.
        since: when it began, ISO 8601, UTC.
    """

    verb: str
    pid: int
    since: str


def begin(state: State, verb: str) -> None:
    """Write the entry, before anything is changed."""
    entry = {"verb": verb, "pid": os.getpid(), "since": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
    write(state.journal, json.dumps(entry) + "\n")
    sync_folder(state.folder)


def end(state: State) -> None:
    """Remove the entry: the stack is what `current` says."""
    state.journal.unlink(missing_ok=True)
    sync_folder(state.folder)


def cut_off(state: State) -> Entry | None:
    """The change that did not end. Call it with the lock held: else the command may still be at work."""
    try:
        text = state.journal.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError):
        text = ""
    try:
        found = json.loads(text)
        return Entry(str(found["verb"]), int(found["pid"]), str(found["since"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        # Whatever stands there: somebody was at work and did not end.
        return Entry("a command", 0, "an unknown time")
