"""What one host compiled reaches the next through a registry: the controller's own commands on the real CPU stack.

What the first host compiled is a stand-in, files in its cache: no compiler of a GPU runs here.
"""

import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, docker, free_port
from registry import registry
from second_host import clone_to, deploy

from deploy.bake import artifact, container
from deploy.image.inputs import IMAGE_NAME
from deploy.image.registry import Client, parse_registry
from deploy.lock.model import read_lock, write_lock
from deploy.lock.resolve import built_image, derive
from deploy.spec.load import load

PATIENCE_S = 300
COMPILED = """
mkdir -p triton/KEY .cache/flashinfer/0.7.2/120f/aot/m
head -c 300000 /dev/urandom > triton/KEY/kernel.cubin; echo built > .cache/flashinfer/0.7.2/120f/aot/m/m.so
"""


@dataclass(frozen=True)
class Host:
    """A host's clone of the repository, whose lock names what another host compiled."""

    clone: Path
    project: str
    registry: str

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        own = {"COMPOSE_PROJECT_NAME": self.project, "XDG_CACHE_HOME": str(self.clone.parent / "cache")}
        done = subprocess.run(
            deploy(self.clone, *arguments),
            env=os.environ | own, cwd=self.clone, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json").stdout)

    def inside(self, image: str, script: str) -> str:
        """A shell beside the host's cache, as the engine's user."""
        mount = f"{container.volume_name(self.project)}:{container.CACHE}"
        command = ["run", "--rm", "--network", "none", "--volume", mount, "--workdir", container.CACHE]
        return docker(*command, "--entrypoint", "sh", image, "-c", script)


@pytest.fixture
def host(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    lock, unresolved = derive(ROOT, load(ROOT / "deploy.toml"), read_lock(ROOT))
    assert unresolved == [] and lock.image
    built, missing = built_image(lock.image)
    assert missing is None
    port, first = free_port(), f"dsv4-test-{uuid.uuid4().hex[:8]}"
    with registry(tmp_path / "registry", port):
        # In the place of the pushed engine image, whose gigabytes are beside the point.
        (tmp_path / "Dockerfile").write_text(f"FROM scratch\nCOPY Dockerfile /\nLABEL of={uuid.uuid4().hex}\n")
        name = f"127.0.0.1:{port}/{IMAGE_NAME}:small"
        docker("build", "--quiet", "--provenance=false", "--tag", name, str(tmp_path))
        docker("push", "--quiet", name)
        docker("image", "rm", name)
        with Client(parse_registry(f"127.0.0.1:{port}")) as client:
            known = built.model_copy(update={"manifest": client.manifest("small").digest})
            container.make_volume(first)
            Host(tmp_path, first, "").inside(image, COMPILED)
            baked = artifact.bake(first, known, image, "cpu", client, lambda done, total: None)
        container.remove_volume(first)
        clone = clone_to(tmp_path / "clone")
        write_lock(clone, lock.model_copy(update={"image": artifact.with_cache(known, baked.cache)}))
        address = f"http://127.0.0.1:{port}"
        (clone / "deploy.toml").write_text(
            f'profile = "cpu"\n[image]\nregistry = "{address}"\n[router]\nport = {free_port()}\n'
        )
        made = Host(clone, f"dsv4-test-{uuid.uuid4().hex[:8]}", address)
        yield made
        made.run("down")


def test_up_fetches_what_another_host_baked_verify_counts_none_of_it_and_bake_passes_it_on(
    host: Host, image: str
) -> None:
    up = host.run("up")
    assert "2 files, 0.3 MB from 127.0.0.1" in up.stderr
    assert host.inside(image, "cat .cache/flashinfer/0.7.2/120f/aot/m/m.so").strip() == "built"
    compiled = host.json("verify")["compiled"]
    assert compiled.keys() == {"prefill", "decode"}
    for role, counts in compiled.items():
        # Found, so not compiled; what an engine did compile is what its own log says.
        assert counts["at_start"]["flashinfer"] == 0
        said = f"{role}: compiled {sum(counts['at_start'].values())}"
        assert said in host.run("verify").stderr
    before = read_lock(host.clone)
    baked = host.json("bake", "--no-warm")
    assert baked["gpu"] == "cpu" and baked["files"] >= 2 and baked["changed"]
    after = read_lock(host.clone)
    assert before.image and after.image and before.image.cache != after.image.cache
    assert baked["reference"].endswith(after.image.cache[0].manifest)
