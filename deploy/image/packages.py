"""Fetches locked .debs by hash, and unpacks the few that the build starts from."""

import hashlib
import os
import ssl
import tarfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, cast
from urllib.parse import quote

import httpx
from debian.arfile import ArFile

from deploy.errors import DeployError
from deploy.lock.debian import LockedPackage, Mirrors

PARALLEL_DOWNLOADS = 8
CHUNK_BYTES = 1 << 20
ATTEMPTS = 3

# Debian bookworm keeps these as links into /usr; a .deb still has files under the old names.
MERGED_DIRECTORIES = ("bin", "lib", "lib64", "sbin")


def default_cache() -> Path:
    """Where fetched .debs stay: below `$XDG_CACHE_HOME`, or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "deepseek-v4-flash-sm120" / "debs"


def fetch(
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
        progress: called with bytes present and bytes in all after each package.

    Returns:
        The file of each package.

    Raises:
        DeployError: a package is gone from the mirror or differs from the lock, or the mirror does not answer.
    """
    cache.mkdir(parents=True, exist_ok=True)
    total = sum(package.size for package in packages)
    files = {package: cache / f"{package.sha256}.deb" for package in packages}
    done = 0
    missing: list[LockedPackage] = []
    for package, path in files.items():
        if path.is_file() and _sha256(path) == package.sha256:
            done += package.size
        else:
            missing.append(package)
    progress(done, total)
    if not missing:
        return files
    sources = mirrors()
    with (
        # The certificate authorities that this machine trusts, not httpx's own list.
        httpx.Client(verify=ssl.create_default_context(), timeout=60, follow_redirects=True) as client,
        ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool,
    ):
        downloads = {pool.submit(_download, client, sources, package, files[package]): package for package in missing}
        try:
            for download in as_completed(downloads):
                download.result()
                done += downloads[download].size
                progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return files


def _download(client: httpx.Client, mirrors: Mirrors, package: LockedPackage, path: Path) -> None:
    address = mirrors.address(package)
    partial = path.with_suffix(".part")
    try:
        attempts = ATTEMPTS
        while True:
            try:
                digest = _transfer(client, address, partial)
                break
            except httpx.TransportError:
                attempts -= 1
                if not attempts:
                    raise
        if digest != package.sha256:
            raise DeployError(
                f"{package.identity} is not the package that was locked",
                f"{address} has sha256 {digest}, deploy.lock expects {package.sha256}",
                "use another mirror (--mirror URL); if this one is right, look at what changed and lock anew: "
                "`deploy lock`",
            )
        partial.replace(path)
    except httpx.HTTPStatusError as error:
        raise DeployError(
            f"{package.identity} is not on the mirror",
            f"{address} answered {error.response.status_code}; mirrors drop a version once a newer one is out",
            "use a dated snapshot archive (--mirror URL), or lock anew: `deploy lock`",
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DeployError(
            f"{package.identity} could not be fetched",
            f"{address}: {error or type(error).__name__}",
            "check the network or name another mirror: --mirror URL; what was fetched stays in the cache",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _transfer(client: httpx.Client, address: str, target: Path) -> str:
    """Write what an address serves to a file, and return its sha256."""
    digest = hashlib.sha256()
    # Version numbers may hold characters that have a meaning in an address.
    scheme, _, rest = address.partition("://")
    with client.stream("GET", f"{scheme}://{quote(rest, safe='/:@')}") as response:
        response.raise_for_status()
        with target.open("wb") as file:
            for chunk in response.iter_bytes(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
