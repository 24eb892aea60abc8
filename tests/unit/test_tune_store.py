"""An experiment on disk: what is written is there after a kill at any byte."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.stack.state import State
from deploy.tune.experiment import Alone, Trial
from deploy.tune.store import TRIALS, DamagedExperiment, open_store

PLAN = {"schema": "x", "spec": "a = 1"}


def trial(number: int) -> Trial:
    return Trial(comparison=0, pair=number, arm="candidate", outcome="measured", value=1.5, answers=["ä\n"])


@given(st.integers(1, 4), st.integers(0, 10_000))
def test_a_record_that_was_cut_off_is_as_if_it_had_never_been(
    tmp_path_factory: pytest.TempPathFactory, count: int, cut: int
) -> None:
    store, _ = open_store(State(tmp_path_factory.mktemp("state")), PLAN, fresh=False)
    for number in range(count):
        store.add(trial(number))
    file = store.folder / TRIALS
    whole = file.read_bytes()
    file.write_bytes(whole[: cut % (len(whole) + 1)])
    kept = store.trials()
    assert kept == [trial(number) for number in range(len(kept))]
    store.add(trial(99))
    assert store.trials() == [*kept, trial(99)]


def test_the_same_plan_goes_on_until_it_is_over_and_another_begins(tmp_path: Path) -> None:
    state = State(tmp_path)
    first, resumed = open_store(state, PLAN, fresh=False)
    first.add(trial(0))
    first.add(Alone(op="x", ratio=1.5))
    assert not resumed
    again, resumed = open_store(state, dict(PLAN), fresh=False)
    assert resumed and again.trials() == [trial(0)] and again.alone() == [Alone(op="x", ratio=1.5)]
    other, resumed = open_store(state, {**PLAN, "spec": "a = 2"}, fresh=False)
    assert not resumed and other.folder != first.folder
    fresh, resumed = open_store(state, PLAN, fresh=True)
    assert not resumed and fresh.trials() == []
    fresh.close()
    assert open_store(state, PLAN, fresh=False)[0].folder == first.folder
    first.close()
    assert not open_store(state, PLAN, fresh=False)[1]


def test_a_file_that_somebody_changed_is_named(tmp_path: Path) -> None:
    store, _ = open_store(State(tmp_path), PLAN, fresh=False)
    (store.folder / TRIALS).write_text('{"comparison": "no"}\n')
    with pytest.raises(DamagedExperiment) as raised:
        store.trials()
    assert TRIALS in raised.value.message and "--fresh" in raised.value.fix
    (store.folder / "plan.json").write_text("[]")
    assert not open_store(State(tmp_path), PLAN, fresh=False)[1]


def test_the_plan_is_written_in_full(tmp_path: Path) -> None:
    store, _ = open_store(State(tmp_path), PLAN, fresh=False)
    assert json.loads((store.folder / "plan.json").read_text()).items() >= PLAN.items()
