"""Is the server that is measured the one that the lock describes?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.errors import DeployError
from deploy.lock.model import Lock, load
from deploy.lock.options import agrees, contradictions, options
from loadtest.errors import BenchError
from loadtest.validity import role_of

Reports = Mapping[str, Mapping[str, Any] | None]
_SGLANG = re.compile(r'^name = "sglang"\nversion = "([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Locks:
    """The lock files that a run is held against.

    Attributes:
        files: text by name.
        version: SGLang's, as uv.lock names it.
        lock: deploy.lock.
    """

    files: Mapping[str, str] = field(default_factory=dict[str, str])
    version: str | None = None
    lock: Lock | None = None


def read_locks(given: Path | None, folder: Path) -> Locks:
    """Read the lock that was named, else uv.lock and deploy.lock of a folder where they are.

    Raises:
        BenchError: the named one cannot be read, or one is not what its name says.
    """
    files: dict[str, str] = {}
    for file in [given] if given else [folder / "uv.lock", folder / "deploy.lock"]:
        try:
            files[file.name] = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            if given:
                why = error.strerror if isinstance(error, OSError) else "it is not text"
                raise BenchError(f"cannot read the lock {file}", str(why)) from None
    version = next((found[1] for text in files.values() if (found := _SGLANG.search(text))), None)
    lock = None
    for name, text in files.items():
        if name.endswith("deploy.lock"):
            try:
                lock = load(text, name)
            except DeployError as error:
                raise BenchError(f"cannot read the lock {name}", f"{error}: {error.why}") from None
    return Locks(files, version, lock)


def differences(locks: Locks, reports: Reports, image: str | None) -> list[str]:
    """What the engines say of themselves and the lock says otherwise, in words.

    Args:
        reports: `/server_info` by engine (`decode`, or `decode-2` for the second of a role); None did not answer.
        image: digest of the image that the engines run, None if it is not known.
    """
    found: list[str] = []
    answered = {engine: report for engine, report in reports.items() if report is not None}
    for engine, report in answered.items():
        if locks.version and report.get("version", locks.version) != locks.version:
            found.append(f"{engine} has version = {report['version']!r}, the lock says {locks.version!r}")
    if locks.lock is None or not answered:
        return found
    built = locks.lock.image
    if image and built and built.id and image not in (built.id, built.manifest):
        found.append(f"the engines run image {image[:19]}, the lock says {built.id[:19]}: deploy lock --update image")
    roles = _roles(locks.lock, answered)
    for engine, report in answered.items():
        locked = roles.get(engine) or roles.get(role_of(engine))
        if locked:
            found += [
                f"{engine} has {wrong.key} = {wrong.found}, the lock says {wrong.expected}"
                for wrong in contradictions(locked, report)
            ]
    return found


def is_locked(locks: Locks, reports: Reports) -> bool:
    """Whether deploy.lock knows a profile that these engines can belong to; nothing is known without answers."""
    answered = {engine: report for engine, report in reports.items() if report is not None}
    return not answered or locks.lock is None or bool(_roles(locks.lock, answered))


def _roles(lock: Lock, reports: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Arguments by role of the profile that has all these roles and serves this model; empty if none does."""
    for roles in lock.roles.values():
        arguments = {role: locked.arguments for role, locked in roles.items()}
        if all(
            role_of(engine) in arguments
            and agrees(
                options(arguments[role_of(engine)]).get("--served-model-name", ()), report.get("served_model_name")
            )
            for engine, report in reports.items()
        ):
            return arguments
    return {}
