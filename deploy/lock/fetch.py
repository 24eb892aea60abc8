"""Brings one file from an address into a cache, by its hash."""

import hashlib
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import httpx

from deploy.errors import DeployError

CHUNK_BYTES = 1 << 18
TIMEOUT_S = 60


def default_cache() -> Path:
    """Where fetched wheels stay: below `$XDG_CACHE_HOME`, or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "deepseek-v4-flash-sm120" / "wheels"


def fetch(
    url: str,
    sha256: str,
    cache: Path,
    progress: Callable[[int, int], None] = lambda done, total: None,
    certificates: Path | None = None,
) -> Path:
    """Return the file with this hash; what is in the cache is verified, not fetched again.

    Args:
        url: its address; the last part names it in messages.
        cache: folder of files named by their hash.
        progress: called with bytes fetched and bytes in all.
        certificates: PEM file of the authorities to trust; `SSL_CERT_FILE` or the usual ones if None.

    Raises:
        DeployError: the address does not answer, or what comes has another hash.
    """
    name = url.rsplit("/", 1)[-1]
    path = cache / sha256
    if path.is_file():
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == sha256:
                return path
    cache.mkdir(parents=True, exist_ok=True)
    partial = cache / f"{sha256}.{os.getpid()}.part"
    digest = hashlib.sha256()
    try:
        # The authorities and proxies of this machine: a client with a transport of its own would ignore the proxies.
        trusted = ssl.create_default_context(cafile=str(certificates) if certificates else None)
        with (
            httpx.Client(verify=trusted, timeout=TIMEOUT_S, follow_redirects=True) as client,
            client.stream("GET", url) as response,
            partial.open("wb") as file,
        ):
            response.raise_for_status()
            total = int(response.headers.get("Content-Length", 0))
            done = 0
            for chunk in response.iter_bytes(CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
                done += len(chunk)
                progress(done, total)
        if digest.hexdigest() != sha256:
            raise DeployError(
                f"{name} is not the file that uv.lock names",
                f"{url} has sha256 {digest.hexdigest()}, expected {sha256}",
                "something between here and the package index alters files: try another network",
            )
        partial.replace(path)
    except httpx.HTTPError as error:
        raise DeployError(
            f"{name} could not be fetched",
            f"{url}: {error or type(error).__name__}",
            "check the network and the certificates (--certificates FILE), then run the command again; "
            "deploy.lock is as it was",
        ) from error
    except OSError as error:
        raise DeployError(f"{name} could not be fetched", str(error), f"check {error.filename or cache}") from error
    finally:
        partial.unlink(missing_ok=True)
    return path
