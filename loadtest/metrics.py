"""Metrics of a window, from samples. Pure; docs/metrics.md defines each of them.

An event counts in a window when it happens in it: a token when it arrives, a first token when it arrives, a request
when it ends. All times are seconds, `begin` and `end` are wall clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from loadtest.samples import Sample
from loadtest.stats import Distribution, distribution

TokenTimes = Literal["counted", "spread"]


class Metrics(BaseModel):
    """Latencies in seconds, rates per second."""

    model_config = ConfigDict(frozen=True)

    duration: float
    requests: int
    request_rate: float
    output_tokens: int
    output_throughput: float
    prompt_tokens: int
    total_throughput: float
    cached_tokens: int | None
    ttft: Distribution | None
    ttfc: Distribution | None
    tpot: Distribution | None
    itl: Distribution | None
    gap: Distribution | None
    e2e: Distribution | None
    delay: Distribution | None
    input_length: Distribution | None
    output_length: Distribution | None
    in_flight: float
    errors: dict[str, int]
    token_times: TokenTimes
    goodput: float | None = None
    goodput_share: float | None = None


class Slo(BaseModel):
    """Service level objective: upper limits in seconds; what is None is not limited."""

    model_config = ConfigDict(frozen=True)

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met(self, sample: Sample) -> bool:
        tpot = time_per_output_token(sample)
        pairs = ((self.ttft, sample.first_token), (self.tpot, tpot), (self.e2e, sample.end))
        return all(limit is None or value is None or value <= limit for limit, value in pairs)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When tokens of one request came: `tokens[k]` at `times[k]` (relative to the request's start)."""

    times: list[float]
    tokens: list[int]
    counted: bool


def arrivals(sample: Sample) -> Arrivals:
    """Places the `usage` tokens of a request on its arrivals.

    Where the server counted in each chunk, as it counted. Otherwise the total is spread evenly, which is exact when
    each arrival brought one token; the first arrival always has at least one.
    """
    total = sample.completion_tokens or 0
    count = len(sample.times)
    if not count or not total:
        return Arrivals([], [], True)
    known = sample.counts if len(sample.counts) == count and all(c is not None for c in sample.counts) else None
    if known is not None:
        cumulative = [int(c or 0) for c in known]
        cumulative[-1] = total
    else:
        cumulative = [-(-(k + 1) * total // count) for k in range(count)]
    tokens = [now - before for before, now in zip([0, *cumulative], cumulative, strict=False)]
    return Arrivals(sample.times, tokens, known is not None or count == total)


def time_per_output_token(sample: Sample) -> float | None:
    """(last token - first token) / (tokens - 1); None for fewer than two tokens."""
    total = sample.completion_tokens or 0
    if total < 2 or len(sample.times) < 2:
        return None
    return (sample.times[-1] - sample.times[0]) / (total - 1)


def measure(samples: Sequence[Sample], begin: float, end: float, slo: Slo | None = None) -> Metrics:
    """Metrics of the window [begin, end). Raises ValueError for an empty window."""
    duration = end - begin
    if duration <= 0:
        raise ValueError("the window is empty")
    good = [sample for sample in samples if sample.ok]
    first = [s for s in good if s.first_token is not None and begin <= s.start + s.first_token < end]
    done = [s for s in good if begin <= s.finished < end]
    output, spread = 0, False
    itl: list[float] = []
    itl_weights: list[int] = []
    for sample in good:
        if sample.finished < begin or sample.start >= end:
            continue
        placed = arrivals(sample)
        spread = spread or not placed.counted
        previous: float | None = None
        for when, count in zip(placed.times, placed.tokens, strict=True):
            if begin <= sample.start + when < end:
                output += count
                if previous is not None and count:
                    itl.append((when - previous) / count)
                    itl_weights.append(count)
            if count:
                previous = when
    prompt = sum(s.prompt_tokens or 0 for s in first)
    cached = [s.cached_tokens for s in first if s.cached_tokens is not None]
    met = sum(slo.met(s) for s in done) if slo is not None else None
    tpot = [value for s in done if (value := time_per_output_token(s)) is not None]
    ended = sum(1 for s in samples if begin <= s.finished < end and s.error != "cancelled")
    return Metrics(
        duration=duration,
        requests=len(done),
        request_rate=len(done) / duration,
        output_tokens=output,
        output_throughput=output / duration,
        prompt_tokens=prompt,
        total_throughput=(output + prompt) / duration,
        cached_tokens=sum(cached) if cached else None,
        ttft=distribution([s.first_token for s in first if s.first_token is not None]),
        ttfc=distribution([s.first_content for s in first if s.first_content is not None]),
        tpot=distribution(tpot),
        itl=distribution(itl, itl_weights),
        gap=distribution([value * weight for value, weight in zip(itl, itl_weights, strict=True)]),
        e2e=distribution([s.end for s in done]),
        delay=distribution([s.start - s.scheduled for s in done if s.scheduled is not None]),
        input_length=distribution([s.prompt_tokens for s in done if s.prompt_tokens is not None]),
        output_length=distribution([s.completion_tokens for s in done if s.completion_tokens is not None]),
        in_flight=in_flight(samples, begin, end),
        errors=dict(
            Counter(error_kind(s) for s in samples if s.error and s.error != "cancelled" and begin <= s.finished < end)
        ),
        token_times="spread" if spread else "counted",
        goodput=None if met is None else met / duration,
        goodput_share=None if met is None or not ended else met / ended,
    )


def error_kind(sample: Sample) -> str:
    """`http 429` and the like for a status, else the kind."""
    return f"http {sample.status}" if sample.error == "http" else str(sample.error)


def in_flight(samples: Sequence[Sample], begin: float, end: float) -> float:
    """Mean number of requests in flight, weighted by time."""
    shares = (min(s.finished, end) - max(s.start, begin) for s in samples)
    return sum(share for share in shares if share > 0) / (end - begin)


def timeline(samples: Sequence[Sample], begin: float, end: float, width: float = 1.0) -> dict[str, list[float]]:
    """Rates in bins of `width` seconds: `at` (bin start, relative to begin), `output`, `prompt` (tokens/s at the first
    token of their request), `in_flight`."""
    bins = max(1, int(np.ceil((end - begin) / width)))
    output, prompt, flight = np.zeros(bins), np.zeros(bins), np.zeros(bins)
    edges = begin + width * np.arange(bins + 1)
    for sample in samples:
        overlap = np.minimum(sample.finished, edges[1:]) - np.maximum(sample.start, edges[:-1])
        flight += np.clip(overlap, 0, None) / width
        if not sample.ok:
            continue
        placed = arrivals(sample)
        for when, count in zip(placed.times, placed.tokens, strict=True):
            slot = int((sample.start + when - begin) // width)
            if 0 <= slot < bins:
                output[slot] += count / width
        if sample.first_token is not None:
            slot = int((sample.start + sample.first_token - begin) // width)
            if 0 <= slot < bins:
                prompt[slot] += (sample.prompt_tokens or 0) / width
    return {
        "at": [width * k for k in range(bins)],
        "output": [float(value) for value in output],
        "prompt": [float(value) for value in prompt],
        "in_flight": [float(value) for value in flight],
    }
