"""The packed cache in a registry: an artifact beside the image, under a tag of its input hash and the GPU's kind."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.bake import container
from deploy.bake.container import Packed
from deploy.errors import DeployError
from deploy.fetch import Item, cache_folder, fetch
from deploy.host.report import Gpu
from deploy.image.registry import Client, Manifest, NotInRegistry, RegistryUnreachable
from deploy.image.transfer import ADVICE
from deploy.lock.model import ImageLock, LockedCache
from deploy.stack.state import State, write

MEDIA_TYPE = "application/vnd.deepseek-v4-flash-sm120.caches.v1.tar+zstd"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Baked:
    """A cache that went into a registry."""

    cache: LockedCache
    reference: str
    packed: Packed


def gpu_kind(profile: str, gpus: Sequence[Gpu]) -> str:
    """What compiled code depends on: `sm_120` and the like, or `cpu`.

    Raises:
        DeployError: this host has no GPUs or several kinds of them.
    """
    if profile == "cpu":
        return "cpu"
    kinds = sorted({f"sm_{gpu.compute_capability.replace('.', '')}" for gpu in gpus if gpu.compute_capability})
    if len(kinds) != 1:
        raise DeployError(
            "this host's GPUs do not say which code they run",
            f"nvidia-smi names {', '.join(kinds) or 'no compute capability'}",
            "deploy doctor; bake on a host with GPUs of one kind",
        )
    return kinds[0]


def tag(image: ImageLock, gpu: str) -> str:
    """Where the cache lies beside its image."""
    return f"{image.inputs[:16]}-caches-{gpu}"


def find(image: ImageLock | None, gpu: str) -> LockedCache | None:
    """The locked cache for a kind of GPU."""
    return next((cache for cache in image.cache if cache.gpu == gpu), None) if image else None


def bake(project: str, image: ImageLock, name: str, gpu: str, client: Client, harvested: Progress) -> Baked:
    """Take the engines' cache and put it beside the image.

    Args:
        project: whose cache it is; Docker's names begin with it.
        name: what Docker calls the image.
        harvested: called with bytes packed and in all.

    Raises:
        DeployError: the image itself is not in the registry, or the cache cannot be read.
    """
    subject = image_manifest(image, client)
    with tempfile.TemporaryDirectory(dir=_folder()) as folder:
        file = Path(folder, "caches")
        packed = container.pack(project, name, file, harvested)
        if not packed.files:
            raise DeployError(
                "there is nothing to bake",
                f"the volume {container.volume_name(project)} holds nothing that was compiled",
                "deploy up, and bake once it serves",
            )
        content = file.read_bytes()
        manifest = client.put_artifact(tag(image, gpu), MEDIA_TYPE, content, subject)
    (layer,) = manifest.layers
    cache = LockedCache(gpu=gpu, manifest=manifest.digest, blob=layer.digest, size=layer.size)
    return Baked(cache, f"{client.registry.name}@{manifest.digest}", packed)


def image_manifest(image: ImageLock, client: Client) -> Manifest:
    """The image's manifest in the registry, beside which its caches lie.

    Raises:
        DeployError: the image is not there.
    """
    if not image.manifest:
        raise DeployError(
            "the image is in no registry", "a cache lies beside its image, and deploy.lock names none", "deploy push"
        )
    return client.manifest(image.manifest)


def with_cache(image: ImageLock, cache: LockedCache) -> ImageLock:
    """The image with this cache in the place of an older one for the same GPUs."""
    others = [other for other in image.cache if other.gpu != cache.gpu]
    return image.model_copy(update={"cache": tuple(sorted([*others, cache], key=lambda one: one.gpu))})


def restore(
    project: str,
    image: ImageLock,
    name: str,
    gpu: str,
    client: Client,
    state: State,
    progress: Progress = lambda done, total: None,
) -> str:
    """Fill the project's cache with the locked one, once for each volume. Returns in words what was done.

    A registry that does not answer or has no such cache is no reason not to start: the engines compile for themselves.

    Args:
        name: what Docker calls the image.
        progress: called with bytes fetched and in all.

    Raises:
        DeployError: the registry holds something else than was locked.
    """
    cache = find(image, gpu)
    if cache is None:
        return f"none baked for {gpu} (deploy bake): what the image lacks is compiled"
    record = state.folder / "caches.json"
    if _recorded(record) == _mark(project, cache):
        return "already here"
    target = _folder() / cache.blob.removeprefix("sha256:")
    item = Item(
        f"compiled kernels for {gpu}",
        client.blob_address(cache.blob),
        cache.blob.removeprefix("sha256:"),
        target,
        cache.size,
    )
    try:
        # Asked first: it tells an absent cache, and a registry that is away, from an altered one.
        client.manifest(cache.manifest)
        fetch([item], client.http, ADVICE, progress)
    except NotInRegistry:
        return f"{client.registry.host} has none for {gpu}: what the image lacks is compiled"
    except RegistryUnreachable as error:
        return f"{error.message}: what the image lacks is compiled"
    came = container.unpack(project, name, target)
    target.unlink(missing_ok=True)
    write(record, json.dumps(_mark(project, cache)))
    return f"{came} files, {cache.size / 1e6:,.1f} MB from {client.registry.host}"


def _mark(project: str, cache: LockedCache) -> dict[str, str]:
    return {"volume": container.volume_name(project), "made": container.volume_made(project), "cache": cache.manifest}


def _recorded(record: Path) -> object:
    try:
        return json.loads(record.read_text())
    except (OSError, ValueError):
        return None


def _folder() -> Path:
    folder = cache_folder("caches")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
