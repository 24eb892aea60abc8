"""When a run is steady."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.steady import drifts, truncation


@given(st.integers(0, 1000), st.floats(10, 5000))
def test_a_noisy_but_steady_rate_is_found_soon(seed: int, rate: float) -> None:
    rng = random.Random(seed)
    found = [truncation([rng.gauss(rate, rate * 0.03) for _ in range(count)]) for count in range(10, 40)]
    assert any(value is not None for value in found)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 200), st.integers(8, 30))
def test_a_slow_first_phase_is_cut_off(seed: int, slow: int) -> None:
    """As the first minutes with JIT compilation: a quarter of the rate, then the full one."""
    rng = random.Random(seed)
    series = [rng.gauss(250, 5) for _ in range(slow)] + [rng.gauss(1000, 20) for _ in range(10 * slow)]
    assert truncation(series[: slow + slow // 3]) is None
    after = [truncation(series[:count]) for count in range(slow + slow // 3, len(series))]
    cuts = [cut for cut in after if cut is not None]
    assert cuts and min(cuts) >= slow - 1


def test_a_ramp_is_not_steady() -> None:
    assert truncation([100.0 * k for k in range(1, 40)]) is None


def test_silence_is_not_steady() -> None:
    assert truncation([0.0] * 30) is None


def test_a_step_within_a_window_is_a_drift() -> None:
    assert drifts([100.0, 101, 99, 100, 120, 121, 119, 120])
    assert not drifts([100.0, 110, 90, 100, 104, 95, 108, 99])
