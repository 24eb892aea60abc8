"""Stacks for the fault tests."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import HERE, ROOT, Controller, docker
from python_on_whales import DockerClient

from deploy.image.build import ensure_image

signal.signal(signal.SIGINT, signal.default_int_handler)

# Longer than what a test blocks for a while, shorter than the default, so that another sees its end.
WAITING_S = 60
CPU = 'profile = "cpu"\n[router]\nport = {port}\n[variables]\n' + f'WAITING_TIMEOUT = "{WAITING_S}"\n'
REPLICAS = """profile = "replicas"
[model]
path = "."
name = "tiny"
[[replica]]
gpus = [0, 1]
numa_node = 0
[[replica]]
gpus = [2, 3]
numa_node = 0
[router]
port = {port}
[variables]
"""


@pytest.fixture(scope="session")
def image() -> str:
    """The engine image of this checkout; IMAGE names another one."""
    return os.environ.get("IMAGE") or ensure_image(ROOT, docker=DockerClient()).tag


@pytest.fixture(scope="session")
def second_name(image: str) -> Iterator[str]:
    """Another name for the same image: to Compose, which compares names, another image."""
    name = f"{image.partition(':')[0]}:fault-test-{os.getpid()}"
    docker("tag", image, name)
    yield name
    subprocess.run(["docker", "image", "rm", name], capture_output=True)


def standin(folder: Path, image: str) -> Controller:
    program = [sys.executable, str(HERE / "controller.py")]
    return Controller(folder, program, REPLICAS, {"STANDIN_IMAGE": image})


def real(folder: Path, *overrides: Path, **variables: str) -> Iterator[Controller]:
    """SGLang itself on the cpu profile with further compose files; it serves until the generator is closed."""
    files = [*map(str, overrides), *filter(None, [os.environ.get("OVERRIDE")])]
    program = [sys.executable, str(HERE / "override.py")]
    made = Controller(folder, program, CPU, {"OVERRIDE": ":".join(files), **variables})
    try:
        made.must("up")
        yield made
    finally:
        made.run("down")


@pytest.fixture(scope="module")
def served(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """A stack with two stand-ins for engines that serves."""
    made = standin(tmp_path_factory.mktemp("served"), image)
    try:
        made.must("up")
        yield made
    finally:
        made.run("down")


@pytest.fixture
def fresh(image: str, tmp_path: Path) -> Iterator[Controller]:
    made = standin(tmp_path, image)
    yield made
    made.run("down")
