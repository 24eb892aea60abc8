"""Moves the engine image between hosts: to and from a registry, and as a file. Nothing comes in that is not locked."""

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from python_on_whales import DockerClient
from python_on_whales.exceptions import DockerException

from deploy.errors import DeployError
from deploy.fetch import Advice, Item, cache_folder, fetch
from deploy.image.archive import Image, diff_ids, read_archive, stream, write_archive
from deploy.image.build import ImageReference, find_image, require_room
from deploy.image.inputs import IMAGE_NAME
from deploy.image.registry import Client, Descriptor, Manifest, NotInRegistry
from deploy.lock.model import ImageLock

ADVICE = Advice(
    altered="do not use this registry before it is clear who changed it; deploy build makes the image here",
    missing="deploy push on the host that built it, or deploy build here",
    unreachable="check the network and the registry's address",
)
DOCKER_FOLDER = Path("/var/lib/docker")
KEPT_BYTES = 16 * 2**20
"""Packed layers up to this size stay in the cache: those above the wheels. Docker gives none of its own back."""

Progress = Callable[[str, int, int], None]


def _quiet(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True)
class Pushed:
    """An image in a registry.

    Attributes:
        image: the locked image with the registry's names for it and for its layers.
        reference: the image there, by digest.
        changed: False if the registry had it.
    """

    image: ImageLock
    reference: str
    changed: bool


@dataclass(frozen=True)
class Pulled:
    """An image that came to this host.

    Attributes:
        layers: how many were transferred; the others were here.
        size: bytes transferred.
    """

    image: ImageReference
    layers: int
    size: int


def tag_of(image: ImageLock) -> str:
    """Name and tag of a locked image on every host."""
    return f"{IMAGE_NAME}:{image.inputs[:16]}"


def require_built(image: ImageLock | None) -> ImageLock:
    """The locked image, whose digest everything that comes in is held against.

    Raises:
        DeployError: none is locked.
    """
    if image is None or not image.id:
        raise DeployError(
            "deploy.lock has no image yet",
            "only an image whose digest is locked can be told from another",
            "deploy build, then deploy lock --update image, then commit deploy.lock",
        )
    return image


def push(
    locked: ImageLock, client: Client, *, docker: DockerClient | None = None, progress: Progress = _quiet
) -> Pushed:
    """Put the locked image into a registry under its own tag; layers that are there stay.

    Docker compresses and sends the layers, so that a changed kernel costs one small layer and no reading of the rest.

    Raises:
        DeployError: the image is not on this host or another one, or the registry refuses.
    """
    docker = docker or DockerClient()
    image, tag = require_built(locked), locked.inputs[:16]
    there = None
    if image.manifest and (there := client.known(image.manifest)):
        if client.digest(tag) != there.digest:
            client.put_manifest(tag, there.content, there.media_type)
    else:
        _require_local(image, docker)
        name = f"{client.registry.name}:{tag}"
        docker.image.tag(tag_of(image), name)
        try:
            _push(docker, name, image, progress)
        finally:
            docker.image.remove(name)
    manifest = client.manifest(tag)
    _require_locked("the registry", image, manifest)
    layers = tuple(
        layer.model_copy(update={"blob": blob.digest, "blob_size": blob.size})
        for layer, blob in zip(image.layer, manifest.layers, strict=True)
    )
    known = image.model_copy(update={"manifest": manifest.digest, "layer": layers})
    return Pushed(known, f"{client.registry.name}@{manifest.digest}", there is None)


def _require_local(image: ImageLock, docker: DockerClient) -> None:
    tag = tag_of(image)
    found = find_image(tag, docker)
    if found is None:
        raise DeployError(f"{tag} is not on this host", "Docker has no image of this name", "deploy build")
    if found.id not in (image.id, image.manifest):
        raise DeployError(
            f"{tag} on this host is not the locked image",
            f"deploy.lock expects {image.id}, Docker has {found.id}",
            "deploy build --rebuild; if that gives the same again, deploy lock --update image",
        )


def _push(docker: DockerClient, name: str, image: ImageLock, progress: Progress) -> None:
    """Push, and take Docker's word for which layers have arrived."""
    sizes = {layer.diff_id.removeprefix("sha256:")[:12]: layer.size for layer in image.layer}
    total, arrived = sum(sizes.values()), set[str]()
    progress("layers", 0, total)
    lines = cast("Iterator[tuple[str, bytes]]", docker.image.push(name, stream_logs=True))
    try:
        for _, line in lines:
            match = re.match(r"([0-9a-f]{12}): (Pushed|Layer already exists|Mounted from)", line.decode())
            if match and match[1] in sizes:
                arrived.add(match[1])
                progress("layers", sum(sizes[layer] for layer in arrived), total)
    except DockerException as error:
        raise DeployError(
            f"{name} could not be pushed",
            (error.stderr or str(error)).strip(),
            f"check the registry's address; docker login {name.partition('/')[0]}; a registry without TLS must be "
            "among insecure-registries in /etc/docker/daemon.json; run it again: layers that arrived stay",
        ) from error


def pull(
    locked: ImageLock,
    client: Client,
    *,
    docker: DockerClient | None = None,
    cache: Path | None = None,
    progress: Progress = _quiet,
) -> Pulled:
    """Bring the locked image from a registry to this host; layers that are here are not transferred.

    Every byte is verified before Docker sees it: the manifest by its digest, the configuration by the image's id, each
    layer by the manifest. What arrived before a cut or an interruption stays in the cache for the next time.

    Raises:
        NotInRegistry: the registry has no such image.
        RegistryUnreachable: it does not answer.
        DeployError: it has another image in the place of the locked one, or something was altered.
        HostError: the disk is too small.
    """
    docker = docker or DockerClient()
    image = require_built(locked)
    cache = cache or cache_folder("blobs")
    manifest = _offered(image, client)
    _require_locked(client.registry.host, image, manifest)
    here = common_layers(docker, [layer.diff_id for layer in image.layer])
    missing = list({layer.digest: layer for layer in manifest.layers[here:]}.values())
    size = sum(layer.size for layer in missing)
    _require_room(docker, cache, size, sum(layer.size for layer in image.layer[here:]))
    files = {blob.digest: cache / blob.sha256 for blob in (manifest.config, *missing)}
    items = [
        Item(f"layer {blob.digest}", client.blob_address(blob.digest), blob.sha256, files[blob.digest], blob.size)
        for blob in (manifest.config, *missing)
    ]
    absent = [layer for layer in missing if not files[layer.digest].exists()]
    fetch(items, client.http, ADVICE, lambda done, total: progress("layers", done, total))
    config = files[manifest.config.digest].read_bytes()
    arrived = Image(manifest, config, {layer.digest: _opener(files[layer.digest]) for layer in missing})
    found = load(arrived, image, docker, progress)
    _clear(cache, manifest)
    return Pulled(found, len(absent), sum(layer.size for layer in absent))


def _clear(cache: Path, manifest: Manifest) -> None:
    """Leave the small layers for the pull of the next image, and what a cut pull of another left of large ones."""
    ours = {layer.sha256 for layer in manifest.layers}
    for path in cache.iterdir():
        small = path.stat().st_size <= KEPT_BYTES
        if small != (path.name in ours):
            path.unlink(missing_ok=True)


def _offered(image: ImageLock, client: Client) -> Manifest:
    """The manifest that the lock names, or the one under the image's tag if the lock names none yet."""
    tag = image.inputs[:16]
    if not image.manifest:
        return client.manifest(tag)
    try:
        return client.manifest(image.manifest)
    except NotInRegistry:
        if other := client.digest(tag):
            raise _other(f"{client.registry.name}:{tag}", image.manifest, other) from None
        raise


def _require_locked(where: str, image: ImageLock, manifest: Manifest) -> None:
    if image.id not in (manifest.config.digest, manifest.digest):
        raise _other(where, image.id, manifest.config.digest)
    blobs = [layer.digest for layer in manifest.layers]
    known = [layer.blob for layer in image.layer]
    if len(blobs) != len(known) or (image.manifest and all(known) and blobs != known):
        raise _other(where, " ".join(known) or f"{len(known)} layers", " ".join(blobs))


def _other(where: str, expected: str, found: str) -> DeployError:
    return DeployError(
        f"{where} has another image in the place of the locked one",
        f"deploy.lock expects {expected}, there is {found}",
        "do not use it before it is clear who changed it; deploy build makes the image here",
    )


def common_layers(docker: DockerClient, wanted: Sequence[str]) -> int:
    """How many layers of an image, from the lowest, this host has as part of another of its images."""
    images = docker.image.list(filters=[("label", f"org.opencontainers.image.title={IMAGE_NAME}")])
    return max((common_prefix(wanted, image.root_fs.layers or []) for image in images), default=0)


def common_prefix(one: Sequence[str], other: Sequence[str]) -> int:
    """How many elements two sequences have in common before they first differ."""
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


def _require_room(docker: DockerClient, cache: Path, packed: int, unpacked: int) -> None:
    """In the cache the layers as they come; with Docker a copy of them, and what they unpack to."""
    cache.mkdir(parents=True, exist_ok=True)
    root = Path(docker.system.info().docker_root_dir or DOCKER_FOLDER)
    places = [(cache, "the layers arrive", packed)]
    if root.is_dir():  # else the engine is on another host
        shared = root.stat().st_dev == cache.stat().st_dev
        places.append((root, "Docker keeps its data", packed + unpacked + (packed if shared else 0)))
    for place, use, needed in places:
        require_room("fetching it", place, use, needed)


def _opener(path: Path) -> Callable[[], IO[bytes]]:
    return lambda: path.open("rb")


def load(image: Image, locked: ImageLock, docker: DockerClient, progress: Progress = _quiet) -> ImageReference:
    """Hand an image to Docker, which verifies each unpacked layer against the image's configuration.

    Raises:
        DeployError: it is not the locked image, or Docker refuses it.
    """
    if image.id != locked.id and image.manifest.digest not in (locked.id, locked.manifest):
        raise _other("what came", locked.id, image.id)
    if diff_ids(image.config) != [layer.diff_id for layer in locked.layer]:
        raise _other("what came", "the locked layers", " ".join(diff_ids(image.config)))
    tag = tag_of(locked)
    command = [*cast("list[str]", docker.client_config.docker_cmd), "image", "load", "--quiet"]
    # In a session of its own: Ctrl-C reaches us first, and we end it.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        assert process.stdin and process.stdout
        try:
            # If it gives up, what it says tells why.
            with suppress(BrokenPipeError):
                for chunk in stream(image, tag, lambda done, total: progress("image", done, total)):
                    process.stdin.write(chunk)
            with suppress(BrokenPipeError):
                process.stdin.close()
            said = process.stdout.read().decode(errors="replace").strip()
        except BaseException:
            process.kill()
            raise
    found = find_image(tag, docker) if process.returncode == 0 else None
    if found is None:
        raise DeployError("Docker did not take the image", said, "docker info; then run the same command again")
    if found.id not in (locked.id, locked.manifest, image.manifest.digest):
        docker.image.remove(tag)
        raise _other("Docker", locked.id, found.id)
    return found


def export(
    locked: ImageLock, file: Path, *, docker: DockerClient | None = None, progress: Progress = _quiet
) -> Manifest:
    """Write the locked image into one file, an OCI archive, for hosts without network.

    Raises:
        DeployError: the image is not on this host or another one, or the file cannot be written.
    """
    docker = docker or DockerClient()
    image = require_built(locked)
    _require_local(image, docker)
    total = sum(layer.size for layer in image.layer)
    command = [*cast("list[str]", docker.client_config.docker_cmd), "image", "save", tag_of(image)]
    partial = file.with_name(f".{file.name}.part")
    try:
        with (
            partial.open("wb") as target,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as saving,
        ):
            assert saving.stdout and saving.stderr
            try:
                progress("layers", 0, total)
                manifest = write_archive(
                    saving.stdout, tag_of(image), image.id, target, lambda done: progress("layers", done, total)
                )
            except BaseException:
                saving.kill()
                raise
            words = saving.stderr.read().decode(errors="replace").strip()
        if saving.returncode:
            raise ValueError(words)
        partial.replace(file)
    except ValueError as error:
        raise DeployError("the image could not be saved", str(error), "docker info; then run it again") from error
    finally:
        partial.unlink(missing_ok=True)
    return manifest


def import_archive(
    locked: ImageLock, file: Path, *, docker: DockerClient | None = None, progress: Progress = _quiet
) -> Pulled:
    """Bring the locked image from an OCI archive to this host.

    Raises:
        DeployError: the file is cut or damaged, or holds another image than the locked one.
    """
    docker = docker or DockerClient()
    image = require_built(locked)
    with read_archive(file, lambda done, total: progress("archive", done, total)) as archived:
        here = common_layers(docker, [layer.diff_id for layer in image.layer])
        missing = [layer for layer in archived.manifest.layers[here:]]
        chosen = Image(archived.manifest, archived.config, _only(archived.blobs, missing))
        found = load(chosen, image, docker, progress)
    return Pulled(found, len(missing), sum(layer.size for layer in missing))


def _only(
    blobs: Mapping[str, Callable[[], IO[bytes]]], layers: Sequence[Descriptor]
) -> Mapping[str, Callable[[], IO[bytes]]]:
    return {layer.digest: blobs[layer.digest] for layer in layers}
