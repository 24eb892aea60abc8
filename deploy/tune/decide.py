"""Is a setting better? Paired measurements, looked at after every pair. Pure; docs/tune.md has the reasons."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

Verdict = Literal["open", "better", "no gain", "undecided"]


@dataclass(frozen=True)
class Rule:
    """When a comparison ends, and with what risk.

    Attributes:
        comparisons: settings that the experiment tries, each of which could be called better by accident.
        error: the most that the chance of one such accident in the whole experiment may be.
        least, most: pairs after which a setting may first be called better, and after which it must be decided.
        gain: relative gain that is worth a change.
        futility: chance, at each look, of giving up a setting that gains exactly that much.
        gross: a first pair that is so much slower ends a comparison; no setting can be called better by it.
    """

    comparisons: int
    error: float = 0.05
    least: int = 3
    most: int = 8
    gain: float = 0.02
    futility: float = 0.10
    gross: float = 0.15

    def __post_init__(self) -> None:
        if self.comparisons < 1 or not 2 <= self.least <= self.most:
            raise ValueError("a rule needs a comparison and 2 <= least <= most pairs")

    @property
    def look_error(self) -> float:
        """The error that one look may spend: an equal share for each look at each comparison (Bonferroni)."""
        return self.error / (self.comparisons * (self.most - self.least + 1))


@dataclass(frozen=True)
class Judgement:
    """What the pairs say.

    Attributes:
        ratio: candidate over incumbent, the geometric mean over pairs; 1.0 without a pair.
        low, high: one-sided bounds of the ratio at the look's error and at the futility's; None with fewer than two
            pairs.
    """

    verdict: Verdict
    pairs: int
    ratio: float
    low: float | None
    high: float | None


def judge(ratios: Sequence[float], rule: Rule) -> Judgement:
    """Judge a candidate by the pairs measured so far.

    Log ratios are taken as independent and normal, with an unknown deviation: `low` is Student's one-sided bound of
    their mean. "better" needs low > 1, so by the union bound over looks and comparisons the chance that a setting
    which gains nothing is called better anywhere is at most `rule.error`. Giving up early adds nothing to it.

    Args:
        ratios: candidate over incumbent of each pair, greater is better, in the order in which they were measured.

    Raises:
        ValueError: a ratio is not positive.
    """
    if any(not value > 0 or math.isinf(value) for value in ratios):
        raise ValueError("a ratio of two measurements is positive")
    logs = [math.log(value) for value in ratios]
    pairs = len(logs)
    mean = math.fsum(logs) / pairs if pairs else 0.0
    if pairs < 2:
        slow = pairs == 1 and mean < math.log1p(-rule.gross)
        return Judgement("no gain" if slow else "open", pairs, math.exp(mean), None, None)
    error = math.sqrt(math.fsum((value - mean) ** 2 for value in logs) / (pairs - 1) / pairs)
    low = mean - student(pairs - 1, rule.look_error) * error
    high = mean + student(pairs - 1, rule.futility) * error
    verdict: Verdict = "open"
    if pairs >= rule.least and low > 0:
        verdict = "better"
    elif high < math.log1p(rule.gain):
        verdict = "no gain"
    elif pairs >= rule.most:
        verdict = "undecided"
    return Judgement(verdict, pairs, math.exp(mean), math.exp(low), math.exp(high))


@lru_cache(maxsize=1024)
def student(freedom: int, tail: float) -> float:
    """The value that Student's t exceeds with probability `tail`."""
    # Here and not above: it takes a second to load.
    from scipy import stats  # pyright: ignore[reportMissingTypeStubs]

    quantile: Any = stats.t
    return float(quantile.isf(tail, freedom))
