"""Full disks: the state folder with stand-ins for engines."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import Controller, docker, note

pytestmark = pytest.mark.long
STACK = "two stand-ins, real router"


@pytest.fixture
def small(fresh: Controller) -> Iterator[Controller]:
    """A controller whose state folder is a file system of 4 MB."""
    fresh.state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(fresh.state)], check=True)
    try:
        yield fresh
        fresh.run("down")
    finally:
        subprocess.run(["umount", str(fresh.state)], check=True)


def fill(folder: Path) -> Path:
    file = folder / "filler"
    with file.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(b"x" * 4096)
        except OSError:
            return file


def test_on_a_full_state_folder_nothing_is_changed_and_watch_goes_on(small: Controller, second_name: str) -> None:
    small.must("up")
    before = small.images()
    filler = fill(small.state)
    for verb in (("upgrade",), ("restart", "engine"), ("rollback", "1")):
        refused = small.run(*verb, STANDIN_IMAGE=second_name)
        assert refused.returncode == 1, refused.stderr
        assert "No space left on device" in refused.stderr
        assert "df -h" in refused.stderr
        assert small.images() == before
    assert small.run("status").returncode == 0
    # A role that is stuck is restarted all the same; what is said about it cannot be kept.
    container = small.container("engine-2")
    begun = docker("inspect", "--format", "{{.State.StartedAt}}", container)
    os.kill(small.child("engine-2", "python /standin_engine.py"), signal.SIGSTOP)
    unhealthy(container)
    looked = small.must("watch", "--once")
    assert "No space left on device" in looked.stderr
    assert docker("inspect", "--format", "{{.State.StartedAt}}", container) != begun
    filler.unlink()
    small.must("up")
    small.must("restart", "engine")
    assert "damaged" not in small.must("generations").stdout
    seen = "upgrade, restart and rollback are refused, exit code 1; watch still restarts a stuck role"
    note("disk full under the state folder", seen, None, "nothing; after it is freed, everything works", STACK)


def unhealthy(container: str) -> None:
    for _ in range(60):
        if docker("inspect", "--format", "{{.State.Health.Status}}", container).strip() == "unhealthy":
            return
        time.sleep(1)
    pytest.fail("Docker does not notice that the stand-in is stuck")
