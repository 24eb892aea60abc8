"""The engine image on this host: as it is, else from the registry, else built."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from python_on_whales import DockerClient

from deploy.image.build import BuildEvent, ImageReference, ensure_image, find_image
from deploy.image.inputs import image_tag, read_inputs
from deploy.image.registry import Client, NotInRegistry, RegistryUnreachable, parse_registry
from deploy.image.transfer import pull
from deploy.lock.model import ImageLock


@dataclass(frozen=True)
class Sources:
    """Where the image may come from.

    Attributes:
        registry: its address, empty for none.
        mirror: Debian archive for a build; `security_mirror` likewise.
    """

    registry: str = ""
    mirror: str | None = None
    security_mirror: str | None = None


@dataclass(frozen=True)
class Obtained:
    """An image that is here now, and in words where it came from."""

    image: ImageReference
    origin: str


def obtain(
    repository: Path,
    locked: ImageLock | None,
    sources: Sources,
    progress: Callable[[BuildEvent], None] = lambda event: None,
    docker: DockerClient | None = None,
) -> Obtained:
    """Have the image that the repository's files decide.

    What the registry has instead of the locked image is refused, not replaced by a build: somebody changed it.

    Args:
        locked: deploy.lock's image; only this one is taken from a registry.
        progress: as `ensure_image` has it.

    Raises:
        DeployError: the registry holds another image than the locked one, or the build fails.
        HostError: Docker does not answer, or the disk is too small.
    """
    docker = docker or DockerClient()
    if found := find_image(image_tag(repository), docker):
        return Obtained(found, "already here")
    why = "built"
    if sources.registry:
        registry = parse_registry(sources.registry)
        if not (locked and locked.id and locked.inputs == read_inputs(repository).hash):
            why = f"built; deploy.lock does not know it, so {registry.host} was not asked"
        else:
            try:
                return _pulled(locked, Client(registry), docker, progress)
            except NotInRegistry:
                why = f"built; {registry.host} has not got it"
            except RegistryUnreachable as error:
                why = f"built; {error.message}"
        progress(BuildEvent("packages", why.removeprefix("built; "), "finished"))
    image = ensure_image(
        repository,
        progress=progress,
        docker=docker,
        mirror=sources.mirror,
        security_mirror=sources.security_mirror,
    )
    return Obtained(image, why)


def _pulled(
    locked: ImageLock, client: Client, docker: DockerClient, progress: Callable[[BuildEvent], None]
) -> Obtained:
    step, begun = f"layers from {client.registry.host}", time.monotonic()

    def passed(what: str, done: int, total: int) -> None:
        words = step if what == "layers" else "load into Docker"
        progress(BuildEvent("registry", words, "progress", "", done, total))

    with client:
        progress(BuildEvent("registry", step, "started"))
        pulled = pull(locked, client, docker=docker, progress=passed)
        progress(BuildEvent("registry", step, "finished", seconds=time.monotonic() - begun))
    return Obtained(pulled.image, f"{pulled.layers} layers, {pulled.size / 1e6:,.1f} MB from {client.registry.host}")
