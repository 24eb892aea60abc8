"""Push, pull, export and import with the real Docker engine and a real registry; the image is a small one."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT, docker, free_port
from python_on_whales import DockerClient
from registry import Proxy, proxy, registry
from second_host import second_host

import deploy.fetch
from deploy.errors import DeployError
from deploy.image import transfer
from deploy.image.inputs import IMAGE_NAME
from deploy.image.layers import read_layers
from deploy.image.registry import Client, NotInRegistry, parse_registry
from deploy.image.sbom import attach, make_sbom
from deploy.image.signature import NotSigned, require_signature, sign
from deploy.image.transfer import export, import_archive, pull, push, tag_of
from deploy.lock.model import ImageLock, Lock

BASE_BYTES, TOP_BYTES = 5_000_000, 20_000


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.fetch, "PAUSE_S", 0.01)
    monkeypatch.setattr(transfer, "KEPT_BYTES", BASE_BYTES - 1)


@dataclass(frozen=True)
class Place:
    """A registry, the proxy before it, and the folder of its blobs."""

    proxy: Proxy
    blobs: Path

    def client(self) -> Client:
        return Client(parse_registry(f"127.0.0.1:{self.proxy.port}"))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    port = free_port()
    with registry(tmp_path / "registry", port) as blobs, proxy(port) as before:
        yield Place(before, blobs)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The large layer's content, which cannot be compressed."""
    return os.urandom(BASE_BYTES)


def build(folder: Path, base: bytes, top: bytes) -> ImageLock:
    """Build a small image of two layers, and lock it."""
    folder.mkdir()
    inputs = uuid.uuid4().hex * 2
    (folder / "base").write_bytes(base)
    (folder / "top").write_bytes(top)
    for name in ("base", "top"):
        os.utime(folder / name, (0, 0))
    title = f"org.opencontainers.image.title={IMAGE_NAME}"
    (folder / "Dockerfile").write_text(f'FROM scratch\nCOPY base /base\nCOPY top /top\nLABEL {title}\nCMD ["/none"]\n')
    locked = ImageLock(inputs=inputs, environment="0" * 64)
    docker("build", "--quiet", "--provenance=false", "--tag", tag_of(locked), str(folder))
    layers = read_layers(tag_of(locked))
    identity = docker("image", "inspect", "--format", "{{.Id}}", tag_of(locked)).strip()
    return locked.model_copy(update={"id": identity, "layer": layers})


@pytest.fixture
def images(tmp_path: Path, base: bytes) -> Iterator[list[ImageLock]]:
    """Two images that differ in the small layer only."""
    made = [build(tmp_path / name, base, os.urandom(TOP_BYTES)) for name in ("first", "second")]
    yield made
    for image in made:
        subprocess.run(["docker", "image", "rm", "--force", tag_of(image)], capture_output=True)


def forget(*images: ImageLock) -> None:
    for image in images:
        docker("image", "rm", "--force", tag_of(image))


def test_a_pushed_image_comes_back_the_same_and_the_lock_knows_it(
    place: Place, images: list[ImageLock], tmp_path: Path
) -> None:
    with place.client() as client:
        pushed = push(images[0], client)
        assert pushed.changed
        assert pushed.image.manifest.startswith("sha256:")
        assert all(layer.blob and layer.blob_size for layer in pushed.image.layer)
        assert not push(pushed.image, client).changed
        forget(*images)
        seen: list[tuple[str, int, int]] = []
        pulled = pull(pushed.image, client, cache=tmp_path / "cache", progress=lambda *step: seen.append(step))
    assert pulled.image.id == images[0].id
    assert pulled.layers == 2
    assert pulled.size == sum(layer.blob_size for layer in pushed.image.layer)
    assert {what for what, _, _ in seen} == {"layers", "image"}
    assert any(0 < done < total for _, done, total in seen)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [pushed.image.layer[1].blob[7:]]
    # No trace of the registry's name is left.
    assert docker("image", "ls", "--quiet", "--filter", f"reference={client.registry.name}") == ""


def test_only_the_changed_layer_is_transferred(place: Place, images: list[ImageLock], tmp_path: Path) -> None:
    with place.client() as client:
        first, second = (push(image, client).image for image in images)
        forget(*images)
        pull(first, client, cache=tmp_path / "cache")
        before = place.proxy.sent
        pulled = pull(second, client, cache=tmp_path / "cache")
    assert pulled.layers == 1
    assert place.proxy.sent - before < TOP_BYTES + 20_000
    assert pulled.image.id == second.id


def test_a_small_layer_above_the_changed_one_is_not_transferred_again(
    place: Place, base: bytes, tmp_path: Path
) -> None:
    top = os.urandom(TOP_BYTES)
    contents = (base, os.urandom(TOP_BYTES) + base)
    images = [build(tmp_path / str(number), content, top) for number, content in enumerate(contents)]
    try:
        with place.client() as client:
            first, second = (push(image, client).image for image in images)
            forget(*images)
            pull(first, client, cache=tmp_path / "cache")
            pulled = pull(second, client, cache=tmp_path / "cache")
        assert (pulled.layers, pulled.size) == (1, second.layer[0].blob_size)
        assert pulled.image.id == second.id
    finally:
        for image in images:
            subprocess.run(["docker", "image", "rm", "--force", tag_of(image)], capture_output=True)


def test_a_pull_that_is_cut_again_and_again_goes_on_where_it_was(
    place: Place, images: list[ImageLock], tmp_path: Path
) -> None:
    with place.client() as client:
        pushed = push(images[0], client).image
        forget(*images)
        before, place.proxy.cut_after = place.proxy.sent, 1_000_000
        pulled = pull(pushed, client, cache=tmp_path / "cache")
    assert place.proxy.cuts >= 4
    assert pulled.image.id == pushed.id
    assert place.proxy.sent - before < pulled.size * 1.3


def test_a_killed_pull_is_continued_by_the_next(place: Place, images: list[ImageLock], tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from deploy.image.transfer import *; from deploy.image.registry import *;"
        "image = ImageLock.model_validate_json(sys.argv[1]);"
        "pull(image, Client(parse_registry(sys.argv[2])), cache=pathlib.Path(sys.argv[3]))"
    )
    cache = tmp_path / "cache"
    with place.client() as client:
        pushed = push(images[0], client).image
        forget(*images)
        # Each of the few attempts that the process has gets no further than this.
        place.proxy.cut_after = 200_000
        arguments = [pushed.model_dump_json(), client.registry.host, str(cache)]
        process = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 30
        while place.proxy.cuts < 6 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
        process.wait()
        kept = sum(path.stat().st_size for path in cache.iterdir())
        assert kept > 500_000
        before, place.proxy.cut_after = place.proxy.sent, None
        pulled = pull(pushed, client, cache=cache)
    assert place.proxy.sent - before < sum(layer.blob_size for layer in pushed.layer) - kept + 20_000
    assert pulled.image.id == pushed.id


def test_another_image_in_its_place_is_refused_with_both_digests(
    place: Place, images: list[ImageLock], tmp_path: Path
) -> None:
    first, second = images
    with place.client() as client:
        pushed, other = push(first, client).image, push(second, client).image
        content = client.manifest(other.manifest)
        client.put_manifest(first.inputs[:16], content.content, content.media_type)
        forget(*images)
        # A lock that knows the image but not the registry's digest of it yet, and one that does.
        never = pushed.model_copy(update={"manifest": f"sha256:{'1' * 64}"})
        for locked, expected, found in ((first, first.id, second.id), (never, never.manifest, other.manifest)):
            with pytest.raises(DeployError) as raised:
                pull(locked, client, cache=tmp_path / "cache")
            assert expected in raised.value.why and found in raised.value.why
    assert docker("image", "ls", "--quiet", tag_of(first)) == ""


@pytest.mark.parametrize("what", ["layer", "manifest"])
def test_a_registry_whose_files_were_altered_is_refused_with_both_digests(
    place: Place, images: list[ImageLock], tmp_path: Path, what: str
) -> None:
    with place.client() as client:
        pushed = push(images[0], client).image
        forget(*images)
        digest = pushed.manifest if what == "manifest" else pushed.layer[0].blob
        path = place.blobs / digest[7:9] / digest[7:] / "data"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(DeployError) as raised:
            pull(pushed, client, cache=tmp_path / "cache")
    assert digest.removeprefix("sha256:") in str(raised.value)
    assert docker("image", "ls", "--quiet", tag_of(pushed)) == ""


def test_what_the_registry_has_not_got_is_told_from_a_wrong_one(place: Place, images: list[ImageLock]) -> None:
    with place.client() as client, pytest.raises(NotInRegistry):
        pull(images[0], client)


def test_an_image_that_is_not_the_locked_one_is_not_pushed(place: Place, images: list[ImageLock]) -> None:
    first, second = images
    mixed = first.model_copy(update={"id": second.id})
    with place.client() as client, pytest.raises(DeployError) as raised:
        push(mixed, client)
    assert first.id in raised.value.why and second.id in raised.value.why


@pytest.mark.skipif(os.geteuid() != 0, reason="a second Docker engine needs root")
def test_an_engine_with_containerds_image_store_takes_the_same_and_only_what_changed(
    place: Place, images: list[ImageLock], tmp_path: Path
) -> None:
    """Such an engine calls an image by its manifest's digest."""
    export(images[0], tmp_path / "image.tar")
    with place.client() as client, second_host(tmp_path, **{"containerd-snapshotter": True}) as host:
        there = DockerClient(host=f"unix://{host.socket}")
        for image, layers in zip(images, (2, 1), strict=True):
            pushed = push(image, client).image
            pulled = pull(pushed, client, docker=there, cache=tmp_path / "cache")
            assert pulled.image.id == pushed.manifest
            assert pulled.layers == layers
            host.docker("create", tag_of(image))
        host.docker("rm", *host.docker("ps", "--all", "--quiet").split())
        host.docker("image", "rm", tag_of(images[0]))
        # Its id is the archive's own manifest, of which the lock knows the configuration.
        import_archive(images[0], tmp_path / "image.tar", docker=there)
        host.docker("create", tag_of(images[0]))
        # The other way too: it saves layers as it keeps them, compressed.
        export(pushed, tmp_path / "other.tar", docker=there)
    forget(*images)
    assert import_archive(images[1], tmp_path / "other.tar").image.id == images[1].id


def test_an_image_travels_in_a_file(images: list[ImageLock], tmp_path: Path) -> None:
    first, second = images
    manifest = export(first, tmp_path / "image.tar")
    assert [path.name for path in tmp_path.glob("*image.tar*")] == ["image.tar"]
    forget(*images)
    with pytest.raises(DeployError) as raised:
        import_archive(second, tmp_path / "image.tar")
    assert first.id in raised.value.why and second.id in raised.value.why
    assert import_archive(first, tmp_path / "image.tar").image.id == first.id
    with tarfile.open(tmp_path / "image.tar") as tar:
        assert f"blobs/sha256/{manifest.digest.removeprefix('sha256:')}" in tar.getnames()
    forget(first)
    # Docker alone takes it as well.
    docker("load", "--input", str(tmp_path / "image.tar"))
    assert docker("image", "inspect", "--format", "{{.Id}}", tag_of(first)).strip() == first.id


def test_a_cut_file_is_refused_and_leaves_nothing(images: list[ImageLock], tmp_path: Path) -> None:
    export(images[0], tmp_path / "image.tar")
    forget(*images)
    content = (tmp_path / "image.tar").read_bytes()
    (tmp_path / "image.tar").write_bytes(content[: len(content) // 2])
    with pytest.raises(DeployError, match="not a whole OCI archive"):
        import_archive(images[0], tmp_path / "image.tar")
    assert docker("image", "ls", "--quiet", tag_of(images[0])) == ""


def test_an_image_that_cannot_be_saved_leaves_no_file(images: list[ImageLock], tmp_path: Path) -> None:
    forget(images[0])
    with pytest.raises(DeployError, match="not on this host"):
        export(images[0], tmp_path / "image.tar")
    assert not list(tmp_path.glob("*image.tar*"))


def test_the_layers_that_are_here_are_counted_from_the_lowest() -> None:
    assert transfer.common_prefix(["a", "b", "c"], ["a", "b", "d"]) == 2
    assert transfer.common_prefix(["a"], ["a", "b"]) == 1
    assert transfer.common_prefix(["x", "b"], ["a", "b"]) == 0


def test_a_bill_of_materials_lies_beside_the_image_and_leaves_it_as_it_is(
    place: Place, images: list[ImageLock], tmp_path: Path
) -> None:
    with place.client() as client:
        pushed = push(images[0], client).image
        before = client.manifest(pushed.manifest)
        sbom = make_sbom(Lock(image=pushed))
        artifact = client.manifest(attach(client, before, sbom))
        assert json.loads(artifact.content)["subject"]["digest"] == pushed.manifest
        assert client.http.get(client.blob_address(artifact.layers[0].digest)).text == sbom
        assert client.manifest(pushed.inputs[:16]) == before
        forget(*images)
        assert pull(pushed, client, cache=tmp_path / "cache").image.id == pushed.id


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two pairs of cosign's keys, `one` and `other`."""
    if not shutil.which("cosign"):
        pytest.skip("cosign is not here: make .cache/programs/usr/bin/cosign")
    folder = tmp_path_factory.mktemp("keys")
    for name in ("one", "other"):
        command = ["cosign", "generate-key-pair", f"--output-key-prefix={name}"]
        subprocess.run(command, cwd=folder, env=os.environ | {"COSIGN_PASSWORD": "secret"}, check=True)
    return folder


def test_a_signature_counts_if_it_is_by_the_required_key_and_over_this_image(
    place: Place, images: list[ImageLock], keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "secret")
    with place.client() as client:
        first, second = (push(image, client).image.manifest for image in images)
        with pytest.raises(NotSigned, match="not signed with the required key"):
            require_signature(client.registry, first, keys / "one.pub")
        sign(client.registry, first, keys / "one.key")
        require_signature(client.registry, first, keys / "one.pub")
        with pytest.raises(NotSigned):
            require_signature(client.registry, first, keys / "other.pub")
        with pytest.raises(NotSigned):
            require_signature(client.registry, second, keys / "one.pub")


def test_a_wrong_password_is_an_error_and_no_signature(
    place: Place, images: list[ImageLock], keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSIGN_PASSWORD", "wrong")
    with place.client() as client:
        pushed = push(images[0], client).image
        with pytest.raises(DeployError, match="could not be signed"):
            sign(client.registry, pushed.manifest, keys / "one.key")
        with pytest.raises(NotSigned):
            require_signature(client.registry, pushed.manifest, keys / "one.pub")
