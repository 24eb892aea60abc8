"""Statistics against known values."""

from __future__ import annotations

import math
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.stats import distribution, interval, ratio, student

POSITIVE = st.lists(st.floats(0.1, 1e3), min_size=2, max_size=8)


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (9, 2.26216), (30, 2.04227), (1000, 1.96234)],
)
def test_student_quantiles_equal_the_printed_table(freedom: int, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, rel=1e-4)


def test_percentiles_use_every_sample() -> None:
    found = distribution([float(k) for k in range(1, 102)])
    assert found is not None
    assert (found.minimum, found.p50, found.p90, found.p99, found.maximum) == (1, 51, 91, 100, 101)


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 5)), min_size=1, max_size=20))
def test_weights_are_repetitions(pairs: list[tuple[float, int]]) -> None:
    values, weights = zip(*pairs, strict=True)
    repeated = [value for value, weight in pairs for _ in range(weight)]
    assert distribution(values, weights) == distribution(repeated)


def test_a_single_value_has_no_interval() -> None:
    assert interval([5.0]).half is None
    assert ratio([2.0], [1.0]) == (2.0, None, None)


@given(POSITIVE, POSITIVE)
def test_a_ratio_and_its_inverse_agree(new: list[float], old: list[float]) -> None:
    centre, low, high = ratio(new, old)
    inverse, inverse_low, inverse_high = ratio(old, new)
    assert centre * inverse == pytest.approx(1)
    assert low is not None and high is not None and inverse_low is not None and inverse_high is not None
    assert low <= centre * (1 + 1e-9) and high >= centre * (1 - 1e-9)
    if high < 1e100 and low > 1e-100:
        assert low * inverse_high == pytest.approx(1) and high * inverse_low == pytest.approx(1)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    rng = random.Random(7)
    hits = 0
    for _ in range(2000):
        found = interval([rng.gauss(10, 2) for _ in range(5)])
        assert found.low is not None and found.high is not None
        hits += found.low <= 10 <= found.high
    assert abs(hits / 2000 - 0.95) < 4 * math.sqrt(0.95 * 0.05 / 2000)


def test_a_ratio_that_no_float_holds_is_the_largest() -> None:
    assert ratio([1e308], [1e-308])[0] == sys.float_info.max
