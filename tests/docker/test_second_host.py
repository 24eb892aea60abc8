"""The whole engine image on a second host that has nothing but the repository and a registry.

It pushes and pulls five gigabytes, hence not among the quick tests.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT, free_port
from registry import Proxy, proxy, registry
from second_host import HERE, Host, clone_to, deploy, second_host

from deploy.lock.model import read_lock

KERNELS = "kernels/sm120_kernels/__init__.py"
SMALL_BYTES = 1_000_000
PASSWORD = {"COSIGN_PASSWORD": "secret"}

pytestmark = [
    pytest.mark.quiet,
    pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace and a second Docker engine need root"),
]


@dataclass(frozen=True)
class Field:
    """Two hosts and the registry between them.

    Attributes:
        port: of the registry on this host's loopback.
        proxy: through which the second host reaches it.
        first: this host's clone.
        second: the second host's.
    """

    port: int
    proxy: Proxy
    first: Path
    second: Path
    host: Host


def here(clone: Path, *arguments: str) -> str:
    """Run a clone's controller on this host."""
    done = subprocess.run(
        deploy(clone, *arguments), cwd=clone, env=os.environ | PASSWORD, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def field(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    folder = tmp_path_factory.mktemp("field")
    port = free_port()
    first = clone_to(folder / "first")
    (first / ".tools").symlink_to(ROOT / ".tools")
    try:
        # A folder that is named keeps what was pushed for the next run.
        data = Path(os.environ.get("REGISTRY_FOLDER") or folder / "registry")
        with registry(data, port), second_host(folder) as host, proxy(port, HERE) as before:
            here(first, "lock", "--update", "image")
            here(first, "push", "--to", f"127.0.0.1:{port}")
            text = (
                f'profile = "cpu"\n[image]\nregistry = "http://{HERE}:{before.port}"\n[router]\nport = {free_port()}\n'
            )
            second = clone_to(folder / "second", {"deploy.lock": (first / "deploy.lock").read_text()})
            (second / "deploy.toml").write_text(text)
            yield Field(port, before, first, second, host)
    finally:
        subprocess.run(["rm", "-rf", str(folder)])


def there(field: Field, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the second clone's controller on the second host."""
    done = field.host.run("env", "-C", str(field.second), *deploy(field.second, *arguments))
    assert "Traceback" not in done.stderr, done.stderr
    return done


def test_the_second_host_serves_the_locked_image_that_it_took_from_the_registry(field: Field) -> None:
    assert field.host.docker("image", "ls", "--quiet") == ""
    up = there(field, "up", "--json")
    assert up.returncode == 0, up.stderr
    report = json.loads(up.stdout)
    locked = read_lock(field.second).image
    assert locked
    assert report["image"]["id"] == locked.id
    assert report["image"]["built"] is False
    assert report["acceptance"]["answer_tokens"] > 0
    assert f" MB from {HERE}:{field.proxy.port}" in up.stderr
    size = sum(layer.blob_size for layer in locked.layer)
    assert size < field.proxy.sent < 1.02 * size
    verify = there(field, "verify", "--json")
    # Of deploy.toml only the profile's roles count; the whole rest is as locked.
    assert json.loads(verify.stdout)["drifts"] == []


def test_a_changed_kernel_costs_the_second_host_less_than_a_megabyte(
    field: Field, record_testsuite_property: Callable[[str, object], None]
) -> None:
    for clone in (field.first, field.second):
        (clone / KERNELS).write_text((ROOT / KERNELS).read_text() + "\n# changed\n")
    here(field.first, "build")
    here(field.first, "lock", "--update", "image")
    here(field.first, "push", "--to", f"127.0.0.1:{field.port}")
    changed = read_lock(field.first).image
    assert changed
    try:
        (field.second / "deploy.lock").write_text((field.first / "deploy.lock").read_text())
        before = field.proxy.sent
        pull = there(field, "pull", "--json")
        assert pull.returncode == 0, pull.stderr
        sent = field.proxy.sent - before
        report = json.loads(pull.stdout)
        assert report["layers"] == 1
        assert report["image"]["id"] == changed.id
        assert report["size"] < sent < SMALL_BYTES
        record_testsuite_property("bytes from the registry", sent)
        sys.stdout.write(f"bytes from the registry: {sent:,}\n")
        if (field.first / "cosign.pub").exists():
            # This one was pushed without the key: what serves stays, and the new image is not run.
            serving = field.host.docker("ps", "--quiet")
            up = there(field, "up")
            assert up.returncode == 1
            assert "the image is not signed with the required key" in up.stderr
            assert serving and field.host.docker("ps", "--quiet") == serving
    finally:
        subprocess.run(["docker", "image", "rm", "--force", f"deepseek-v4-flash-sm120:{changed.inputs[:16]}"])
