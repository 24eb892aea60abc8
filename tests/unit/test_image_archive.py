import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import deploy.image.archive
from deploy.errors import DeployError
from deploy.image.archive import COMPRESSED, Image, assemble, diff_ids, read_archive, stream, write_archive
from deploy.image.registry import Descriptor, digest_of

TAG = "deepseek-v4-flash-sm120:0123456789abcdef"


def config_of(layers: list[bytes]) -> bytes:
    return json.dumps({"rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in layers]}}).encode()


def saved(layers: list[bytes]) -> bytes:
    """What `docker save` of engine 25 and newer writes."""
    config = config_of(layers)
    files = {f"blobs/sha256/{digest_of(content)[7:]}": content for content in (config, *layers)}
    entry = {"Config": f"blobs/sha256/{digest_of(config)[7:]}", "RepoTags": [TAG]}
    entry["Layers"] = [f"blobs/sha256/{digest_of(layer)[7:]}" for layer in layers]
    files["manifest.json"] = json.dumps([entry]).encode()
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return target.getvalue()


def write(layers: list[bytes], path: Path) -> None:
    with path.open("wb") as file:
        write_archive(io.BytesIO(saved(layers)), TAG, digest_of(config_of(layers)), file)


@settings(max_examples=25)
@given(
    st.lists(
        st.binary(max_size=2000).filter(lambda layer: not layer.startswith(tuple(COMPRESSED))), min_size=1, max_size=4
    )
)
def test_an_image_comes_out_of_its_archive_as_it_went_in(
    tmp_path_factory: pytest.TempPathFactory, layers: list[bytes]
) -> None:
    folder = tmp_path_factory.mktemp("archive")
    with pytest.MonkeyPatch.context() as patch:
        # So that small layers count as large ones, some of them.
        patch.setattr(deploy.image.archive, "LARGEST_DOCUMENT", 1000)
        write(layers, folder / "image.tar")
        patch.setattr(deploy.image.archive, "LARGEST_DOCUMENT", 1 << 20)
        with read_archive(folder / "image.tar") as image:
            assert image.id == digest_of(config_of(layers))
            assert diff_ids(image.config) == [digest_of(layer) for layer in layers]
            blobs = [image.blobs[layer.digest]().read() for layer in image.manifest.layers]
    assert [unpack(blob) for blob in blobs] == layers


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_a_layer_that_is_compressed_already_stays_as_it_is(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    blob = pack(b"layer" * 100)
    write([blob], tmp_path / "image.tar")
    with read_archive(tmp_path / "image.tar") as image:
        (layer,) = image.manifest.layers
        assert image.blobs[layer.digest]().read() == blob
        assert layer.media_type.endswith("gzip" if blob[:2] == b"\x1f\x8b" else "zstd")


def unpack(blob: bytes) -> bytes:
    return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(blob)).read()


def test_other_programs_find_a_layout_and_a_manifest_of_dockers(tmp_path: Path) -> None:
    write([b"one", b"two"], tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as tar:
        names = tar.getnames()
        manifest = json.load(extract(tar, "manifest.json"))[0]
        index = json.load(extract(tar, "index.json"))
        assert json.load(extract(tar, "oci-layout")) == {"imageLayoutVersion": "1.0.0"}
    assert manifest["RepoTags"] == [TAG]
    assert set(manifest["Layers"]) | {manifest["Config"]} <= set(names)
    assert index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"] == TAG.partition(":")[2]


def extract(tar: tarfile.TarFile, name: str) -> IO[bytes]:
    file = tar.extractfile(name)
    assert file
    return file


def test_another_image_than_the_locked_one_is_not_written(tmp_path: Path) -> None:
    with (tmp_path / "image.tar").open("wb") as file, pytest.raises(ValueError, match="instead of sha256:1111"):
        write_archive(io.BytesIO(saved([b"one"])), TAG, f"sha256:{'1' * 64}", file)


@given(st.data())
def test_a_damaged_or_cut_archive_is_refused_or_gives_the_same_image(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("archive") / "image.tar"
    write([b"one" * 500, b"two"], path)
    content = bytearray(path.read_bytes())
    with read_archive(path) as image:
        whole = (image.config, {name: blob().read() for name, blob in image.blobs.items()})
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[place] ^= data.draw(st.integers(1, 255))
    else:
        del content[place:]
    path.write_bytes(content)
    try:
        with read_archive(path) as image:
            seen = (image.config, {name: blob().read() for name, blob in image.blobs.items()})
    except DeployError as error:
        assert str(path) in str(error)
    else:
        # Padding, times and the documents that only other programs read.
        assert seen == whole or set(seen[1]) < set(whole[1])


def test_docker_is_sent_only_the_layers_at_hand() -> None:
    layers = [b"one" * 1000, b"two"]
    descriptors = [Descriptor(digest_of(layer), len(layer), "x") for layer in layers]
    image = Image(
        assemble(config_of(layers), descriptors), config_of(layers), {digest_of(b"two"): lambda: io.BytesIO(b"two")}
    )
    seen: list[tuple[int, int]] = []
    sent = b"".join(stream(image, TAG, lambda done, total: seen.append((done, total))))
    with tarfile.open(fileobj=io.BytesIO(sent)) as tar:
        blobs = [name for name in tar.getnames() if name.startswith("blobs/")]
        assert extract(tar, f"blobs/sha256/{hashlib.sha256(b'two').hexdigest()}").read() == b"two"
    assert len(blobs) == 3  # manifest, configuration and the one layer
    assert seen[-1] == (3, 3)


def test_a_layer_that_ends_early_is_not_passed_on_as_whole() -> None:
    descriptor = Descriptor(digest_of(b"two"), 3, "x")
    image = Image(
        assemble(config_of([b"two"]), [descriptor]), config_of([b"two"]), {descriptor.digest: lambda: io.BytesIO(b"tw")}
    )
    with pytest.raises(ValueError, match="1 bytes early"):
        list(stream(image, TAG))
