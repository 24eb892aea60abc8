"""Plots as SVG text, made to be read on a phone. Pure: the same data give the same bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
matplotlib.rcParams.update({"svg.hashsalt": "loadtest", "svg.fonttype": "none", "font.size": 11, "axes.grid": True})

from matplotlib.figure import Figure  # noqa: E402

POINTS = 400
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _figure(title: str, x: str, y: str) -> tuple[Any, Any]:
    figure: Any = Figure(figsize=(6, 3.6))
    axes: Any = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    return figure, axes


def lines(title: str, x: str, y: str, series: Series) -> str:
    """One line for each name of `series`: (x values, y values)."""
    figure, axes = _figure(title, x, y)
    for name, (horizontal, vertical) in series.items():
        axes.plot(horizontal, vertical, label=name, linewidth=1.4)
    axes.set_ylim(bottom=0)
    if series:
        axes.legend(fontsize=9)
    return _svg(figure)


def throughput(points: Sequence[tuple[int, float, float | None]], target: tuple[int, float] | None) -> str:
    """Throughput against concurrency: (C, mean, half of the 95 % interval or None) each, and the target if any."""
    figure, axes = _figure("Output throughput", "requests in flight (C)", "tokens/s")
    users = [point[0] for point in points]
    axes.errorbar(users, [p[1] for p in points], yerr=[p[2] or 0.0 for p in points], marker="o", capsize=4)
    if target is not None:
        axes.plot([target[0]], [target[1]], marker="*", markersize=14, linestyle="none", label="target")
        axes.legend(fontsize=9)
    axes.set_xscale("log", base=2)
    ticks = sorted({*users, *([target[0]] if target else [])})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(bottom=0)
    return _svg(figure)


def distributions(title: str, unit: str, samples: Mapping[str, Sequence[float]]) -> str:
    """Cumulative distributions; drawn through at most POINTS quantiles each."""
    figure, axes = _figure(title, unit, "share of requests")
    for name, values in samples.items():
        shares = np.linspace(0, 1, min(POINTS, max(2, len(values))))
        axes.plot(np.quantile(np.asarray(values, dtype=float), shares), shares, label=name, linewidth=1.6)
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    if samples:
        axes.legend(fontsize=9)
    return _svg(figure)
