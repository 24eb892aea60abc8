"""Metrics by their definitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.bench import judge_target
from loadtest.metrics import Slo, arrivals, in_flight, measure, time_per_output_token, timeline
from loadtest.result import LevelResult, Window
from loadtest.samples import Sample


def sample(
    start: float, times: list[float], total: int, counts: list[int] | None = None, error: str | None = None
) -> Sample:
    made = Sample(0, "local", start, times[-1] if times else 1.0, 10, total)
    made.times, made.counts = times, list(counts) if counts else [None] * len(times)
    made.first_token = made.first_content = times[0] if times else None
    made.prompt_tokens, made.completion_tokens = 10, total
    made.error = error  # type: ignore[assignment]
    return made


@given(st.integers(1, 40), st.integers(1, 200))
def test_every_token_of_usage_is_placed_exactly_once(chunks: int, total: int) -> None:
    placed = arrivals(sample(0.0, [float(k + 1) for k in range(chunks)], total))
    assert sum(placed.tokens) == total and placed.tokens[0] >= 1 and min(placed.tokens) >= 0
    assert max(placed.tokens) - min(placed.tokens) <= 1
    assert placed.counted == (chunks == total)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_counted_tokens_are_placed_as_counted(sizes: list[int]) -> None:
    counts = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    placed = arrivals(sample(0.0, [float(k) for k in range(len(sizes))], counts[-1], counts))
    assert placed.tokens == sizes and placed.counted


def test_each_metric_on_an_example_by_hand() -> None:
    """Two requests; the window cuts the second one's last two tokens off."""
    a = sample(100.0, [0.5, 0.7, 0.9], 3)
    b = sample(101.0, [0.25, 0.5, 2.0, 3.0], 4)
    found = measure([a, b], 100.0, 102.0, Slo(ttft=0.4))
    assert found.output_tokens == 5 and found.output_throughput == 2.5
    assert found.total_throughput == (5 + 20) / 2
    assert found.requests == 1 and found.request_rate == 0.5
    assert found.ttft and (found.ttft.count, found.ttft.mean) == (2, 0.375)
    assert found.tpot and found.tpot.mean == pytest.approx(0.2)
    assert found.itl and found.itl.count == 3 and found.itl.mean == pytest.approx((0.2 + 0.2 + 0.25) / 3)
    assert found.e2e and found.e2e.mean == 0.9
    assert found.in_flight == pytest.approx((0.9 + 1.0) / 2)
    assert (found.goodput, found.goodput_share) == (0.0, 0.0)


def test_failed_requests_count_as_errors_and_bring_no_tokens() -> None:
    bad = sample(100.0, [0.5], 1, error="http")
    bad.status = 429
    found = measure([bad, sample(100.0, [0.5], 1, error="cancelled")], 100.0, 102.0)
    assert found.errors == {"http 429": 1} and found.output_tokens == 0 and found.requests == 0


def test_one_token_has_no_time_per_output_token() -> None:
    assert time_per_output_token(sample(0.0, [1.0], 1)) is None


def test_goodput_is_what_meets_every_limit() -> None:
    fast, slow = sample(100.0, [0.1, 0.2], 2), sample(100.0, [0.9, 1.0], 2)
    found = measure([fast, slow], 100.0, 102.0, Slo(ttft=0.5, tpot=0.2, e2e=1.5))
    assert (found.goodput, found.goodput_share) == (0.5, 0.5)


@given(st.lists(st.tuples(st.floats(0, 20), st.floats(0.1, 5)), min_size=1, max_size=20))
def test_the_timeline_adds_up_to_the_window(pairs: list[tuple[float, float]]) -> None:
    samples = [sample(start, [length / 2, length], 2) for start, length in pairs]
    end = 26.0
    line = timeline(samples, 0.0, end)
    found = measure(samples, 0.0, end)
    assert sum(line["output"]) == pytest.approx(found.output_tokens)
    assert sum(line["prompt"]) == pytest.approx(found.prompt_tokens)
    assert sum(line["in_flight"]) / end == pytest.approx(in_flight(samples, 0.0, end))


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        measure([], 5.0, 5.0)


def level(throughput: float, step: float) -> LevelResult:
    """C=16 with this throughput and this mean time per output token."""
    rows = [sample(0.0, [0.1, 0.1 + step], 2) for _ in range(int(throughput))]
    return LevelResult(
        name="c16",
        users=16,
        folder="c16-r1",
        verdict="valid",
        findings=[],
        window=Window(started=0.0, begin=0.0, end=2.0),
        metrics=measure(rows, 0.0, 2.0),
    )


def test_a_missed_target_says_what_is_missing() -> None:
    """The campaign's arithmetic: 1000 tok/s at C=16 leaves 16 ms a step."""
    target = judge_target((1000.0, 16), [level(500, 0.032)])
    assert target is not None and not target.reached
    assert target.step_budget == pytest.approx(0.016) and target.step == pytest.approx(0.032)
    assert target.factor == pytest.approx(2.0)


def test_a_target_without_a_valid_window_is_not_reached() -> None:
    target = judge_target((1000.0, 16), [level(500, 0.03).model_copy(update={"metrics": None, "verdict": "rejected"})])
    assert target is not None and not target.reached and target.measured is None
