"""An experiment on disk: a folder under the state folder, written so that a killed run loses one trial at most.

tune/ID/plan.json      what is compared, on what; its key says whether another call may go on with it
        trials.jsonl   a line a trial; alone.jsonl a line an op timed alone
        trials/        the load tests' own folders
        report.json    what came out
        over           exists once that is signed off
"""

import hashlib
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from deploy.errors import DeployError
from deploy.stack.state import State, sync_folder, write
from deploy.tune.experiment import Alone, Trial
from deploy.validation import first_mistake

Record = TypeVar("Record", bound=BaseModel)
PLAN, TRIALS, ALONE, REPORT, OVER = "plan.json", "trials.jsonl", "alone.jsonl", "report.json", "over"


class DamagedExperiment(DeployError):
    """An experiment's files cannot be read."""


@dataclass(frozen=True)
class Store:
    """The files of one experiment."""

    folder: Path

    @property
    def report(self) -> Path:
        return self.folder / REPORT

    @property
    def loads(self) -> Path:
        """Where the load tests write."""
        return self.folder / "trials"

    def close(self) -> None:
        """No other call goes on with it."""
        write(self.folder / OVER, "")

    def trials(self) -> list[Trial]:
        """What was measured so far. Raises DamagedExperiment."""
        return _read(self.folder / TRIALS, Trial)

    def alone(self) -> list[Alone]:
        """The ops that were timed alone. Raises DamagedExperiment."""
        return _read(self.folder / ALONE, Alone)

    def add(self, record: Trial | Alone) -> None:
        """Write a record so that it outlasts a power cut."""
        file = self.folder / (TRIALS if isinstance(record, Trial) else ALONE)
        with file.open("ab+") as stream:
            stream.seek(0)
            whole = stream.read()
            # A run that was killed while it wrote has left half a line.
            stream.truncate(whole.rfind(b"\n") + 1)
            stream.write(record.model_dump_json().encode() + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        sync_folder(self.folder)


def key_of(plan: dict[str, Any]) -> str:
    """What an experiment's results depend on: another plan, another experiment."""
    return hashlib.sha256(json.dumps(plan, sort_keys=True, default=str).encode()).hexdigest()


def open_store(state: State, plan: dict[str, Any], *, fresh: bool) -> tuple[Store, bool]:
    """The newest experiment of this plan that is not over, else a new one.

    Args:
        fresh: always a new one.

    Returns:
        The experiment, and whether it goes on.
    """
    place = state.folder / "tune"
    key = key_of(plan)
    if not fresh and place.is_dir():
        for folder in sorted((one for one in place.iterdir() if one.is_dir()), reverse=True):
            if not (folder / OVER).exists() and _key(folder / PLAN) == key:
                return Store(folder), True
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    taken = [stamp, *(f"{stamp}-{number}" for number in range(1, 100))]
    folder = next(place / name for name in taken if not (place / name).exists())
    write(folder / PLAN, json.dumps({"key": key, **plan}, indent=2, default=str) + "\n")
    return Store(folder), False


def _key(file: Path) -> str:
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _read(file: Path, kind: type[Record]) -> list[Record]:
    try:
        lines = file.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    try:
        return [kind.model_validate_json(line) for line in lines]
    except ValidationError as error:
        raise DamagedExperiment(
            f"{file} cannot be read", first_mistake(error), "deploy tune --fresh begins anew"
        ) from None
