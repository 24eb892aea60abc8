"""Statistics of samples and of repetitions. Pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from pydantic import BaseModel, ConfigDict

PERCENTILES = (50.0, 90.0, 95.0, 99.0)


class Distribution(BaseModel):
    """Of all values, none binned. Percentiles interpolate linearly (Hyndman and Fan 1996, definition 7)."""

    model_config = ConfigDict(frozen=True)

    count: int
    mean: float
    deviation: float
    minimum: float
    p50: float
    p90: float
    p95: float
    p99: float
    maximum: float


def distribution(values: Sequence[float], weights: Sequence[int] | None = None) -> Distribution | None:
    """Summary of `values`, each `weights` times if given; None when there are none."""
    data = np.asarray(values, dtype=float)
    if weights is not None:
        data = np.repeat(data, np.asarray(weights, dtype=int))
    if data.size == 0:
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(data, PERCENTILES))
    return Distribution(
        count=int(data.size),
        mean=float(data.mean()),
        deviation=float(data.std(ddof=1)) if data.size > 1 else 0.0,
        minimum=float(data.min()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        maximum=float(data.max()),
    )


@dataclass(frozen=True)
class Interval:
    """A mean and its two-sided 95 % confidence interval; `half` is None for a single value."""

    mean: float
    half: float | None
    count: int

    @property
    def low(self) -> float | None:
        return None if self.half is None else self.mean - self.half

    @property
    def high(self) -> float | None:
        return None if self.half is None else self.mean + self.half


def interval(values: Sequence[float]) -> Interval:
    """Student's interval of the mean of independent `values`. Raises ValueError when there are none."""
    if not values:
        raise ValueError("no values")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Interval(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return Interval(mean, student(len(values) - 1) * math.sqrt(variance / len(values)), len(values))


def _exp(power: float) -> float:
    """e to the power, the largest float instead of an overflow."""
    return math.exp(power) if power < math.log(sys.float_info.max) else sys.float_info.max


def ratio(new: Sequence[float], old: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Ratio of the means new/old and its 95 % interval, None where either has one value only.

    Welch's interval of the difference of log values, so that a ratio and its inverse agree. Raises ValueError for
    values that are not positive.
    """
    if not new or not old or min(*new, *old) <= 0:
        raise ValueError("a ratio needs positive values on both sides")
    logs = [[math.log(value) for value in side] for side in (new, old)]
    means = [math.fsum(side) / len(side) for side in logs]
    centre = means[0] - means[1]
    if min(len(new), len(old)) < 2:
        return _exp(centre), None, None
    parts = [
        math.fsum((value - mean) ** 2 for value in side) / (len(side) - 1) / len(side)
        for side, mean in zip(logs, means, strict=True)
    ]
    error = math.fsum(parts)
    if error == 0:
        return _exp(centre), _exp(centre), _exp(centre)
    freedom = error**2 / math.fsum(part**2 / (len(side) - 1) for part, side in zip(parts, logs, strict=True))
    half = student(freedom) * math.sqrt(error)
    return _exp(centre), _exp(centre - half), _exp(centre + half)


@lru_cache
def student(freedom: float) -> float:
    """97.5 % quantile of Student's t, by bisection on its distribution function (Simpson's rule on the density)."""
    if freedom <= 0:
        raise ValueError("needs at least two values")
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def upper_half(t: float) -> float:
        # With t = sqrt(freedom)·tan(u) the density becomes cos(u)^(freedom - 1), smooth and on a finite range.
        end = math.atan(t / math.sqrt(freedom))
        points = np.linspace(0.0, end, 2001)
        values = np.cos(points) ** (freedom - 1)
        weights = np.ones(2001)
        weights[1:-1:2], weights[2:-1:2] = 4, 2
        return float(weights @ values) * end / 2000 / 3 * scale * math.sqrt(freedom)

    low, high = 1.9, 13.0 if freedom >= 1 else 1e6
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if upper_half(middle) < 0.475 else (low, middle)
    return (low + high) / 2
