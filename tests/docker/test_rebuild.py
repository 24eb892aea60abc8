"""`deploy verify --rebuild`: an engine of its own, and what is said of an image that comes out otherwise."""

import os
import struct
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from conftest import ROOT, docker, free_port
from python_on_whales import DockerClient
from registry import registry

from deploy.image.builder import own_engine
from deploy.image.layers import read_layers
from deploy.image.rebuild import compare
from deploy.image.registry import Client, parse_registry
from deploy.image.transfer import push, tag_of
from deploy.lock.model import ImageLock

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="an engine of its own needs root")

# Into another year, and not so far that the package index's certificate has ended.
CLOCK_OFFSET_S = 40 * 86400

# Or the time of the build is in the image.
EPOCH = ("--build-arg", "SOURCE_DATE_EPOCH=0")


def build(folder: Path, tag: str, top: str, client: DockerClient | None = None) -> None:
    """Build a small image of two layers; the lower one is always the same."""
    folder.mkdir(exist_ok=True)
    for name, content in (("base", "base"), ("top", top)):
        (folder / name).write_text(content)
        os.utime(folder / name, (0, 0))
    (folder / "Dockerfile").write_text('FROM scratch\nCOPY base /base\nCOPY top /top\nCMD ["/none"]\n')
    host = ["--host", str(client.client_config.host)] if client else []
    docker(*host, "build", "--quiet", "--provenance=false", "--network=host", *EPOCH, "--tag", tag, str(folder))


def bridge_names() -> set[str]:
    """Interfaces of the default network of an engine, ours or the machine's."""
    return {link.name for link in Path("/sys/class/net").iterdir() if link.name.startswith(("docker", "dsv4-"))}


def engines(other: DockerClient) -> list[tuple[str, DockerClient]]:
    return [("here", DockerClient()), ("there", other)]


def manifest(locked: ImageLock, address: str, docker: DockerClient) -> str:
    """Push an image from an engine and return the registry's digest of it."""
    with Client(parse_registry(address)) as client:
        return push(locked, client, docker=docker).image.manifest


def test_the_first_differing_layer_and_its_files_are_named(tmp_path: Path) -> None:
    locked = ImageLock(inputs=uuid.uuid4().hex * 2, environment="0" * 64)
    tag = tag_of(locked)
    bridges = bridge_names()
    build(tmp_path / "context", tag, "one")
    try:
        identity = docker("image", "inspect", "--format", "{{.Id}}", tag).strip()
        locked = locked.model_copy(update={"id": identity, "layer": read_layers(tag)})
        with own_engine(tmp_path / "engine") as client:
            build(tmp_path / "context", tag, "one", client)
            same = compare(locked, client)
            assert same.same and same.difference is None and same.layers == 2
            # Packed by either engine it has the same name in a registry.
            port = free_port()
            with registry(tmp_path / "registry", port):
                manifests = [manifest(locked, f"127.0.0.1:{port}/{name}", engine) for name, engine in engines(client)]
            assert len(set(manifests)) == 1
            build(tmp_path / "context", tag, "another", client)
            found = compare(locked, client)
        assert not found.same
        assert found.difference
        assert found.difference.place == 1
        assert found.difference.expected == locked.layer[1].diff_id
        (line,) = found.difference.files
        assert line.startswith("top: size 3 -> 7, sha256 ")
    finally:
        docker("image", "rm", "--force", tag)
    assert not (tmp_path / "engine").exists()
    # The other engine still has its default bridge, and ours is gone.
    assert bridge_names() == bridges


@pytest.mark.quiet
def test_the_image_comes_out_of_a_build_from_nothing_as_it_is_locked(image: str, tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "deploy"
    clock, offset = tmp_path / "clock.so", tmp_path / "offset"
    offset.write_bytes(struct.pack("=q", CLOCK_OFFSET_S))
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", clock, ROOT / "tests/clock.c"], check=True)
    # Nothing of the place, the language, the time zone, the clock or the permissions of who builds is in it.
    command = ["sh", "-c", f"umask 077; exec {program} verify --rebuild --state {tmp_path / 'state'}"]
    surroundings = {
        **{"TZ": "Asia/Kolkata", "LC_ALL": "C", "LANG": "C"},
        **{"SHIFTED_CLOCK": str(clock), "CLOCK_OFFSET_FILE": str(offset)},
        "DOCKER_BUILDKIT_RUNC_COMMAND": str(ROOT / "tests/docker/shifted_runc.py"),
    }
    preloaded = os.environ | surroundings | {"LD_PRELOAD": str(clock)}
    now = subprocess.run(["date", "+%s"], env=preloaded, capture_output=True, check=True).stdout
    assert abs(int(now) - time.time() - CLOCK_OFFSET_S) < 10
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | surroundings, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all as locked" in done.stdout
    assert not (tmp_path / "state" / "rebuild").exists()
    # Each step of the build ran so.
    steps = sum(line.startswith("RUN ") for line in (ROOT / "Dockerfile").read_text().splitlines())
    assert len(clock.with_suffix(".log").read_text().splitlines()) == steps
