import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.stack import gate
from deploy.stack import watch as module
from deploy.stack.client import RequestFailed
from deploy.stack.compose import RoleState
from deploy.stack.state import NoStateFolder, State
from deploy.stack.watch import (
    ENDED_S,
    HANGING_S,
    LEAK_S,
    LOOP,
    LOOP_WINDOW_S,
    SILENT_S,
    UNDELIVERED_S,
    UNROUTED_S,
    Memory,
    Seen,
    judge,
    look,
    watch,
)

WELL = Seen("decode", "running", "healthy", 0, "c1", routed=True, requests=0)


def kinds(memory: Memory, seen: Seen, now: float) -> list[str]:
    return [f"{incident.kind}: {incident.remedy}" for incident in judge(memory, [seen], now)]


def unheard(*said: object) -> None:
    pytest.fail(f"this should not have been said: {said}")


def test_a_stack_that_is_well_causes_nothing() -> None:
    memory = Memory()
    assert [kinds(memory, WELL, now) for now in range(0, 1000, 5)] == [[]] * 200


def test_a_death_that_docker_mended_is_recorded_once() -> None:
    memory = Memory()
    assert kinds(memory, WELL, 0) == []
    assert kinds(memory, replace(WELL, restarts=1, health="starting"), 5) == ["died: none"]
    assert kinds(memory, replace(WELL, restarts=1), 10) == []


def test_restarts_from_before_the_watch_are_not_its_business() -> None:
    assert kinds(Memory(), replace(WELL, restarts=7), 0) == []


def test_a_role_that_is_unhealthy_is_restarted() -> None:
    memory = Memory()
    assert kinds(memory, replace(WELL, health="unhealthy"), 0) == ["stuck: restart"]
    assert kinds(memory, replace(WELL, health="starting"), 5) == []


@given(st.lists(st.tuples(st.booleans(), st.floats(1, 2000)), max_size=30))
def test_a_role_is_given_up_exactly_when_it_ended_too_often_within_the_window(looks: list[tuple[bool, float]]) -> None:
    memory, now, restarts = Memory(), 0.0, 0
    ends: list[float] = []
    judge(memory, [WELL], now)
    for dies, pause in looks:
        now += pause
        restarts += dies
        found = kinds(memory, replace(WELL, restarts=restarts), now)
        ends = [when for when in ends if now - when < LOOP_WINDOW_S] + [now] * dies
        assert ("stopped: stop" in found) == (dies and len(ends) >= LOOP)


def test_a_healthy_engine_that_the_router_does_not_use_gets_a_new_router_after_a_while() -> None:
    memory, seen = Memory(), replace(WELL, routed=False)
    assert kinds(memory, seen, 0) == []
    assert kinds(memory, seen, UNROUTED_S - 1) == []
    assert kinds(memory, seen, UNROUTED_S) == ["unrouted: replace router"]
    assert kinds(memory, seen, UNROUTED_S + 5) == []


def test_an_engine_that_neither_the_router_nor_our_probe_gets_an_answer_from_is_stuck() -> None:
    memory, seen = Memory(), replace(WELL, routed=False, answers=False)
    assert kinds(memory, seen, 0) == []
    assert kinds(memory, seen, SILENT_S) == ["stuck: restart"]
    assert kinds(memory, replace(seen, health="starting"), SILENT_S + 5) == []


def test_an_engine_that_shows_the_gate_no_life_is_restarted_sooner_and_not_while_it_starts() -> None:
    memory, seen = Memory(), replace(WELL, routed=None, hanging=True)
    assert kinds(memory, seen, 0) == []
    assert kinds(memory, seen, HANGING_S - 1) == []
    assert kinds(memory, seen, HANGING_S) == ["stuck: restart"]
    assert [kinds(memory, replace(seen, health="starting"), 10.0 * look) for look in range(2, 30)] == [[]] * 28


def test_a_prefill_whose_cache_does_not_arrive_is_restarted_and_not_while_nobody_knows() -> None:
    memory, seen = Memory(), replace(WELL, role="prefill", delivers=False)
    assert kinds(memory, seen, 0) == []
    assert kinds(memory, replace(seen, delivers=None), UNDELIVERED_S / 2) == []
    assert kinds(memory, seen, UNDELIVERED_S) == []
    assert kinds(memory, seen, 2 * UNDELIVERED_S) == ["stuck: restart"]
    assert kinds(memory, replace(seen, delivers=True), 2 * UNDELIVERED_S + 5) == []


def test_a_router_that_lacks_its_engines_is_not_the_one_to_restart() -> None:
    router = Seen("router", "running", "unhealthy", 0, "c2", answers=True)
    assert kinds(Memory(), router, 0) == []
    assert kinds(Memory(), replace(router, answers=False), 0) == ["stuck: restart"]


def test_what_has_ended_and_stays_so_is_started() -> None:
    memory, ended = Memory(), replace(WELL, status="exited", health="", routed=None, requests=None)
    assert kinds(memory, ended, 0) == []
    assert kinds(memory, ended, ENDED_S) == ["left: start"]
    assert kinds(memory, WELL, ENDED_S + 5) == []
    memory.given_up.add(WELL.container)
    assert [kinds(memory, ended, now) for now in (100, 100 + ENDED_S)] == [[], []]


def test_a_drained_engine_is_left_alone() -> None:
    memory, seen = Memory(), replace(WELL, routed=None)
    assert [kinds(memory, seen, now) for now in range(0, 500, 5)] == [[]] * 100


def test_an_idle_engine_that_keeps_cache_in_use_leaks_and_a_busy_one_does_not() -> None:
    memory = Memory()
    busy = replace(WELL, requests=3, used_tokens=900)
    assert [kinds(memory, busy, now) for now in range(0, 500, 5)] == [[]] * 100
    idle = replace(WELL, requests=0, used_tokens=17)
    assert kinds(memory, idle, 1000) == []
    assert kinds(memory, idle, 1000 + LEAK_S) == ["leaks: none"]
    assert kinds(memory, WELL, 1005 + LEAK_S) == []


@pytest.mark.parametrize("once", [True, False])
def test_a_file_in_place_of_the_state_folder_ends_the_watch(tmp_path: Path, once: bool) -> None:
    """It would find the same at every later look, and never watch."""
    (tmp_path / "file").touch()
    with pytest.raises(NoStateFolder):
        watch(tmp_path, State(tmp_path / "file"), 1, unheard, unheard, unheard, once)


def test_the_one_look_of_a_timer_that_could_not_be_finished_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(State, "lock", full)
    with pytest.raises(OSError, match="No space"):
        watch(tmp_path, State(tmp_path), 1, unheard, unheard, unheard, once=True)


class Losing:
    """A stack whose decode has counted so many lost transfers, one more with each look."""

    def __init__(self, *lost: int) -> None:
        self.lost = list(lost)

    def metrics(self, role: str) -> str:
        return f"sglang:num_transfer_failed_reqs_total {self.lost.pop(0)}.0\n"

    def config(self) -> None:
        pass


@pytest.mark.parametrize(
    ("lost", "answered", "delivers", "left"),
    [
        ((3,), None, None, 3),
        ((4,), True, True, 4),
        ((4, 5), False, False, 3),
        ((4, 4), False, None, 3),
        # Decode was started again and counts from nothing.
        ((0,), None, None, 0),
    ],
)
def test_a_question_is_asked_only_after_a_lost_transfer_and_only_another_lost_one_tells(
    monkeypatch: pytest.MonkeyPatch, lost: tuple[int, ...], answered: bool | None, delivers: bool | None, left: int
) -> None:
    def stream(*_: object, **__: object) -> Iterator[str]:
        assert answered is not None, "there was nothing to ask"
        if not answered:
            raise RequestFailed("no answer", "", "")
        yield "word"

    monkeypatch.setattr(module, "stream", stream)
    monkeypatch.setattr(module, "endpoint", lambda config: None)  # type: ignore[misc]
    memory = Memory(lost_transfers=3)
    assert module._delivers(cast("Any", Losing(*lost)), memory) is delivers  # pyright: ignore[reportPrivateUsage]
    assert memory.lost_transfers == left


def test_engines_are_asked_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs must not keep the watch from the next: here each is answered only once all have been asked."""
    states = [
        RoleState(role, role, role, "i", "running", "healthy", 0, False, 0, None, 1, frozenset(), "", ())
        for role in ("prefill", "decode", "router")
    ]
    asked = Barrier(2, timeout=5)

    class Stack:
        def roles(self) -> list[RoleState]:
            return states

        def metrics(self, role: str, path: str) -> str:
            asked.wait()
            return json.dumps({"loads": []}) if path == "/v1/loads" else ""

    def view(_: object) -> gate.View:
        return gate.View(0, 0, frozenset(), frozenset(), frozenset(), frozenset(), replacing=True)

    monkeypatch.setattr(gate, "view", view)
    assert [seen.role for seen in look(cast(Any, Stack()), Memory())] == ["prefill", "decode", "router"]
