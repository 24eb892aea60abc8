"""What is wrong around real engines: no room for caches, a clock that jumps, a port that is taken."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import HERE, PROMPTS, ROOT, Controller, docker, note
from test_engines import SPEC, STACK, ask, observe, settled, text_of, well

pytestmark = pytest.mark.long
LIBRARY = ROOT / ".cache/programs/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
HOUR_S = 3600
HOLDER = "import socket, time; s = socket.create_server(('', 8998)); time.sleep(600)"


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the file that says by how much the containers' clock is wrong."""
    if not LIBRARY.exists():
        pytest.fail("no libfaketime: make test-faults brings it, or: make .cache/programs/usr/bin/libfaketime")
    folder = tmp_path_factory.mktemp("clock")
    folder.chmod(0o755)
    (folder / LIBRARY.name).write_bytes(LIBRARY.read_bytes())
    (folder / "now").write_text("+0\n")
    return folder


@pytest.fixture(scope="module")
def served(clock: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    program = [sys.executable, str(HERE / "override.py")]
    # Not a variable of this process: the controller takes those out that compose files know.
    spec = f'{SPEC}[variables]\nCLOCK_FOLDER = "{clock}"\n'
    made = Controller(tmp_path_factory.mktemp("odd"), program, spec, {"OVERRIDE": str(HERE / "surroundings.yaml")})
    try:
        made.must("up")
        yield made
    finally:
        made.run("down")


@pytest.fixture(scope="module")
def answers(served: Controller) -> dict[str, str]:
    return {prompt: text_of(ask(served.url, prompt)) for prompt in PROMPTS}


def test_engines_start_and_serve_with_a_full_cache_volume(served: Controller, answers: dict[str, str]) -> None:
    for role in ("prefill", "decode"):
        command = ["docker", "exec", served.container(role), "dd", "if=/dev/zero", "of=/var/cache/engine/x", "bs=64k"]
        assert b"No space left" in subprocess.run(command, capture_output=True).stderr
    assert text_of(ask(served.url, PROMPTS[0])) == answers[PROMPTS[0]]
    note("no room in the caches' volume", "nothing", None, "what would have been cached", STACK)


@pytest.mark.parametrize("jump", [HOUR_S, -HOUR_S], ids=["forward", "back"])
def test_the_clock_jumps_by_an_hour(served: Controller, answers: dict[str, str], clock: Path, jump: int) -> None:
    def at(offset: int) -> str:
        (clock / "now").write_text(f"{offset:+d}\n")
        return docker("exec", served.container("decode"), "date", "+%s")

    try:
        before = int(at(0))
        seen = observe(served.url, answers, lambda: at(jump))
        assert abs(int(at(jump)) - before - jump) < HOUR_S / 2, "the clock did not jump"
    finally:
        at(0)
    direction = "forward" if jump > 0 else "back"
    note(f"clock jumps {direction} by an hour", seen.words(), seen.service() or None, "what was in flight", STACK)
    settled(seen)
    well(served.url)


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
