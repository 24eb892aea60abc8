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


@dataclass
class Host:
    """The second host.

    Attributes:
        namespace: of its network.
        folder: where its Docker engine keeps its data.
        runtime: where the engine's socket and other files of its run time lie.
        engine: the Docker engine.
    """

    namespace: str
    folder: Path
    runtime: Path
    engine: "subprocess.Popen[bytes] | None" = None

    @property
    def socket(self) -> Path:
        return self.runtime / "docker.sock"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def enter(self) -> list[str]:
        """What stands before a command line to run it in the host's network."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}"]

    def start(self) -> None:
        """Start the Docker engine and wait until it answers."""
        log = self.folder / "dockerd.log"
        with log.open("ab") as output:
            command = [*self.enter, "dockerd", "--config-file", str(self.runtime / "daemon.json")]
            self.engine = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        deadline = time.monotonic() + START_SECONDS
        while self.run("docker", "version").returncode:
            if self.engine.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the second engine does not start: {log.read_text()[-3000:]}")
            time.sleep(0.3)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the Docker engine, if it runs."""
        if self.engine:
            self.engine.send_signal(number)
            self.engine.wait(60)

    def run(self, *command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run a command there."""
        own = {"DOCKER_HOST": f"unix://{self.socket}", "XDG_CACHE_HOME": str(self.cache), **environment}
        return subprocess.run(
            [*self.enter, *command],
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
def second_host(folder: Path, settings: Mapping[str, object] | None = None, **features: bool) -> Iterator[Host]:
    """A host that starts with nothing but what lies in its folder, and leaves nothing.

    Args:
        folder: where its Docker engine keeps its data, in `docker`.
        settings: of the engine.
        features: of the engine, beyond CDI.
    """
    name = f"dsv4-{uuid.uuid4().hex[:6]}"
    # Paths of sockets are short, and an engine's runtime files lie where a mount is cheap.
    host = Host(name, folder, Path(tempfile.mkdtemp(prefix=f"{name}-", dir="/run")))
    configuration = {
        "data-root": str(folder / "docker"),
        "exec-root": str(host.runtime / "exec"),
        "pidfile": str(host.runtime / "pid"),
        "hosts": [f"unix://{host.socket}"],
        "features": {"cdi": True, **features},
        **(settings or {}),
    }
    (host.runtime / "daemon.json").write_text(json.dumps(configuration))
    try:
        _cable(name)
        host.start()
        yield host
    finally:
        # Their layers stay mounted otherwise.
        if host.engine and (containers := host.run("docker", "ps", "--all", "--quiet").stdout.split()):
            host.run("docker", "rm", "--force", *containers)
        host.stop()
        subprocess.run(["ip", "link", "delete", f"{name}-h"], capture_output=True)
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
        shutil.rmtree(host.runtime, ignore_errors=True)
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
