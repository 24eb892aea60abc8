"""Two results against each other: ratios with confidence intervals, verdicts, and what else differed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from loadtest.metrics import Metrics
from loadtest.plain import mapping
from loadtest.result import LevelResult, Result
from loadtest.stats import ratio

Judgement = Literal["better", "worse", "no difference shown", "too few runs"]

IGNORED = ("created", "command", "host.memory_bytes", "url")


class Ratio(BaseModel):
    """B / A of one figure, and its 95 % confidence interval (None where neither repetitions nor batches allow one)."""

    model_config = ConfigDict(frozen=True)

    level: str
    figure: str
    a: float
    b: float
    ratio: float
    low: float | None
    high: float | None
    over: Literal["repetitions", "batches", "single"]
    judgement: Judgement


class Comparison(BaseModel):
    """`differences` are (name, in A, in B); a different workload makes the ratios meaningless and is said first."""

    model_config = ConfigDict(frozen=True)

    a: str
    b: str
    same_workload: bool
    ratios: list[Ratio]
    missing: list[str]
    differences: list[tuple[str, str, str]]


def compare(a: Result, b: Result) -> Comparison:
    """B relative to A, over the levels that have a valid window in both."""
    groups_a, groups_b = _valid(a), _valid(b)
    ratios: list[Ratio] = []
    for name in groups_a:
        if name in groups_b:
            ratios += _level(name, groups_a[name], groups_b[name])
    every = [*dict.fromkeys(level.name for level in [*a.levels, *b.levels])]
    workloads = [_flatten({k: v for k, v in r.workload.items() if k not in ("rate",)}) for r in (a, b)]
    environments = [_flatten(r.environment.model_dump(mode="json")) for r in (a, b)]
    return Comparison(
        a=a.label or a.id,
        b=b.label or b.id,
        same_workload=workloads[0] == workloads[1],
        ratios=ratios,
        missing=[name for name in every if name not in groups_a or name not in groups_b],
        differences=[*_differences(*workloads), *_differences(*environments)],
    )


def _valid(result: Result) -> dict[str, list[LevelResult]]:
    groups: dict[str, list[LevelResult]] = {}
    for level in result.levels:
        if level.verdict == "valid" and level.metrics is not None:
            groups.setdefault(level.name, []).append(level)
    return groups


def _level(name: str, a: list[LevelResult], b: list[LevelResult]) -> list[Ratio]:
    found: list[Ratio] = []
    sides = [[level.metrics for level in side if level.metrics is not None] for side in (a, b)]
    throughput = [[m.output_throughput for m in side if m.output_throughput > 0] for side in sides]
    over: Literal["repetitions", "batches", "single"] = "repetitions"
    if min(len(values) for values in throughput) < 2:
        batches = [[value for level in side for value in level.batches if value > 0] for side in (a, b)]
        over = "batches" if min(len(values) for values in batches) >= 2 else "single"
        throughput = batches if over == "batches" else throughput
    if throughput[0] and throughput[1]:
        found.append(_ratio(name, "output throughput", throughput[0], throughput[1], over, higher_is_better=True))
    for figure, pick in (("TTFT p50", _ttft), ("TPOT mean", _tpot), ("E2E p50", _e2e)):
        values = [[value for m in side if (value := pick(m)) is not None and value > 0] for side in sides]
        if values[0] and values[1]:
            over = "repetitions" if min(len(v) for v in values) >= 2 else "single"
            found.append(_ratio(name, figure, values[0], values[1], over, higher_is_better=False))
    return found


def _ttft(metrics: Metrics) -> float | None:
    return metrics.ttft.p50 if metrics.ttft else None


def _tpot(metrics: Metrics) -> float | None:
    return metrics.tpot.mean if metrics.tpot else None


def _e2e(metrics: Metrics) -> float | None:
    return metrics.e2e.p50 if metrics.e2e else None


def _ratio(
    level: str,
    figure: str,
    a: list[float],
    b: list[float],
    over: Literal["repetitions", "batches", "single"],
    *,
    higher_is_better: bool,
) -> Ratio:
    centre, low, high = ratio(b, a)
    judgement: Judgement = "too few runs"
    # Tenths of one window say how steady a run was, not what the next one would give.
    if over == "repetitions" and low is not None and high is not None:
        judgement = "no difference shown"
        if low > 1 or high < 1:
            judgement = "better" if (low > 1) == higher_is_better else "worse"
    return Ratio(
        level=level,
        figure=figure,
        a=sum(a) / len(a),
        b=sum(b) / len(b),
        ratio=centre,
        low=low,
        high=high,
        over=over,
        judgement=judgement,
    )


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    inner = mapping(value)
    if not inner:
        return {prefix: str(value)}
    flat: dict[str, str] = {}
    for name, below in inner.items():
        flat |= _flatten(below, f"{prefix}.{name}" if prefix else name)
    return flat


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = sorted({*a, *b})
    return [(n, a.get(n, "-"), b.get(n, "-")) for n in names if a.get(n) != b.get(n) and n not in IGNORED]
