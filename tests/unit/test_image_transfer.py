"""What `tests/docker/test_image_transfer.py` cannot bring about: a Docker that fails in the middle."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from python_on_whales import DockerClient

from deploy.errors import DeployError
from deploy.host.errors import HostError
from deploy.image import transfer
from deploy.image.archive import Image, assemble
from deploy.image.registry import Descriptor, digest_of
from deploy.image.transfer import common_prefix, load, require_built
from deploy.lock.model import ImageLock, LockedLayer

LAYER = bytes(4_000_000)
CONFIG = json.dumps({"rootfs": {"type": "layers", "diff_ids": [digest_of(LAYER)]}}).encode()
IMAGE = Image(
    assemble(CONFIG, [Descriptor(digest_of(LAYER), len(LAYER), "x")]),
    CONFIG,
    {digest_of(LAYER): lambda: io.BytesIO(LAYER)},
)
LOCKED = ImageLock(
    inputs="0" * 64,
    environment="0" * 64,
    id=digest_of(CONFIG),
    layer=(LockedLayer(diff_id=digest_of(LAYER), size=len(LAYER)),),
)


def docker(folder: Path, script: str) -> DockerClient:
    """A stand-in for Docker's command that fails as no real one can be made to."""
    program = folder / "docker"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return DockerClient(client_call=[str(program)])


@pytest.mark.parametrize(
    "script",
    [
        "echo 'no space left on device' >&2; exit 1",
        "head -c 100000 > /dev/null; echo 'no space left on device'; exit 1",
        "cat > /dev/null; echo 'no space left on device'; exit 1",
    ],
)
def test_a_docker_that_gives_up_is_quoted(tmp_path: Path, script: str) -> None:
    with pytest.raises(DeployError, match="did not take the image") as raised:
        load(IMAGE, LOCKED, docker(tmp_path, script))
    assert raised.value.why == "no space left on device"


@pytest.mark.parametrize(
    "change", [{"id": f"sha256:{'1' * 64}"}, {"layer": (LockedLayer(diff_id=f"sha256:{'1' * 64}", size=1),)}]
)
def test_docker_does_not_see_an_image_that_is_not_the_locked_one(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(DeployError) as raised:
        load(IMAGE, LOCKED.model_copy(update=change), docker(tmp_path, "touch $(dirname $0)/seen"))
    assert "sha256:" in raised.value.why
    assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize("image", [None, ImageLock(inputs="0" * 64, environment="0" * 64)])
def test_without_a_locked_digest_nothing_is_moved(image: ImageLock | None) -> None:
    with pytest.raises(DeployError, match=r"deploy\.lock has no image yet"):
        require_built(image)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = tmp_path / "info.json"
    answer.write_text(json.dumps({"DockerRootDir": str(tmp_path)}))
    with pytest.raises(HostError, match="too small"):
        transfer._require_room(docker(tmp_path, f"cat {answer}"), tmp_path / "cache", 10**15, 10**15)  # pyright: ignore[reportPrivateUsage]


parts = st.lists(st.sampled_from("abc"), max_size=4)


@given(parts, parts)
def test_a_common_prefix_is_common_and_as_long_as_can_be(one: list[str], other: list[str]) -> None:
    length = common_prefix(one, other)
    assert one[:length] == other[:length]
    assert length in (len(one), len(other)) or one[length] != other[length]
