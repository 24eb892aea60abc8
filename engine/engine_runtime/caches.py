"""Takes what the engine's compilers left in their cache out of a container and puts it into another's.

Usage: python -m engine_runtime.caches pack > FILE      the cache as a tar
       python -m engine_runtime.caches unpack < FILE    what is not there yet
       python -m engine_runtime.caches count            files and bytes that `pack` would take, as JSON

What only a running compiler needs (locks, half-written files) and links into the image stay out.
"""

import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

CACHE = Path("/var/cache/engine")
TRANSIENT = ("tmp", "lock", "locks")
TRANSIENT_STARTS, TRANSIENT_ENDS = ("tmp.", ".staging-", ".restoring-"), (".lock", ".part", ".tmp")


def is_transient(name: str) -> bool:
    """Whether a file or folder of this name belongs to a compilation under way."""
    return name in TRANSIENT or name.startswith(TRANSIENT_STARTS) or name.endswith(TRANSIENT_ENDS)


def members(cache: Path) -> Iterator[Path]:
    """What is worth keeping, in an order that does not depend on the file system."""
    for folder, folders, names in os.walk(cache):
        folders[:] = sorted(name for name in folders if not is_transient(name))
        for name in sorted(names):
            path = Path(folder, name)
            if not is_transient(name) and path.is_file() and not path.is_symlink():
                yield path


def pack(cache: Path, target: IO[bytes]) -> None:
    """Write the cache as a tar. Files keep their times, which ninja compares, in whole seconds: never later ones."""
    with tarfile.open(fileobj=target, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for path in members(cache):
            try:
                information = archive.gettarinfo(path, str(path.relative_to(cache)))
                file = path.open("rb")
            except FileNotFoundError:
                # An engine that runs beside this may clear up.
                continue
            with file:
                information.mtime = int(information.mtime)
                information.uid = information.gid = 0
                information.uname = information.gname = ""
                archive.addfile(information, file)


def unpack(cache: Path, source: IO[bytes]) -> int:
    """Put the files of a tar into the cache, each whole or not at all; what is there stays. Returns how many came.

    Raises:
        tarfile.TarError: it is cut, or has members that would leave the cache.
    """
    came = 0
    cache.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".restoring-", dir=cache))
    try:
        with tarfile.open(fileobj=source, mode="r|") as archive:
            for member in archive:
                _extract(archive, member, staging)
        for path in members(staging):
            place = cache / path.relative_to(staging)
            if place.exists() or any(parent.is_file() for parent in place.parents):
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
            came += 1
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return came


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write one member below a folder. By hand: Debian's Python 3.11.2 has no extraction filters yet."""
    name = PurePosixPath(member.name)
    content = archive.extractfile(member) if member.isreg() else None
    if content is None or name.is_absolute() or ".." in name.parts:
        raise tarfile.TarError(f"{member.name} is no file of a cache")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        shutil.copyfileobj(content, file)
    path.chmod(member.mode & 0o755)
    os.utime(path, (member.mtime, member.mtime))


def count(cache: Path) -> dict[str, int]:
    """How many files `pack` would take, and their bytes."""
    sizes = [path.stat().st_size for path in members(cache)]
    return {"files": len(sizes), "bytes": sum(sizes)}


def main() -> None:
    """Do what the command line names."""
    verb = sys.argv[1] if len(sys.argv) == 2 else ""
    if verb == "pack":
        pack(CACHE, sys.stdout.buffer)
    elif verb == "unpack":
        try:
            came = unpack(CACHE, sys.stdin.buffer)
        except (tarfile.TarError, OSError) as error:
            sys.exit(f"engine_runtime.caches: {error or type(error).__name__}")
        sys.stdout.write(json.dumps({"files": came}) + "\n")
    elif verb == "count":
        sys.stdout.write(json.dumps(count(CACHE)) + "\n")
    else:
        sys.exit("usage: python -m engine_runtime.caches pack|unpack|count")


if __name__ == "__main__":
    main()
