"""The wall clock jumps by an hour: under a running stack, and between the commands of the controller."""

import json
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import real
from harness import HERE, PROMPTS, SLOW, Controller, docker, load, note
from test_engines import SETTLED_S, STACK, ask, text_of

HOUR = 3600
# Where containers find the library and the offset.
FOLDER = "/clock"
OVERRIDE = """x-clock: &clock
  environment: {{LD_PRELOAD: {inside}/clock.so, CLOCK_OFFSET_FILE: {inside}/offset}}
  volumes: [{{type: bind, source: "{outside}", target: {inside}, read_only: true}}]
services:
"""
ROLES = ("prefill", "decode", "router")


class Clock:
    """The wall clock of every program that is started with `variables`, and of containers with the compose file.

    Args:
        folder: where the library is compiled to, in the image: there it must run, and it runs on newer machines too.
    """

    def __init__(self, folder: Path, image: str) -> None:
        self.offset, self.compose = folder / "offset", folder / "clock.yaml"
        folder.chmod(0o777)
        self.set(0)
        compile_ = ["gcc", "-shared", "-fPIC", "-O2", "-o", "/out/clock.so", "/src/clock.c"]
        source = f"--volume={HERE.parent / 'clock.c'}:/src/clock.c:ro"
        docker("run", "--rm", "--network=none", source, f"--volume={folder}:/out", image, *compile_)
        self.variables = {"LD_PRELOAD": str(folder / "clock.so"), "CLOCK_OFFSET_FILE": str(self.offset)}
        head = OVERRIDE.format(inside=FOLDER, outside=folder)
        self.compose.write_text(head + "".join(f"  {role}: *clock\n" for role in ROLES))

    def set(self, seconds: int) -> None:
        # In place: the programs have it mapped.
        with os.fdopen(os.open(self.offset, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
            file.write(struct.pack("=q", seconds))


@pytest.fixture
def clock(image: str, tmp_path_factory: pytest.TempPathFactory) -> Clock:
    return Clock(tmp_path_factory.mktemp("clock"), image)


@contextmanager
def jumping(folder: Path, clock: Clock) -> Iterator[Controller]:
    yield from real(folder, clock.compose, **clock.variables)


def hour_off(controller: Controller, role: str) -> float:
    """By how many hours a container's wall clock differs from the machine's, as a new program in it sees it."""
    now = docker("exec", controller.container(role), "python", "-S", "-c", "import time; print(time.time())")
    return (float(now) - time.time()) / HOUR


def started(controller: Controller) -> dict[str, str]:
    form = "{{.State.StartedAt}} {{.State.Pid}} {{.RestartCount}}"
    return {role: docker("inspect", "--format", form, controller.container(role)) for role in ROLES}


@pytest.mark.long
def test_a_wall_clock_that_jumps_under_load_fails_no_request_and_restarts_nothing(clock: Clock, tmp_path: Path) -> None:
    with jumping(tmp_path, clock) as served:
        answers = {prompt: text_of(ask(served.url, prompt)) for prompt in PROMPTS}
        before = started(served)
        watcher = served.start("watch", "--json")
        with load(served.url, answers, tmp_path, users=4) as found:
            for hours in (1, -1, 0, 1, 0):
                clock.set(hours * HOUR)
                time.sleep(15)
                assert [round(hour_off(served, role)) for role in ROLES] == [hours] * 3
        watcher.terminate()
        incidents, trouble = watcher.communicate(timeout=30)
        assert found["requests"] > 20
        assert found["failures"] == 0, found["errors"]
        assert found["slowest_s"] < SETTLED_S * SLOW
        assert incidents == "", incidents
        assert "failed" not in trouble, trouble
        assert started(served) == before
        served.must("status")
        seen = f"{found['requests']} answers, none wrong; the slowest {found['slowest_s']:.1f} s"
        note("wall clock set forth and back by an hour, five times, with deploy watch", seen, None, "nothing", STACK)


@pytest.mark.long
def test_a_state_that_was_written_in_the_future_is_worked_with(clock: Clock, fresh: Controller) -> None:
    fresh.variables |= clock.variables
    text = fresh.spec.read_text()

    def change(word_seconds: float) -> None:
        fresh.spec.write_text(f'{text}WORD_SECONDS = "{word_seconds}"\n')

    def current() -> int:
        return next(
            item["number"] for item in json.loads(fresh.must("generations", "--json").stdout) if item["current"]
        )

    clock.set(HOUR)
    fresh.must("up")
    first = current()
    clock.set(0)
    assert current() == first
    change(0.01)
    fresh.must("up")
    assert current() == first + 1
    clock.set(-HOUR)
    fresh.must("rollback")
    assert current() == first
    fresh.must("watch", "--once")
    # A change that was cut off in the future.
    change(0.03)
    clock.set(HOUR)
    fresh.start("up", KILL_AT="6").communicate(timeout=400)
    assert (fresh.state / "journal.json").exists()
    clock.set(0)
    fresh.must("up")
    assert current() > first + 1
    assert not (fresh.state / "journal.json").exists()
    fresh.must("generations", "prune")
    stack = "two stand-ins, real router"
    seen = "up, rollback, prune and the healing of a cut-off up work with a state of the future"
    note("wall clock of the controller set forth and back by an hour", seen, None, "nothing", stack)
