"""A second host on this machine: a network namespace with a Docker engine of its own, joined to this one by a cable.

It has no way to the network but that cable, so what it runs came over it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT

# Addresses of the two ends of the cable.
HERE, THERE = "10.213.77.1", "10.213.77.2"
START_SECONDS = 60
PATIENCE_SECONDS = 900


@dataclass(frozen=True)
class Host:
    """The second host.

    Attributes:
        namespace: of its network.
        socket: of its Docker engine.
        cache: its cache folder.
    """

    namespace: str
    socket: Path
    cache: Path

    def run(self, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a command there."""
        own = {"DOCKER_HOST": f"unix://{self.socket}", "XDG_CACHE_HOME": str(self.cache), **environment}
        return subprocess.run(
            ["nsenter", f"--net=/run/netns/{self.namespace}", *command],
            env=os.environ | own,
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )

    def docker(self, *arguments: str) -> str:
        done = self.run("docker", *arguments)
        if done.returncode:
            pytest.fail(f"docker {' '.join(arguments[:2])} on the second host: {done.stdout}{done.stderr}")
        return done.stdout


def deploy(clone: Path, *arguments: str) -> list[str]:
    """The command line that runs a clone's own controller."""
    code = f"import sys; sys.path.insert(0, {str(clone)!r}); from deploy.entry import main; main()"
    return [sys.executable, "-c", code, *arguments]


def clone_to(folder: Path, changes: Mapping[str, str] | None = None) -> Path:
    """The repository's own files, nothing generated, with some of them replaced."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for name, text in (changes or {}).items():
        (folder / name).write_text(text)
    return folder


@contextmanager
def second_host(folder: Path, **features: bool) -> Iterator[Host]:
    """A host that starts with nothing, and leaves nothing.

    Args:
        folder: where its Docker engine keeps its data.
        features: of the engine, beyond CDI.
    """
    name = f"dsv4-{uuid.uuid4().hex[:6]}"
    # Paths of sockets are short, and an engine's runtime files lie where a mount is cheap.
    run = Path(tempfile.mkdtemp(prefix=f"{name}-", dir="/run"))
    configuration = {
        "data-root": str(folder / "docker"),
        "exec-root": str(run / "exec"),
        "pidfile": str(run / "pid"),
        "hosts": [f"unix://{run / 'docker.sock'}"],
        "features": {"cdi": True, **features},
    }
    (run / "daemon.json").write_text(json.dumps(configuration))
    engine = None
    host = Host(name, run / "docker.sock", folder / "cache")
    try:
        _cable(name)
        with (folder / "dockerd.log").open("wb") as log:
            command = ["nsenter", f"--net=/run/netns/{name}", "dockerd", "--config-file", str(run / "daemon.json")]
            engine = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_SECONDS
        while host.run("docker", "version").returncode:
            if engine.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the second engine does not start: {(folder / 'dockerd.log').read_text()[-3000:]}")
            time.sleep(0.3)
        yield host
    finally:
        if engine:
            # Their layers stay mounted otherwise.
            if containers := host.run("docker", "ps", "--all", "--quiet").stdout.split():
                host.run("docker", "rm", "--force", *containers)
            engine.send_signal(signal.SIGTERM)
            engine.wait(60)
        subprocess.run(["ip", "link", "delete", f"{name}-h"], capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(folder / "docker", ignore_errors=True)
        shutil.rmtree(folder / "cache", ignore_errors=True)


def _cable(name: str) -> None:
    here, there = f"{name}-h", f"{name}-t"
    for command in (
        f"ip netns add {name}",
        f"ip link add {here} type veth peer name {there}",
        f"ip link set {there} netns {name}",
        f"ip address add {HERE}/30 dev {here}",
        f"ip link set {here} up",
        f"ip -n {name} link set lo up",
        f"ip -n {name} address add {THERE}/30 dev {there}",
        f"ip -n {name} link set {there} up",
    ):
        done = subprocess.run(command.split(), capture_output=True, text=True)
        if done.returncode:
            pytest.fail(f"{command}: {done.stderr}")
