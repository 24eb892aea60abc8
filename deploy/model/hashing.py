"""Hashes of a model's files: whole, in parallel; or of a few blocks, which takes no time and still sees most damage."""

import errno
import hashlib
import mmap
import os
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from deploy.errors import DeployError
from deploy.lock.model import LockedFile, ModelLock

BLOCK_BYTES = 1 << 16
BLOCKS = 16
CHUNK_BYTES = 4 << 20
# While one thread waits for the disk another computes.
WORKERS_PER_PROCESSOR = 2

Progress = Callable[[int, int], None]


def _quiet(done: int, total: int) -> None:
    pass


def sample(path: Path) -> str:
    """Hash a file's size and BLOCKS blocks of it at even distances, the first and the last among them.

    A file that is cut, mixed up with another or only partly written shows; one flipped byte elsewhere does not.

    Returns:
        sha256, 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(str(size).encode())
        last = max(size - BLOCK_BYTES, 0)
        for offset in sorted({last * block // (BLOCKS - 1) for block in range(BLOCKS)}):
            file.seek(offset)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def hash_files(paths: Iterable[Path], progress: Progress = _quiet, workers: int | None = None) -> dict[Path, str]:
    """Hash whole files, the largest first, past the page cache: it holds no model, and copying out of it takes time.

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
        for chunk in _chunks(path):
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


def _chunks(path: Path) -> Generator[memoryview]:
    """A file's content piece by piece, each valid until the next."""
    descriptor = _open_direct(path)
    try:
        # Such a buffer begins on a page, which reading without the page cache needs.
        with mmap.mmap(-1, CHUNK_BYTES) as buffer, memoryview(buffer) as view:
            offset, size = 0, os.fstat(descriptor).st_size
            # Not once more at the end: some file systems refuse what does not begin on a block.
            while offset < size and (count := os.preadv(descriptor, [view], offset)):
                with view[:count] as chunk:
                    yield chunk
                offset += count
    finally:
        os.close(descriptor)


def _open_direct(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # A file system in memory, for example, knows no other way than the page cache.
        return os.open(path, os.O_RDONLY)
    return descriptor


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
