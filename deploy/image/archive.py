"""Images as files: the OCI archive that `export` writes and `import` reads, and the stream that Docker loads.

An archive holds an OCI image layout (opencontainers/image-spec, image-layout.md) and, for Docker's own loader,
manifest.json beside it. The image's configuration goes in as it is, so that the image keeps its id.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import zstandard

from deploy.errors import DeployError
from deploy.image.registry import Descriptor, Manifest, digest_of, parse_manifest

CHUNK_BYTES = 1 << 20
LARGEST_DOCUMENT = 4 << 20
COMPRESSION_LEVEL = 3
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
# How compressed layers begin: containerd's image store keeps them so.
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
INDEX = {"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json"}

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Image:
    """An image in pieces.

    Attributes:
        config: the bytes of its configuration.
        blobs: opens each layer that is at hand, by digest.
    """

    manifest: Manifest
    config: bytes
    blobs: Mapping[str, Callable[[], IO[bytes]]]

    @property
    def id(self) -> str:
        return digest_of(self.config)


def diff_ids(config: bytes) -> list[str]:
    """Digests of the unpacked layers that a configuration lists.

    Raises:
        ValueError: it is none.
    """
    try:
        return [str(digest) for digest in json.loads(config)["rootfs"]["diff_ids"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not an image's configuration: {error}") from error


def stream(image: Image, tag: str, progress: Progress = lambda done, total: None) -> Iterator[bytes]:
    """An image as the tar that `docker load` reads. Layers that are not at hand are left out: Docker must have them.

    Args:
        progress: called with bytes of layers passed and bytes of layers in all.
    """
    for name, content in _documents(image, tag).items():
        yield from _member(name, len(content), io.BytesIO(content))
    at_hand = {layer.digest: layer for layer in image.manifest.layers if layer.digest in image.blobs}
    total, done = sum(layer.size for layer in at_hand.values()), 0
    for digest, layer in at_hand.items():
        with image.blobs[digest]() as file:
            for chunk in _member(_path(digest), layer.size, file):
                yield chunk
                done += len(chunk)
                progress(min(done, total), total)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def _documents(image: Image, tag: str) -> dict[str, bytes]:
    manifest = image.manifest
    entry = {
        "mediaType": manifest.media_type,
        "digest": manifest.digest,
        "size": len(manifest.content),
        "annotations": {
            "io.containerd.image.name": f"docker.io/library/{tag}",
            "org.opencontainers.image.ref.name": tag.rpartition(":")[2],
        },
    }
    layers = [_path(layer.digest) for layer in manifest.layers]
    return {
        "oci-layout": b'{"imageLayoutVersion":"1.0.0"}',
        "index.json": _json({**INDEX, "manifests": [entry]}),
        "manifest.json": _json([{"Config": _path(manifest.config.digest), "RepoTags": [tag], "Layers": layers}]),
        _path(manifest.digest): manifest.content,
        _path(manifest.config.digest): image.config,
    }


def _path(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    return info.tobuf(tarfile.GNU_FORMAT)  # one block, also for more than 8 GiB


def _member(name: str, size: int, file: IO[bytes]) -> Iterator[bytes]:
    yield _header(name, size)
    left = size
    while left and (chunk := file.read(min(CHUNK_BYTES, left))):
        left -= len(chunk)
        yield chunk
    if left:
        raise ValueError(f"{name} ends {left} bytes early")
    yield b"\0" * (-size % tarfile.BLOCKSIZE)


def write_archive(
    saved: IO[bytes],
    tag: str,
    expected: str,
    file: IO[bytes],
    progress: Callable[[int], None] = lambda done: None,
) -> Manifest:
    """Make an OCI archive of what `docker save` writes, its layers compressed.

    Args:
        saved: the stream of `docker save` of one image.
        tag: the image's name and tag.
        expected: the image's id.
        file: what to write to; a file, since a layer's header is known only after the layer.
        progress: called with bytes of the saved image read so far.

    Raises:
        ValueError: it is not what `docker save` writes, or another image.
    """
    documents: dict[str, bytes] = {}
    layers: dict[str, Descriptor] = {}
    with tarfile.open(fileobj=_Counting(saved, progress), mode="r|") as tar:
        for member in tar:
            if not member.isreg():
                continue
            source = cast("IO[bytes]", tar.extractfile(member))
            if member.size > LARGEST_DOCUMENT:
                layers[member.name] = _compress(source, file)
            else:
                documents[member.name] = source.read()
    entry = json.loads(documents.get("manifest.json", b"[{}]"))[0]
    config = documents.get(entry.get("Config", ""), b"")
    if digest_of(config) != expected:
        raise ValueError(f"docker save gave the image {digest_of(config)} instead of {expected}")
    for name in dict.fromkeys(entry["Layers"]):
        if name not in layers:
            layers[name] = _compress(io.BytesIO(documents[name]), file)
    image = Image(assemble(config, [layers[name] for name in entry["Layers"]]), config, {})
    for name, content in _documents(image, tag).items():
        for chunk in _member(name, len(content), io.BytesIO(content)):
            file.write(chunk)
    file.write(b"\0" * (2 * tarfile.BLOCKSIZE))
    return image.manifest


def assemble(config: bytes, layers: Iterable[Descriptor]) -> Manifest:
    """The manifest of an image of these layers."""
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {"mediaType": CONFIG_TYPE, "digest": digest_of(config), "size": len(config)},
        "layers": [{"mediaType": item.media_type, "digest": item.digest, "size": item.size} for item in layers],
    }
    return parse_manifest(_json(document))


def _compress(source: IO[bytes], file: IO[bytes]) -> Descriptor:
    """Append a layer to an archive, compressed and named by its digest. One that is compressed already stays so."""
    digest, size = hashlib.sha256(), 0
    begun = file.tell()
    file.write(b"\0" * tarfile.BLOCKSIZE)
    head = source.read(4)
    packed = next((kind for magic, kind in COMPRESSED.items() if head.startswith(magic)), "")
    for chunk in _after(head, source) if packed else _zstd(head, source):
        digest.update(chunk)
        file.write(chunk)
        size += len(chunk)
    file.write(b"\0" * (-size % tarfile.BLOCKSIZE))
    end = file.tell()
    layer = Descriptor(f"sha256:{digest.hexdigest()}", size, f"{LAYER_TYPE}+{packed or 'zstd'}")
    file.seek(begun)
    file.write(_header(_path(layer.digest), size))
    file.seek(end)
    return layer


def _after(head: bytes, source: IO[bytes]) -> Iterator[bytes]:
    chunk = head
    while chunk:
        yield chunk
        chunk = source.read(CHUNK_BYTES)


def _zstd(head: bytes, source: IO[bytes]) -> Iterator[bytes]:
    packer = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, threads=-1).compressobj()
    for chunk in _after(head, source):
        yield packer.compress(chunk)
    yield packer.flush()


class _Counting(io.RawIOBase):
    """A stream that says how far it was read."""

    def __init__(self, file: IO[bytes], progress: Callable[[int], None]) -> None:
        self._file, self._progress, self._done = file, progress, 0

    def read(self, size: int = -1) -> bytes:
        chunk = self._file.read(size)
        self._done += len(chunk)
        self._progress(self._done)
        return chunk


@contextmanager
def read_archive(path: Path, progress: Progress = lambda done, total: None) -> Generator[Image]:
    """Open an OCI archive of one image; every blob's digest is verified before it is handed out.

    Raises:
        DeployError: it is cut, damaged, or no such archive.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            image = _read_image(tar, path, progress)
            yield image
    except (tarfile.TarError, ValueError, KeyError, EOFError) as error:
        raise DeployError(
            f"{path} is not a whole OCI archive",
            str(error) or type(error).__name__,
            "copy it again, or write it again with deploy export",
        ) from error


def _read_image(tar: tarfile.TarFile, path: Path, progress: Progress) -> Image:
    members = {member.name.removeprefix("./"): member for member in tar.getmembers() if member.isreg()}

    def document(name: str) -> bytes:
        if name not in members:
            raise ValueError(f"{name} is not in it")
        file = tar.extractfile(members[name])
        assert file
        return file.read(LARGEST_DOCUMENT)

    entries: Any = json.loads(document("index.json"))["manifests"]
    if len(entries) != 1:
        raise ValueError(f"it has {len(entries)} images")
    content = document(_path(str(entries[0]["digest"])))
    _require(f"the manifest in {path}", str(entries[0]["digest"]), digest_of(content))
    manifest = parse_manifest(content, str(entries[0].get("mediaType", MANIFEST_TYPE)))
    config = document(_path(manifest.config.digest))
    _require(f"the configuration in {path}", manifest.config.digest, digest_of(config))
    layers = {layer.digest: layer for layer in manifest.layers if _path(layer.digest) in members}
    total, done = sum(layer.size for layer in layers.values()), 0
    blobs: dict[str, Callable[[], IO[bytes]]] = {}
    for name, layer in layers.items():
        member = members[_path(name)]
        digest = hashlib.sha256()
        with cast("IO[bytes]", tar.extractfile(member)) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                done += len(chunk)
                progress(done, total)
        _require(f"a layer in {path}", name, f"sha256:{digest.hexdigest()}")
        if member.size != layer.size:
            raise ValueError(f"{name} has {member.size} of {layer.size} bytes")
        blobs[name] = lambda member=member: cast("IO[bytes]", tar.extractfile(member))
    return Image(manifest, config, blobs)


def _require(what: str, expected: str, found: str) -> None:
    if expected != found:
        raise DeployError(
            f"{what} has another digest than it is named by",
            f"expected {expected}, found {found}",
            "copy the archive again, or write it again with deploy export",
        )
