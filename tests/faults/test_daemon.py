"""The Docker engine ends, is killed, and cannot write logs: a second engine, with two stand-ins for engines of ours."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import REPLICAS
from harness import HERE, PROMPTS, ROOT, Controller, docker, load, note
from layers import share
from standin_engine import words

sys.path.append(str(ROOT / "tests/docker"))

from second_host import Host, second_host

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="a network namespace and a second Docker engine need root"),
]
STACK = "two stand-ins, real router"
ANSWERS = {prompt: "".join(words(prompt, 20)) for prompt in PROMPTS}
PATIENCE_S = 120.0


@contextmanager
def serving(image: str, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Iterator[tuple[Host, Controller]]:
    """A stack on an engine of its own."""
    root = Path(docker("info", "--format", "{{.DockerRootDir}}").strip())
    # In it, because hard links do not leave a mount.
    folder = Path(tempfile.mkdtemp(prefix="dsv4-test-", dir=root))
    logs = folder / "docker" / "containers"
    try:
        share(root, image, folder / "docker")
        logs.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(logs)], check=True)
        with second_host(folder, settings) as host, monkeypatch.context() as patch:
            patch.setenv("DOCKER_HOST", f"unix://{host.socket}")
            program = [*host.enter, sys.executable, str(HERE / "controller.py")]
            controller = Controller(folder, program, REPLICAS, {"STANDIN_IMAGE": image})
            controller.must("up")
            yield host, controller
            controller.run("down")
    finally:
        subprocess.run(["umount", str(logs)], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def until_served(host: Host, controller: Controller) -> float:
    """Seconds until the stack answers."""
    begun = time.monotonic()
    while host.run("curl", "--silent", "--fail", "--max-time", "5", f"{controller.url}/readiness").returncode:
        assert time.monotonic() - begun < PATIENCE_S, controller.run("status").stdout
        time.sleep(0.2)
    return time.monotonic() - begun


@pytest.mark.parametrize("live_restore", [False, True], ids=["default", "live-restore"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_the_docker_engine_is_restarted_under_load(
    image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals, live_restore: bool
) -> None:
    with serving(image, monkeypatch, **{"live-restore": live_restore}) as (host, controller):
        watcher = controller.start("watch", "--json")
        try:
            with load(controller.url, ANSWERS, tmp_path, enter=host.enter) as found:
                begun = time.monotonic()
                host.stop(how)
                # What is said of a Docker engine that is away.
                refused = controller.run("status")
                assert refused.returncode != 0 and "Docker" in refused.stderr, refused.stderr
                host.start()
                until_served(host, controller)
                seconds = time.monotonic() - begun
            assert watcher.poll() is None, watcher.communicate()
        finally:
            watcher.terminate()
            watcher.communicate(timeout=30)
        assert controller.run("status").returncode == 0
        assert until_served(host, controller) < 5
    assert "wrong answer" not in found["errors"]
    seen = f"{found['requests'] - found['failures']} answers, {found['failures']} refused or cut"
    seen += f"; the slowest {found['slowest_s']:.1f} s"
    fault = f"{how.name} of the Docker engine, which is started again, with deploy watch"
    fault += ", live-restore on" if live_restore else ""
    note(fault, seen, seconds, "what was in flight" if found["failures"] else "nothing", STACK)
    assert seconds < PATIENCE_S


def test_a_full_disk_under_the_logs_stops_no_answer(
    image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(image, monkeypatch) as (host, controller):
        filler = host.folder / "docker" / "containers" / "filler"
        subprocess.run(["dd", "if=/dev/zero", f"of={filler}", "bs=4k"], capture_output=True)
        with load(controller.url, ANSWERS, tmp_path, enter=host.enter) as found:
            time.sleep(20)
        assert found["failures"] == 0 and found["requests"] > 20, found["errors"]
        state = controller.run("status")
        assert state.returncode == 0, state.stderr
        filler.unlink()
        controller.must("restart", "engine")
        assert "ready to roll" in controller.must("logs", "engine", "--since", "1m").stdout
    note("disk full under the logs", f"{found['requests']} answers in 20 s", None, "log lines of that time", STACK)
