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


def waterfall(title: str, unit: str, parts: Sequence[tuple[str, float]], marks: Mapping[str, float]) -> str:
    """Horizontal bars, each beginning where the last ended; a vertical line for each of `marks`."""
    figure, axes = _figure(title, unit, "")
    begun = 0.0
    for place, (_, value) in enumerate(parts):
        axes.barh(place, value, left=begun)
        axes.text(begun + value, place, f" {value:.2f}", va="center", fontsize=9)
        begun += value
    for number, (name, value) in enumerate(marks.items()):
        axes.axvline(value, color="black", linestyle=("--", ":", "-.")[number % 3], label=f"{name}: {value:.2f}")
    axes.set_yticks(range(len(parts)), [name for name, _ in parts])
    axes.invert_yaxis()
    axes.set_xlim(left=0, right=1.15 * max([begun, *marks.values()], default=1.0) or 1.0)
    if marks:
        axes.legend(fontsize=9)
    return _svg(figure)


def stacked(title: str, unit: str, groups: Sequence[str], parts: Mapping[str, Sequence[float]]) -> str:
    """One horizontal bar for each of `groups`, made of `parts`: by name, a value for each group."""
    figure, axes = _figure(title, unit, "")
    begun = np.zeros(len(groups))
    for number, (name, values) in enumerate(parts.items()):
        axes.barh(range(len(groups)), values, left=begun, label=name, color=f"C{number}", hatch="//" * (number // 10))
        begun = begun + np.asarray(values, dtype=float)
    axes.set_yticks(range(len(groups)), groups)
    axes.invert_yaxis()
    if parts:
        axes.legend(fontsize=8, ncols=2)
    return _svg(figure)


def curves(title: str, x: str, y: str, series: Series, points: Series | None = None) -> str:
    """Lines over a logarithmic axis; `points` are drawn as stars, for what was measured or is wanted."""
    figure, axes = _figure(title, x, y)
    for name, (horizontal, vertical) in series.items():
        axes.plot(horizontal, vertical, marker=".", label=name, linewidth=1.4)
    for name, (horizontal, vertical) in (points or {}).items():
        axes.plot(horizontal, vertical, marker="*", markersize=12, linestyle="none", label=name)
    axes.set_xscale("log", base=2)
    ticks = sorted({tick for horizontal, _ in series.values() for tick in horizontal})
    axes.set_xticks(ticks, [f"{tick:g}" if tick < 10000 else f"{tick / 1024:g}K" for tick in ticks], fontsize=8)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9)
    return _svg(figure)
