"""Generations: what each accepted `up` ran with, in a folder of its own, and which of them is the current one.

    generations/N/generation.json   when, by which verb, which image, SHA-256 of the other files
                  deploy.toml, deploy.lock, stack.env, compose/, compose.json (rendered), acceptance.json
    current -> generations/N        what the containers should be; no link: nothing

A generation is written beside its place and renamed; `current` is replaced by a rename. So a reader, or the next
command after a power cut, finds the old state or the new one.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from deploy.errors import DeployError
from deploy.spec.model import Profile, Transport
from deploy.stack.state import State, sync_folder, write
from deploy.validation import first_mistake

RECORD, ENVIRONMENT, RENDERED, COMPOSE = "generation.json", "stack.env", "compose.json", "compose"
SPEC, LOCK, ACCEPTANCE = "deploy.toml", "deploy.lock", "acceptance.json"


# Only such names: there are digits that `int` does not read.
NUMBER = re.compile(r"[0-9]+")


class Damaged(DeployError):
    """A generation's files are not what was written."""


class Generation(BaseModel):
    """One accepted `up`.

    Attributes:
        time: when it was accepted, ISO 8601, UTC.
        image: tag of the engine image; `image_id` is what it must be.
        digests: SHA-256 of every other file of the folder, by path.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    time: str
    verb: str
    profile: Profile
    transport: Transport
    gpus_per_engine: int
    image: str
    image_id: str
    digests: dict[str, str]
    front: bool = False
    metrics_page: bool = False


@dataclass(frozen=True)
class Candidate:
    """What a stack is about to be started with; a generation once it is accepted.

    Attributes:
        files: content by path below the folder.
    """

    profile: Profile
    transport: Transport
    gpus_per_engine: int
    image: str
    image_id: str
    files: Mapping[str, bytes]
    front: bool = False
    metrics_page: bool = False


def write_candidate(state: State, candidate: Candidate) -> Path:
    """Put the candidate's files where `up` starts from; what was there before is gone."""
    shutil.rmtree(state.candidate, ignore_errors=True)
    for name, content in candidate.files.items():
        write(state.candidate / name, content)
    return state.candidate


def accept_candidate(state: State, candidate: Candidate, verb: str, acceptance: Mapping[str, Any]) -> Generation:
    """Make a generation of the candidate and the current one of it; the same files as now give the same generation.

    Returns:
        The current generation.
    """
    try:
        now = current(state)
    except Damaged:
        now = None
    files = dict(candidate.files)
    if now and (now.image_id, _without_acceptance(now.digests)) == (candidate.image_id, _digests(files)):
        shutil.rmtree(state.candidate, ignore_errors=True)
        return now
    number = max(numbers(state), default=0) + 1
    files[ACCEPTANCE] = (json.dumps(acceptance, indent=2) + "\n").encode()
    generation = Generation(
        number=number,
        time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        verb=verb,
        profile=candidate.profile,
        transport=candidate.transport,
        gpus_per_engine=candidate.gpus_per_engine,
        image=candidate.image,
        image_id=candidate.image_id,
        digests=_digests(files),
        front=candidate.front,
        metrics_page=candidate.metrics_page,
    )
    unfinished = state.generations / ".unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    for name, content in files.items():
        write(unfinished / name, content)
    write(unfinished / RECORD, generation.model_dump_json(indent=2) + "\n")
    unfinished.rename(folder(state, number))
    sync_folder(state.generations)
    switch(state, number)
    shutil.rmtree(state.candidate, ignore_errors=True)
    return generation


def folder(state: State, number: int) -> Path:
    return state.generations / str(number)


def same_text(one: Path, two: Path) -> bool:
    """Whether two files, of which either may be missing, hold the same."""
    return (one.read_bytes() if one.is_file() else b"") == (two.read_bytes() if two.is_file() else b"")


def numbers(state: State) -> list[int]:
    """The generations that there are, oldest first."""
    if not state.generations.is_dir():
        return []
    return sorted(int(path.name) for path in state.generations.iterdir() if NUMBER.fullmatch(path.name))


def current_number(state: State) -> int | None:
    """The current generation's number, None if nothing should run."""
    try:
        name = state.current.readlink().name
    except OSError:
        return None
    return int(name) if NUMBER.fullmatch(name) else None


def current(state: State) -> Generation | None:
    """The current generation.

    Raises:
        Damaged: its record cannot be read.
    """
    number = current_number(state)
    if number is not None and not folder(state, number).exists():
        raise _damaged(state, number, "its folder is gone")
    return None if number is None else read(state, number)


def switch(state: State, number: int | None) -> None:
    """Make a generation the current one, in one step; None: nothing should run."""
    if number is None:
        state.current.unlink(missing_ok=True)
    else:
        link = state.folder / ".current"
        link.unlink(missing_ok=True)
        link.symlink_to(Path(state.generations.name, str(number)))
        link.replace(state.current)
    sync_folder(state.folder)


def read(state: State, number: int) -> Generation:
    """A generation's record.

    Raises:
        DeployError: there is no such generation.
        Damaged: the record cannot be read.
    """
    file = folder(state, number) / RECORD
    try:
        return Generation.model_validate_json(file.read_bytes())
    except FileNotFoundError as error:
        known = ", ".join(map(str, numbers(state))) or "none"
        raise DeployError(f"there is no generation {number}", f"there are: {known}", "deploy generations") from error
    except (OSError, ValueError) as error:
        why = first_mistake(error) if isinstance(error, ValidationError) else str(error)
        raise _damaged(state, number, f"{file.name} cannot be read: {why}") from error


def check(state: State, generation: Generation) -> None:
    """Compare every file of a generation with what was written.

    Raises:
        Damaged: names the files that differ.
    """
    place = folder(state, generation.number)
    wrong: list[str] = []
    for name, digest in generation.digests.items():
        try:
            found = hashlib.sha256((place / name).read_bytes()).hexdigest()
        except OSError:
            found = ""
        if found != digest:
            wrong.append(name)
    if wrong:
        raise _damaged(state, generation.number, f"not as they were written: {', '.join(wrong)}")


def previous(state: State) -> int | None:
    """What `rollback` without a number goes back to: the newest sound generation before the current one.

    With nothing current it is the newest of all.
    """
    now = current_number(state)
    return max((number for number in numbers(state) if now is None or number < now), default=None)


def prune(state: State, keep: int) -> list[int]:
    """Remove all but the newest `keep` generations; the current one and the one before it always stay.

    Returns:
        The numbers that were removed.
    """
    kept = {*numbers(state)[-keep:], current_number(state), previous(state)}
    gone = [number for number in numbers(state) if number not in kept]
    for number in gone:
        # Renamed first: half a generation would be listed as a damaged one.
        doomed = state.generations / f".removed-{number}"
        folder(state, number).rename(doomed)
        shutil.rmtree(doomed)
    return gone


def sweep(state: State) -> None:
    """Remove what a command that was cut off has left unfinished."""
    shutil.rmtree(state.candidate, ignore_errors=True)
    if state.generations.is_dir():
        for path in state.generations.glob(".*"):
            shutil.rmtree(path, ignore_errors=True)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Each value that differs between two rendered compose configurations: path, before, after; "" is absent."""
    one, two = dict(_leaves(before)), dict(_leaves(after))
    return [
        (path, one.get(path, ""), two.get(path, "")) for path in sorted({*one, *two}) if one.get(path) != two.get(path)
    ]


def _leaves(value: Any, path: str = "") -> Iterable[tuple[str, str]]:
    items: Iterable[tuple[Any, Any]]
    if isinstance(value, dict):
        items = value.items()  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    elif isinstance(value, list):
        items = enumerate(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    else:
        yield path, "" if value is None else str(value)
        return
    for key, item in items:  # pyright: ignore[reportUnknownVariableType]
        yield from _leaves(item, f"{path}.{key}" if path else str(key))  # pyright: ignore[reportUnknownArgumentType]


def _digests(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}


def _without_acceptance(digests: Mapping[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in digests.items() if name != ACCEPTANCE}


def _damaged(state: State, number: int, why: str) -> Damaged:
    place = os.path.relpath(folder(state, number))
    return Damaged(f"generation {number} is damaged", why, f"deploy rollback to another, or: rm -r {place}; deploy up")
