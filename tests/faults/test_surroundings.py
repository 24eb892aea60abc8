"""What is wrong around real engines: no room for caches, a port that is taken."""

import subprocess
import time
from collections.abc import Iterator

import pytest
from conftest import real
from harness import HERE, PROMPTS, Controller, docker, note
from test_engines import STACK, answers, ask, text_of  # noqa: F401

pytestmark = pytest.mark.long
HOLDER = "import socket, time; s = socket.create_server(('', 8998)); time.sleep(600)"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    yield from real(tmp_path_factory.mktemp("odd"), HERE / "surroundings.yaml")


def test_engines_start_and_serve_with_a_full_cache_volume(
    served: Controller,
    answers: dict[str, str],  # noqa: F811
) -> None:
    for role in ("prefill", "decode"):
        command = ["docker", "exec", served.container(role), "dd", "if=/dev/zero", "of=/var/cache/engine/x", "bs=64k"]
        assert b"No space left" in subprocess.run(command, capture_output=True).stderr
    assert text_of(ask(served.url, PROMPTS[0])) == answers[PROMPTS[0]]
    note("no room in the caches' volume", "nothing", None, "what would have been cached", STACK)


def test_a_prefill_whose_bootstrap_port_is_taken_says_so_and_ends(image: str) -> None:
    holder = docker("run", "--rm", "--detach", "--network", "none", image, "python", "-c", HOLDER).strip()
    try:
        network = ["--network", f"container:{holder}", "--env", "SGLANG_USE_CPU_ENGINE=1"]
        command = [image, "python", "-m", "engine_runtime.launch", "prefill", "--model-path=/model"]
        begun = time.monotonic()
        done = subprocess.run(["docker", "run", "--rm", *network, *command], capture_output=True, text=True, timeout=60)
        seconds = time.monotonic() - begun
    finally:
        docker("kill", holder)
    assert done.returncode == 1
    assert "port 8998, where decode asks" in done.stderr and "Traceback" not in done.stderr, done.stderr
    what = f"prefill ends after {seconds:.0f} s and says why; meanwhile as with a dead prefill"
    note("bootstrap port of prefill taken", what, None, "nothing", STACK)
