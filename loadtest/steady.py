"""When has a run become steady? Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_BINS = 10


def truncation(rates: Sequence[float]) -> int | None:
    """How many leading bins to discard so that the rest estimates the steady mean best; None: not steady yet.

    The marginal standard error rule (White, "An effective truncation heuristic for bias reduction in simulation
    output", Simulation 69, 1997): minimise var(rest) / len(rest). A minimum beyond the middle means that the series is
    still changing. The rest must also have no trend: its halves differ by less than 10 % or less than their noise.
    """
    series = np.asarray(rates, dtype=float)
    if series.size < MIN_BINS:
        return None
    half = series.size // 2
    centred = series - series.mean()
    left = np.arange(series.size, 0, -1)
    sums = np.cumsum(centred[::-1])[::-1] / left
    squares = np.cumsum((centred**2)[::-1])[::-1] / left
    best = int(np.argmin(((squares - sums**2) / left)[: half + 1]))
    if best >= half or series.size - best < MIN_BINS // 2:
        return None
    rest = series[best:]
    return best if rest.mean() > 0 and not drifts(rest) else None


def drifts(rates: Sequence[float] | np.ndarray, limit: float = 0.10, errors: float = 2.0) -> bool:
    """Do the halves of a series differ by more than `limit` of its mean and by `errors` standard errors?

    The noise is that of the calmer half: a step inside one half would otherwise pass for noise.
    """
    series = np.asarray(rates, dtype=float)
    if series.size < 4:
        return False
    middle = series.size // 2
    first, second = series[:middle], series[middle:]
    change = abs(float(second.mean() - first.mean()))
    noise = float(np.sqrt(min(first.var(ddof=1), second.var(ddof=1)) * (1 / first.size + 1 / second.size)))
    return change > limit * max(float(series.mean()), 1e-9) and change > errors * noise
