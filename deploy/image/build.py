"""Builds the engine image, or finds it already there."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from python_on_whales import DockerClient


@dataclass(frozen=True)
class BuildEvent:
    """One step's progress.

    Attributes:
        phase: what the build is busy with; phases come in this order and some may be missing.
        step: the step in words, stable across its events (a row of a progress display).
        state: `started`, `progress`, `log`, `cached` (finished at once, from cache) or `finished`.
        message: a log line, or what was done; may be empty.
        done: units finished so far (bytes for downloads), or None where a step has no measure.
        total: units in all, or None.
        seconds: how long the step took, on `finished`.
    """

    phase: Literal["packages", "bootstrap", "rootfs", "engine", "patches", "kernels", "export"]
    step: str
    state: Literal["started", "progress", "log", "cached", "finished"]
    message: str = ""
    done: int | None = None
    total: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class ImageReference:
    """An image in the local Docker engine.

    Attributes:
        tag: `deepseek-v4-flash-sm120:<input hash>`.
        id: `sha256:…` of its configuration, the same on every host for the same inputs.
        size_bytes: as Docker counts it, unpacked.
        built: False when the image was already there.
    """

    tag: str
    id: str
    size_bytes: int
    built: bool


def ensure_image(
    repository: Path,
    *,
    progress: Callable[[BuildEvent], None] = lambda event: None,
    docker: DockerClient | None = None,
    mirror: str | None = None,
    security_mirror: str | None = None,
    certificates: Path | None = None,
    package_cache: Path | None = None,
    wheel_cache: bool = False,
    uv: Path | None = None,
    rebuild: bool = False,
) -> ImageReference:
    """Return the image that the repository's files decide; build it if this host has not got it.

    Args:
        repository: root of the checkout.
        progress: called from the calling thread with every event.
        docker: which Docker to talk to; the default context if None.
        mirror: Debian archive to fetch locked packages from; the machine's own apt configuration if None.
        security_mirror: the same for the security archive; `<mirror>-security` if None and `mirror` is given.
        certificates: PEM file of the certificate authorities to trust for the Python package index,
            `SSL_CERT_FILE` from the environment if None, else the image's own.
        package_cache: where fetched .deb files stay; `$XDG_CACHE_HOME/deepseek-v4-flash-sm120/debs` if None.
        wheel_cache: keep downloaded wheels in BuildKit's cache (about 5 GB) for the next build of the engine.
        uv: the uv program that the build uses; `<repository>/.tools/bin/uv` if None.
        rebuild: build even if an image with this tag exists, and use no cached step.

    Raises:
        DeployError: Docker does not answer or lacks buildx, the disk is too small, a package is gone or altered,
            a patch does not apply, or a step of the build failed (with its last lines).
        KeyboardInterrupt: passed on after the build has been cancelled; no image is tagged.
    """
    raise NotImplementedError
