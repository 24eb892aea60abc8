"""Hashes of a model's files: whole, in parallel; or of a few blocks, which takes no time and still sees most damage."""

import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from deploy.errors import DeployError
from deploy.lock.model import LockedFile, ModelLock
from deploy.model.sampling import sample
from deploy.reading import chunks

# While one thread waits for the disk another computes.
WORKERS_PER_PROCESSOR = 2

Progress = Callable[[int, int], None]


def _quiet(done: int, total: int) -> None:
    pass


def hash_files(paths: Iterable[Path], progress: Progress = _quiet, workers: int | None = None) -> dict[Path, str]:
    """Hash whole files, the largest first.

    Args:
        progress: called with bytes read and bytes in all, from several threads but never twice at once.
        workers: files at a time.

    Returns:
        sha256 of each file.

    Raises:
        OSError: a file cannot be read.
        KeyboardInterrupt: passed on within a moment, however large the files are.
    """
    sizes = {path: path.stat().st_size for path in paths}
    total, done = sum(sizes.values()), 0
    stop, lock = threading.Event(), threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress(done, total)

    def one(path: Path) -> str:
        digest = hashlib.sha256()
        for chunk in chunks(path):
            if stop.is_set():
                break
            digest.update(chunk)
            advance(len(chunk))
        return digest.hexdigest()

    with ThreadPoolExecutor(workers or (os.cpu_count() or 1) * WORKERS_PER_PROCESSOR) as pool:
        # Submitting is inside as well: the first file is being read before the last one is submitted.
        try:
            waiting = {pool.submit(one, path): path for path in sorted(sizes, key=lambda path: -sizes[path])}
            return {waiting[future]: future.result() for future in as_completed(waiting)}
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def folder_files(folder: Path) -> dict[str, Path]:
    """The files of a model folder by their path in it, hidden ones (a downloader's own) left out."""
    inside = folder.rglob("*") if folder.is_dir() else ()
    return {
        str(path.relative_to(folder)): path
        for path in inside
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


def lock_folder(folder: Path, repo: str = "", revision: str = "", progress: Progress = _quiet) -> ModelLock:
    """Lock the files of a local model folder (`folder_files`).

    Raises:
        DeployError: there is no such folder, or nothing in it.
    """
    files = folder_files(folder)
    if not files:
        raise DeployError(
            f"the model folder {folder} has no files",
            "their hashes go into deploy.lock",
            "set path under [model] in deploy.toml to a folder with the model's files",
        )
    hashes = hash_files(files.values(), progress)
    return ModelLock(
        repo=repo,
        revision=revision,
        file=tuple(
            LockedFile(path=name, size=path.stat().st_size, sha256=hashes[path], sample=sample(path))
            for name, path in sorted(files.items())
        ),
    )
