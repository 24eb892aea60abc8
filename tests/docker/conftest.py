"""The real Docker engine, the real image, and stand-ins for what the machine lacks: eight GPUs that are /dev/null."""

import json
import os
import resource
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from python_on_whales import DockerClient

from deploy.image.build import ensure_image
from deploy.model import tiny

# Programs under test are interrupted; a shell that runs the tests in the background has them ignore that.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parents[2]
# A registry and cosign, which the Makefile unpacks for the tests.
os.environ["PATH"] = f"{ROOT / '.cache/programs/usr/bin'}:{os.environ['PATH']}"
API_KEY = "sk-a-secret-of-the-test"
GPU_KIND = "tests.invalid/gpu"
READY_PATIENCE_SECONDS = 600
PROJECT_LABEL = "com.docker.compose.project"


@dataclass(frozen=True)
class Project:
    """A compose project of its own, started with plain `docker compose` as a person would.

    Attributes:
        files: compose files, each overriding those before it.
        variables: what the env file says.
    """

    name: str
    files: tuple[Path, ...]
    variables: Mapping[str, str]

    def compose(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        files = [word for path in self.files for word in ("--file", str(path))]
        # Nothing of the shell's or of .env: the files' own defaults and `variables` decide.
        environment = {key: os.environ[key] for key in ("PATH", "HOME", "DOCKER_HOST") if key in os.environ}
        done = subprocess.run(
            ["docker", "compose", "--env-file", "/dev/null", "--project-name", self.name, *files, *arguments],
            env={**environment, **self.variables},
            capture_output=True,
            text=True,
            timeout=READY_PATIENCE_SECONDS + 60,
        )
        if check and done.returncode:
            logs = "" if arguments[0] == "logs" else self.compose("logs", "--tail=15", check=False).stdout
            pytest.fail(f"docker compose {' '.join(arguments)}: {done.stderr[-3000:]}\n{logs[-6000:]}")
        return done

    def up(self) -> None:
        self.compose("up", "--detach", "--wait", "--wait-timeout", str(READY_PATIENCE_SECONDS), "--quiet-pull")

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")

    def config(self) -> dict[str, Any]:
        return json.loads(self.compose("config", "--format", "json").stdout)

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).stdout.strip()

    def inspect(self, service: str) -> dict[str, Any]:
        return json.loads(docker("inspect", self.container(service)))[0]

    def execute(self, service: str, *command: str) -> str:
        return docker("exec", self.container(service), *command)

    def log(self, service: str) -> str:
        done = subprocess.run(["docker", "logs", self.container(service)], capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    def fetch(self, service: str, address: str) -> str:
        """A page that only the containers of the project can reach."""
        script = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=20).read().decode())"
        return self.execute(service, "python", "-c", script, address)

    def leftovers(self) -> list[str]:
        """Everything that Docker still has of the project."""
        label = f"label={PROJECT_LABEL}={self.name}"
        found: list[str] = []
        for kind, listing in (
            ("container", ("container", "ls", "--all", "--format", "{{.Names}}")),
            ("network", ("network", "ls", "--format", "{{.Name}}")),
            ("volume", ("volume", "ls", "--format", "{{.Name}}")),
        ):
            found += [f"{kind} {name}" for name in docker(*listing, "--filter", label).split()]
        return found


def docker(*arguments: str) -> str:
    """Run a docker command and return what it printed; a failing one fails the test with its words."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.fail(f"docker {' '.join(arguments[:2])}: {done.stdout}{done.stderr}")
    return done.stdout


@contextmanager
def running(project: Project) -> Iterator[Project]:
    try:
        project.up()
        yield project
    finally:
        project.down()


def new_project(*names: str, **variables: str) -> Project:
    """A project of the compose files `names`, with limits that this machine allows."""
    files = tuple(ROOT / name for name in names)
    allowed = {"MEMLOCK": limit(resource.RLIMIT_MEMLOCK), "NOFILE": limit(resource.RLIMIT_NOFILE)}
    return Project(f"dsv4-test-{uuid.uuid4().hex[:8]}", files, {**allowed, "PORT": str(free_port()), **variables})


def limit(which: int) -> str:
    hard = resource.getrlimit(which)[1]
    return "-1" if hard == resource.RLIM_INFINITY else str(hard)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="session")
def image() -> str:
    """The engine image of this checkout, built if this machine has not got it; IMAGE names another one."""
    if named := os.environ.get("IMAGE"):
        return named
    return ensure_image(ROOT, docker=DockerClient()).tag


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.generate(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def api_key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "api-key"
    path.write_text(f"{API_KEY}\n")
    return path


@pytest.fixture(scope="session")
def fake_gpus() -> Iterator[list[str]]:
    """CDI names of eight stand-in GPUs, each a device file, a variable and a mount like the real ones."""
    directories = json.loads(docker("info", "--format", "{{json .CDISpecDirs}}") or "null")
    if not directories:
        pytest.fail('the Docker engine has CDI switched off; /etc/docker/daemon.json needs {"features": {"cdi": true}}')
    folder = next((Path(name) for name in directories if Path(name).is_dir()), Path(directories[0]))
    path = folder / "tests.invalid-gpu.json"
    made = not folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    devices = [
        {
            "name": str(index),
            "containerEdits": {
                "env": [f"FAKE_GPU_{index}=1"],
                "deviceNodes": [{"path": f"/dev/fakegpu{index}", "hostPath": "/dev/null", "type": "c"}],
                "mounts": [
                    {"hostPath": "/etc/hostname", "containerPath": f"/run/fakegpu/{index}", "options": ["ro", "bind"]}
                ],
            },
        }
        for index in range(8)
    ]
    path.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": GPU_KIND, "devices": devices}))
    yield [f"{GPU_KIND}={index}" for index in range(8)]
    path.unlink()
    if made:
        folder.rmdir()
