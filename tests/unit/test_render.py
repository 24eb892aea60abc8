"""What a long command says in a pipe, where nothing is drawn over again."""

import io
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deploy import render
from deploy.stack.events import Event


class Pipe:
    """`steps` in a pipe, on a clock that only goes on while the heartbeat waits, and without its thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(render, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.written = io.StringIO()
        self.lines = render._Lines(Console(file=self.written, width=1000))  # pyright: ignore[reportPrivateUsage]

    def take(self, event: Event) -> None:
        self.lines.take(event)

    def pass_time(self, beats: int, first: float = render.QUIET_S) -> None:
        """Let so many heartbeats come, the first after so many seconds."""
        pipe, pauses = self, [first, *[render.QUIET_S] * (beats - 1)]

        class Ended(threading.Event):
            def wait(self, timeout: float | None = None) -> bool:
                assert timeout == render.QUIET_S
                if not pauses:
                    return True
                pipe.now += pauses.pop(0)
                return False

        self.lines.beat(Ended())

    def said(self) -> list[str]:
        """What was written since the last call."""
        text = self.written.getvalue()
        self.written.seek(0)
        self.written.truncate()
        return text.splitlines()


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Pipe:
    return Pipe(monkeypatch)


def test_what_goes_on_for_long_is_said_again_every_thirty_seconds(pipe: Pipe) -> None:
    pipe.take(Event("image", "progress", "unpacking wheels"))
    pipe.pass_time(2)
    assert pipe.said() == [
        "[   0.0 s] Engine image: unpacking wheels",
        "[  30.0 s] Engine image: unpacking wheels, for 30 s",
        "[  60.0 s] Engine image: unpacking wheels, for 60 s",
    ]


def test_what_comes_further_counts_from_there(pipe: Pipe) -> None:
    pipe.take(Event("start", "started"))
    pipe.now += 20
    pipe.take(Event("start", "progress", "loading weights"))
    pipe.pass_time(1, first=29)
    assert pipe.said() == ["[   0.0 s] Start: started", "[  20.0 s] Start: loading weights"]
    pipe.pass_time(1)
    assert pipe.said() == ["[  79.0 s] Start: loading weights, for 59 s"]


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_what_has_ended_is_said_no_more_and_a_step_ends_with_its_roles(end: str, pipe: Pipe) -> None:
    pipe.take(Event("start", "started"))
    pipe.take(Event("start", "progress", "compiling", role="prefill"))
    pipe.take(Event("start", "progress", "compiling", role="decode"))
    pipe.take(Event("start", "finished", role="prefill"))
    pipe.said()
    pipe.pass_time(1)
    assert pipe.said() == ["[  30.0 s] Start: started, for 30 s", "[  30.0 s] Start decode: compiling, for 30 s"]
    pipe.take(Event("start", "finished" if end == "finished" else "failed", seconds=31))
    pipe.said()
    pipe.pass_time(3)
    assert pipe.said() == []


@given(st.integers(1, 20), st.floats(0.1, 30))
def test_nobody_waits_a_minute_for_a_sign_of_life(beats: int, first: float) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        pipe = Pipe(monkeypatch)
        pipe.take(Event("model", "started"))
        pipe.pass_time(beats, first)
        times = [float(line[1:].split()[0]) for line in pipe.said()]
        pauses = [after - before for before, after in zip(times, [*times[1:], pipe.now - 1000], strict=True)]
        assert max(pauses) <= 60


def test_the_heartbeat_goes_on_beside_the_work_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "QUIET_S", 0.02)
    written = io.StringIO()
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), render.steps(Console(file=written, width=1000)) as report:
        report(Event("accept", "started"))
        until = time.monotonic() + 10
        while written.getvalue().count("Acceptance: started, for 0 s") < 2 and time.monotonic() < until:
            time.sleep(0.01)
        raise KeyboardInterrupt
    assert written.getvalue().count("Acceptance: started, for 0 s") >= 2
    assert threading.active_count() == before
