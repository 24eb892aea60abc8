"""The test behind `deploy tune` on simulated measurements: how often it is wrong, how often it finds what is there."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.tune.decide import Judgement, Rule, judge, student

Noise = Callable[[np.random.Generator, int], np.ndarray]
NOISES: dict[str, Noise] = {
    "normal": lambda rng, size: rng.normal(0, 0.01, size),
    "heavy tails": lambda rng, size: 0.01 * rng.standard_t(3, size),
    "skewed": lambda rng, size: 0.01 * (rng.exponential(1, size) - 1),
    "now and then a hiccup": lambda rng, size: rng.normal(0, 0.01, size) - 0.1 * (rng.random(size) < 0.05),
    "hardly any": lambda rng, size: rng.normal(0, 1e-4, size),
}
ratios = st.lists(st.floats(0.2, 5.0), max_size=12)


def run(effect: float, noise: Noise, rule: Rule, rng: np.random.Generator, drift: float = 0.0) -> Judgement:
    """One comparison as the experiment runs it: two measurements a pair, every second pair the other way round.

    Args:
        effect: of the candidate, on the logarithm.
        drift: of the machine from one measurement to the next, likewise.
    """
    found: list[float] = []
    while True:
        one, two = noise(rng, 2)
        order = 1.0 if len(found) % 2 == 0 else -1.0
        found.append(math.exp(effect + float(one - two) + order * drift))
        judged = judge(found, rule)
        if judged.verdict != "open":
            return judged


def share(verdict: str, effect: float, noise: Noise, rule: Rule, times: int, drift: float = 0.0) -> float:
    rng = np.random.default_rng(20261130)
    return sum(run(effect, noise, rule, rng, drift).verdict == verdict for _ in range(times)) / times


@pytest.mark.parametrize("name", NOISES)
def test_an_experiment_in_which_nothing_differs_rarely_finds_a_winner(name: str) -> None:
    rule = Rule(comparisons=10)
    rng = np.random.default_rng(1)
    times = 600
    wrong = sum(
        any(run(0.0, NOISES[name], rule, rng).verdict == "better" for _ in range(rule.comparisons))
        for _ in range(times)
    )
    # Three standard errors of a share of 5 % above it.
    assert wrong / times <= rule.error + 3 * math.sqrt(rule.error * (1 - rule.error) / times)


def test_a_drift_of_the_machine_is_no_effect_of_the_setting() -> None:
    rule = Rule(comparisons=1)
    for drift in (0.01, -0.01, 0.03):
        assert share("better", 0.0, NOISES["normal"], rule, 500, drift) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 500)


@pytest.mark.parametrize(
    ("gain", "deviation", "comparisons", "least"),
    [
        (0.05, 0.005, 1, 0.99),
        (0.05, 0.005, 35, 0.98),
        (0.05, 0.01, 35, 0.80),
        (0.03, 0.005, 35, 0.88),
        (1.0, 0.05, 4, 0.97),
    ],
)
def test_a_gain_that_is_there_is_found(gain: float, deviation: float, comparisons: int, least: float) -> None:
    rule = Rule(comparisons)
    found = share("better", math.log1p(gain), lambda rng, size: rng.normal(0, deviation, size), rule, 400)
    assert found >= least


def test_a_setting_that_gains_nothing_is_given_up_after_few_pairs() -> None:
    rng = np.random.default_rng(2)
    pairs = [run(0.0, NOISES["normal"], Rule(comparisons=20), rng).pairs for _ in range(300)]
    assert np.mean(pairs) < 4.5


def test_a_setting_that_is_much_slower_costs_one_pair() -> None:
    assert judge([0.5], Rule(5)).verdict == "no gain"
    assert judge([0.9], Rule(5)).verdict == "open"


@given(ratios)
def test_nothing_is_better_that_was_slower_on_average(found: list[float]) -> None:
    judged = judge(found, Rule(3))
    if judged.ratio <= 1:
        assert judged.verdict != "better"
    if judged.low is not None and judged.high is not None:
        assert judged.low <= judged.ratio * (1 + 1e-9) and judged.ratio <= judged.high * (1 + 1e-9)


@given(ratios, st.integers(1, 40), st.integers(1, 40))
def test_more_comparisons_never_make_it_easier_to_win(found: list[float], few: int, more: int) -> None:
    few, more = sorted((few, more))
    if judge(found, Rule(more)).verdict == "better":
        assert judge(found, Rule(few)).verdict == "better"


@given(st.lists(st.floats(0.9, 1.1), min_size=8, max_size=12))
def test_it_ends(found: list[float]) -> None:
    assert judge(found, Rule(3, most=8)).verdict != "open"


def test_two_pairs_are_too_few_to_win_and_none_says_nothing() -> None:
    assert judge([2.0, 2.0001], Rule(1)).verdict == "open"
    assert judge([], Rule(1)) == Judgement("open", 0, 1.0, None, None)


def test_students_quantiles_are_those_of_the_tables() -> None:
    assert student(1, 0.05) == pytest.approx(6.314, abs=1e-3)
    assert student(4, 0.005) == pytest.approx(4.604, abs=1e-3)


@pytest.mark.parametrize("wrong", [[0.0], [-1.0], [math.inf], [math.nan]])
def test_what_is_no_ratio_is_refused(wrong: list[float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        judge(wrong, Rule(1))


def test_a_rule_that_cannot_decide_is_refused() -> None:
    for wrong in ({"comparisons": 0}, {"comparisons": 1, "least": 1}, {"comparisons": 1, "least": 5, "most": 4}):
        with pytest.raises(ValueError):
            Rule(**wrong)
