"""Reads large files from front to back, past the page cache: it holds no model, and copying out of it takes time."""

import errno
import hashlib
import mmap
import os
from collections.abc import Generator
from pathlib import Path

CHUNK_BYTES = 4 << 20


def file_sha256(path: Path) -> str:
    """sha256 of a file, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for chunk in chunks(path):
        digest.update(chunk)
    return digest.hexdigest()


def chunks(path: Path) -> Generator[memoryview]:
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
