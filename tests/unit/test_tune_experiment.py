"""The experiment's decisions on simulated trials, without a stack."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.tune.answers import QUESTIONS, agreement
from deploy.tune.decide import Rule
from deploy.tune.experiment import (
    MOST_REJECTED,
    Alone,
    Comparison,
    Design,
    Edits,
    Outcome,
    Progress,
    Step,
    Trial,
    progress,
)

RIGHT = ["right"] * len(QUESTIONS)
Measure = Callable[[Step], Trial]


def comparison(name: str, op: str = "") -> Comparison:
    return Comparison(name=f"{name}=1", switch=op or name, edits={name: "1"}, op=op)


def design(*names: str, **others: float | int) -> Design:
    found = tuple(comparison(name) for name in names)
    return Design(found, Rule(len(found)), **others)  # pyright: ignore[reportArgumentType]


def accepts(edits: Edits, holds: Edits) -> str:
    return "it changes nothing here" if edits == holds else ""


def simulated(gains: Mapping[str, float], rng: np.random.Generator, deviation: float = 0.01) -> Measure:
    """Trials of a stack in which each setting multiplies the throughput."""

    def measure(step: Step) -> Trial:
        speed = 100.0 * math.prod(1 + gains.get(key, 0.0) for key in step.edits) * math.exp(rng.normal(0, deviation))
        return trial(step, value=speed)

    return measure


def trial(step: Step, outcome: Outcome = "measured", value: float = 100.0, answers: list[str] | None = None) -> Trial:
    told = RIGHT if answers is None else answers
    return Trial(
        comparison=step.comparison, pair=step.pair, arm=step.arm, outcome=outcome, value=value, answers=told, seconds=10
    )


def run(
    wanted: Design, measure: Measure, refuses: Callable[[Edits, Edits], str] = accepts, alone: tuple[Alone, ...] = ()
) -> tuple[Progress, list[Trial]]:
    trials: list[Trial] = []
    while (known := progress(wanted, trials, alone, refuses)).next is not None:
        trials.append(measure(known.next))
    return known, trials


def verdicts(known: Progress) -> dict[str, str]:
    return {finding.comparison.switch: finding.verdict for finding in known.findings}


def test_the_setting_that_helps_wins_and_the_others_do_not() -> None:
    gains = {"a": 0.0, "b": 0.2, "c": -0.5, "d": 0.0}
    known, trials = run(design(*gains), simulated(gains, np.random.default_rng(1)))
    assert known.winners == {"b": "1"}
    assert verdicts(known) == {"a": "no gain", "b": "better", "c": "no gain", "d": "no gain"}
    # Half of the throughput needs no second pair.
    assert sum(one.comparison == 2 for one in trials) == 2


def test_what_comes_later_is_tried_on_top_of_what_has_won() -> None:
    seen: list[Edits] = []

    def measure(step: Step) -> Trial:
        seen.append(dict(step.edits))
        return simulated({"a": 0.3, "b": 0.3}, np.random.default_rng(len(seen)))(step)

    known, trials = run(design("a", "b"), measure)
    assert known.winners == {"a": "1", "b": "1"}
    later = [edits for edits, one in zip(seen, trials, strict=True) if one.comparison == 1]
    assert {tuple(edits) for edits in later} == {("a",), ("a", "b")}


def test_every_second_pair_begins_with_the_candidate() -> None:
    _, trials = run(design("a"), simulated({"a": 0.04}, np.random.default_rng(3)))
    arms = [one.arm for one in trials]
    assert arms[:4] == ["incumbent", "candidate", "candidate", "incumbent"]
    assert [one.pair for one in trials] == [place // 2 for place in range(len(trials))]


@given(st.lists(st.floats(-0.3, 0.3), min_size=1, max_size=4), st.integers(0, 1000), st.integers(0, 60))
def test_an_experiment_cut_off_anywhere_goes_on_as_if_nothing_had_been(gains: list[float], seed: int, cut: int) -> None:
    names = {f"s{place}": gain for place, gain in enumerate(gains)}

    def measure(step: Step) -> Trial:
        # The same trial gives the same value, whoever runs it.
        rng = np.random.default_rng([seed, step.comparison, step.pair, step.arm == "candidate"])
        return simulated(names, rng)(step)

    wanted = design(*names)
    whole, trials = run(wanted, measure)
    again = trials[:cut]
    while (
        known := progress(wanted, [Trial.model_validate_json(one.model_dump_json()) for one in again], (), accepts)
    ).next:
        again.append(measure(known.next))
    assert again == trials and known == whole


def test_an_experiment_on_a_stack_where_nothing_helps_changes_nothing_nearly_always() -> None:
    times, names = 200, ["a", "b", "c", "d", "e"]
    rng = np.random.default_rng(7)
    wrong = sum(bool(run(design(*names), simulated({}, rng))[0].winners) for _ in range(times))
    assert wrong / times <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / times)


def test_a_combination_that_the_spec_refuses_is_never_started() -> None:
    def refuses(edits: Edits, holds: Edits) -> str:
        return "not both" if {"a", "b"} <= set(edits) else accepts(edits, holds)

    known, trials = run(design("a", "b"), simulated({"a": 0.5, "b": 0.5}, np.random.default_rng(1)), refuses)
    assert verdicts(known) == {"a": "better", "b": "refused"} and known.findings[1].reason == "not both"
    assert all(one.comparison == 0 for one in trials)


def test_a_setting_that_does_not_start_or_answers_otherwise_is_dropped_at_once() -> None:
    fast = simulated({"a": 1.0, "b": 1.0}, np.random.default_rng(1))

    def measure(step: Step) -> Trial:
        if step.arm == "candidate" and step.comparison == 0:
            return trial(step, "failed").model_copy(update={"reason": "it hangs", "answers": []})
        if step.arm == "candidate":
            return fast(step).model_copy(update={"answers": [*RIGHT[:-1], "wrong"]})
        return fast(step)

    known, trials = run(design("a", "b"), measure)
    assert verdicts(known) == {"a": "fails", "b": "wrong answers"} and not known.winners
    assert known.findings[0].reason == "it hangs" and "0.833" in known.findings[1].reason
    assert len(trials) == 4


def test_a_tolerance_lets_close_answers_through() -> None:
    fast = simulated({"a": 1.0}, np.random.default_rng(1))

    def measure(step: Step) -> Trial:
        answers = RIGHT if step.arm == "incumbent" else [*RIGHT[:-1], "righX"]
        return fast(step).model_copy(update={"answers": answers})

    assert run(design("a"), measure)[0].findings[0].verdict == "wrong answers"
    known, _ = run(design("a", agreement=0.9), measure)
    assert known.findings[0].verdict == "better"
    assert known.findings[0].agreement == pytest.approx((len(QUESTIONS) - 1 + 0.8) / len(QUESTIONS))


def test_a_stack_that_does_not_repeat_its_own_answers_asks_no_more_of_others() -> None:
    fast = simulated({"a": 1.0}, np.random.default_rng(1))
    other, third = ["other", *RIGHT[1:]], ["other", "other", *RIGHT[2:]]

    def measure(step: Step, candidate: list[str]) -> Trial:
        without = RIGHT if step.pair == 0 else other
        return fast(step).model_copy(update={"answers": without if step.arm == "incumbent" else candidate})

    assert run(design("a"), lambda step: measure(step, other))[0].findings[0].verdict == "better"
    assert run(design("a"), lambda step: measure(step, third))[0].findings[0].verdict == "wrong answers"


def test_windows_that_are_not_valid_are_tried_again_and_then_given_up() -> None:
    fast = simulated({"a": 1.0, "b": 0.0}, np.random.default_rng(1))
    count = [0]

    def measure(step: Step) -> Trial:
        count[0] += 1
        rejected = step.comparison == 1 or count[0] == 2
        return trial(step, "rejected", 0.0).model_copy(update={"reason": "foreign work"}) if rejected else fast(step)

    known, trials = run(design("a", "b"), measure)
    assert verdicts(known) == {"a": "better", "b": "not measurable"} and known.findings[1].reason == "foreign work"
    assert sum(one.comparison == 1 for one in trials) == MOST_REJECTED
    # The trial that was rejected has been run once more.
    assert [(one.pair, one.arm) for one in trials[1:3]] == [(0, "candidate")] * 2


def test_it_ends_when_trials_or_time_are_used_up_and_says_what_was_not_tried() -> None:
    same = simulated({}, np.random.default_rng(5), deviation=0.05)
    known, trials = run(design("a", "b", trials=3), same)
    assert len(trials) == 3 and verdicts(known) == {"a": "undecided", "b": "not tried"}
    known, trials = run(design("a", "b", seconds=45), same)
    assert len(trials) == 4 and known.next is None


def test_an_op_that_is_slower_alone_is_not_tried_in_the_engine() -> None:
    wanted = Design((comparison("x", "slow_op"), comparison("y", "fast_op"), comparison("z", "unknown_op")), Rule(3))
    alone = (Alone(op="slow_op", ratio=0.5), Alone(op="fast_op", ratio=2.0), Alone(op="unknown_op", ratio=None))
    known, trials = run(wanted, simulated({"x": 9.0, "y": 0.5, "z": 0.5}, np.random.default_rng(2)), alone=alone)
    assert verdicts(known) == {"slow_op": "slower alone", "fast_op": "better", "unknown_op": "better"}
    assert "2.00 times upstream's time" in known.findings[0].reason and not any(one.comparison == 0 for one in trials)


@given(st.lists(st.text(max_size=6), min_size=1, max_size=4))
def test_answers_agree_with_themselves(answers: list[str]) -> None:
    assert agreement(answers, answers) == 1.0


@given(st.text(min_size=1, max_size=20), st.text(max_size=20))
def test_agreement_is_the_share_up_to_the_first_difference(one: str, two: str) -> None:
    share = agreement([one], [two])
    assert 0 <= share <= 1 and (share == 1.0) == (one == two)
    assert agreement(["abcd"], ["abXd"]) == 0.5


def test_answers_that_are_not_there_cannot_be_compared() -> None:
    with pytest.raises(ValueError):
        agreement([], [])
    with pytest.raises(ValueError):
        agreement(["a"], [])
