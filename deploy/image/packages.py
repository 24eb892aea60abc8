"""Fetches locked .debs, and unpacks the few that the build starts from."""

import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, cast
from urllib.parse import quote

from debian.arfile import ArFile

from deploy.fetch import Advice, Item, fetch, http_client
from deploy.lock.debian import LockedPackage, Mirrors
from deploy.reading import file_sha256

ADVICE = Advice(
    altered="use another mirror (--mirror URL); if this one is right, look at what changed and lock anew: "
    "deploy lock --update rootfs",
    missing="mirrors drop a version once a newer one is out: use a dated snapshot archive (--mirror URL), or lock "
    "anew: deploy lock --update rootfs",
    unreachable="check the network or name another mirror (--mirror URL)",
)

# Debian bookworm keeps these as links into /usr; a .deb still has files under the old names.
MERGED_DIRECTORIES = ("bin", "lib", "lib64", "sbin")


def fetch_packages(
    packages: Sequence[LockedPackage],
    mirrors: Callable[[], Mirrors],
    cache: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[LockedPackage, Path]:
    """Bring every package into the cache, by hash; what is there already is verified, not fetched.

    Args:
        packages: what to fetch.
        mirrors: asked only when something is missing, so that a full cache needs no mirror.
        cache: directory of `<sha256>.deb`.
        progress: called with bytes done and bytes in all.

    Returns:
        The file of each package.

    Raises:
        DeployError: a package is gone from the mirror or differs from the lock, or the mirror does not answer.
    """
    files = {package: cache / f"{package.sha256}.deb" for package in packages}
    total = sum(package.size for package in packages)
    missing = [package for package, path in files.items() if not _is(path, package.sha256)]
    present = total - sum(package.size for package in missing)
    progress(present, total)
    if missing:
        sources = mirrors()
        items = [Item(p.identity, _quoted(sources.address(p)), p.sha256, files[p], p.size) for p in missing]
        with http_client() as http:
            fetch(items, http, ADVICE, lambda done, _: progress(present + done, total))
    return files


def _is(path: Path, sha256: str) -> bool:
    return path.is_file() and file_sha256(path) == sha256


def _quoted(address: str) -> str:
    """Version numbers may hold characters that have a meaning in an address."""
    scheme, _, rest = address.partition("://")
    return f"{scheme}://{quote(rest, safe='/:@')}"


def write_bootstrap(debs: Iterable[Path], target: Path) -> None:
    """Unpack .debs into one tar, without running any of their scripts: enough of a system to start dpkg in.

    Args:
        debs: .deb files; their order does not matter to the result's use, only to its bytes.
        target: the tar to write.
    """
    seen: set[str] = set(MERGED_DIRECTORIES)
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as bootstrap:
        for name in MERGED_DIRECTORIES:
            link = tarfile.TarInfo(name)
            link.type = tarfile.SYMTYPE
            link.linkname = f"usr/{name}"
            bootstrap.addfile(link)
        for path in debs:
            with _open_data(path) as content:
                for member in content:
                    source = content.extractfile(member) if member.isreg() else None
                    member.name = merged_name(member.name)
                    if member.islnk():
                        member.linkname = merged_name(member.linkname)
                    if member.name and not (member.isdir() and member.name in seen):
                        bootstrap.addfile(member, source)
                    seen.add(member.name)


def _open_data(deb: Path) -> tarfile.TarFile:
    parts = ArFile(str(deb))
    name = next(name for name in parts.getnames() if name.startswith("data.tar"))
    return tarfile.open(fileobj=cast("IO[bytes]", parts.getmember(name)), mode="r:*")


def merged_name(name: str) -> str:
    """Where a file of a .deb lies once /bin, /lib and /sbin are links into /usr: `./bin/sh` is at `usr/bin/sh`."""
    name = name.removeprefix(".").strip("/")
    first, slash, _ = name.partition("/")
    return f"usr/{name}" if slash and first in MERGED_DIRECTORIES else name
