"""Compares a model folder with what was locked: in a moment by samples, or every byte."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from deploy.lock.document import replace_text
from deploy.lock.model import LockedFile, ModelLock
from deploy.model.hashing import Progress, folder_files, hash_files
from deploy.model.sampling import sample

# A file that was touched is hashed anew at once up to this size; that takes a fraction of a second.
SMALL_BYTES = 64 << 20


@dataclass(frozen=True)
class FileDrift:
    """A file that is not the locked one, in words."""

    path: str
    expected: str
    found: str


def check_folder(
    folder: Path,
    model: ModelLock,
    *,
    full: bool = False,
    memory: Path | None = None,
    progress: Progress = lambda done, total: None,
) -> list[FileDrift]:
    """Compare each file of a folder with the lock.

    Args:
        folder: the model's folder.
        model: what it should hold.
        full: hash every byte; otherwise compare sizes, samples, and times of change with those of the last full check.
        memory: file that keeps these times between calls.
        progress: of `full`: bytes done and bytes in all.

    Returns:
        One for each file that is missing, differs or is too many, in the order of their names.
    """
    files = folder_files(folder)
    drifts = [
        FileDrift(name, "no such file", f"{path.stat().st_size} bytes")
        for name, path in files.items()
        if name not in {file.path for file in model.file}
    ]
    remembered = _read(memory)
    whole: dict[Path, LockedFile] = {}
    for file in model.file:
        path = files.get(file.path)
        if path is None:
            drifts.append(FileDrift(file.path, f"{file.size} bytes", "no such file"))
            continue
        size = path.stat().st_size
        if size != file.size:
            drifts.append(FileDrift(file.path, f"{file.size} bytes", f"{size} bytes"))
        elif full:
            whole[path] = file
        else:
            touched = remembered.get(str(path.absolute())) not in (None, _stamp(path, file))
            if touched and size <= SMALL_BYTES:
                whole[path] = file
                continue
            try:
                seen = sample(path) if file.sample else ""
            except OSError as error:
                drifts.append(FileDrift(file.path, "a readable file", str(error.strerror or error)))
                continue
            if seen != file.sample:
                drifts.append(FileDrift(file.path, f"sample {file.sample}", f"sample {seen}"))
            elif touched:
                words = "changed since; `deploy verify --full` hashes it"
                drifts.append(FileDrift(file.path, "unchanged since it was last hashed", words))
    for path, digest in _hashed(whole, drifts, progress).items():
        file = whole[path]
        if digest == file.sha256:
            remembered[str(path.absolute())] = _stamp(path, file)
        else:
            drifts.append(FileDrift(file.path, f"sha256 {file.sha256}", f"sha256 {digest}"))
    if memory and whole:
        _write(memory, remembered)
    return sorted(drifts, key=lambda drift: drift.path)


def remember(folder: Path, model: ModelLock, memory: Path) -> None:
    """Note that the files of a folder have just been hashed and are as locked."""
    paths = {file.path: folder / file.path for file in model.file}
    _write(
        memory,
        _read(memory) | {str(paths[file.path].absolute()): _stamp(paths[file.path], file) for file in model.file},
    )


def _hashed(whole: Mapping[Path, LockedFile], drifts: list[FileDrift], progress: Progress) -> dict[Path, str]:
    readable: list[Path] = []
    for path, file in whole.items():
        try:
            path.open("rb").close()
            readable.append(path)
        except OSError as error:
            drifts.append(FileDrift(file.path, "a readable file", str(error.strerror or error)))
    return hash_files(readable, progress)


def _stamp(path: Path, file: LockedFile) -> list[Any]:
    return [path.stat().st_mtime_ns, file.sha256]


def _write(memory: Path, seen: Mapping[str, Any]) -> None:
    memory.parent.mkdir(parents=True, exist_ok=True)
    replace_text(memory, json.dumps(seen, indent=1, sort_keys=True) + "\n")


def _read(memory: Path | None) -> dict[str, Any]:
    """What was seen before; nothing if the file is missing or damaged, since it only saves time."""
    try:
        seen: Any = json.loads(memory.read_text()) if memory else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", seen) if isinstance(seen, dict) else {}
