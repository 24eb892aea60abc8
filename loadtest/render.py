"""Terminal output: the live table while it runs, the summary at the end. Builds Rich renderables; prints nothing."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.command_line import printable
from loadtest.bench import State
from loadtest.compare import Comparison
from loadtest.report import with_interval
from loadtest.result import LevelResult, Result
from loadtest.run import latest
from loadtest.stats import Distribution, distribution

STYLES = {"valid": "green", "rejected": "bold red", "partial": "yellow"}
RECENT = 5.0


def _said(text: str, style: str = "") -> Text:
    """What a result says, as it is: neither markup nor a command to the terminal."""
    return Text(printable(text), style)


def milliseconds(found: Distribution | None, *names: str) -> str:
    """`p50 / p99` and the like, in ms."""
    if found is None:
        return "-"
    values = found.model_dump()
    return " / ".join(f"{values[name] * 1000:.1f}" for name in names)


def live(state: State) -> RenderableType:
    """What happens now: rates of the last five seconds, and the time that is left."""
    seen = state.progress.observed
    now = time.time()
    recent = [sample for sample in seen.samples if sample.ok and sample.finished > now - RECENT]
    last = latest(seen.ticks)
    before = [tick for tick in seen.ticks if tick.at < now - RECENT]
    arrived = sum(tick.arrivals for tick in last) - sum(tick.arrivals for tick in latest(before))
    span = max((tick.at for tick in last), default=now) - max((tick.at for tick in before), default=seen.started)
    # Chunks are not tokens; what finished requests brought a chunk turns one into the other until `usage` comes.
    chunks = sum(len(sample.times) for sample in recent)
    each = sum(sample.completion_tokens or 0 for sample in recent) / chunks if chunks else 1.0
    tpot = distribution([(s.times[-1] - s.times[0]) / (len(s.times) - 1) / each for s in recent if len(s.times) > 1])
    ttft = distribution([s.first_token for s in recent if s.first_token is not None])
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "level",
        "phase",
        "tok/s",
        "TTFT ms\np50 / p99",
        "TPOT ms\np50 / p99",
        "in\nflight",
        "done",
        "errors",
        "left",
    ):
        table.add_column(name, justify="right" if name not in ("level", "phase") else "left")
    for level in state.done:
        metrics = level.metrics
        verdict = Text(level.verdict, style=STYLES[level.verdict])
        if metrics is None:
            table.add_row(_said(level.folder), verdict)
        else:
            table.add_row(
                _said(level.folder),
                verdict,
                f"{metrics.output_throughput:.1f}",
                milliseconds(metrics.ttft, "p50", "p99"),
                milliseconds(metrics.tpot, "p50", "p99"),
                f"{metrics.in_flight:.1f}",
                str(metrics.requests),
                str(sum(metrics.errors.values())),
            )
    left = state.progress.left
    table.add_row(
        _said(f"{state.level} ({state.number}/{state.levels})"),
        state.progress.phase,
        f"{max(0.0, arrived * each / span):.1f}" if span > 0 else "-",
        milliseconds(ttft, "p50", "p99"),
        milliseconds(tpot, "p50", "p99"),
        str(sum(tick.in_flight for tick in last)),
        str(sum(tick.finished for tick in last)),
        str(sum(tick.failed for tick in last)),
        f"{left:.0f} s" if left is not None and left >= 0 else f"({state.progress.elapsed:.0f} s)",
    )
    return table


def summary(result: Result, folder: str) -> RenderableType:
    """The results, the reasons where there are none, and the target."""
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    for name in (
        "",
        "tok/s",
        "in+out/s",
        "TTFT ms\np50 / p99",
        "TPOT ms\np50 / p99",
        "E2E s\np50",
        "in\nflight",
        "errors",
    ):
        table.add_column(name, justify="left" if not name else "right")
    notes: list[RenderableType] = []
    for level in result.levels:
        table.add_row(*_row(level))
        for finding in level.findings:
            style = "bold red" if finding.severity == "reject" else "yellow"
            notes.append(_said(f"{level.folder} {finding.severity}: ", style) + _said(finding.text))
    parts: list[RenderableType] = [table, *notes]
    if any(metrics.token_times == "spread" for level in result.levels if (metrics := level.metrics) is not None):
        parts.append(
            Text("tokens are counted by usage and spread over the chunks they came in (docs/metrics.md)", style="dim")
        )
    if result.target is not None:
        parts.append(target_line(result))
    style = STYLES[result.verdict]
    parts.append(Text(f"{result.verdict}  ", f"bold {style}") + _said(folder))
    return Group(*parts)


def _row(level: LevelResult) -> list[str | Text]:
    metrics = level.metrics
    if metrics is None:
        return [_said(level.folder), Text(level.verdict, style=STYLES[level.verdict])]
    return [
        _said(level.folder),
        f"{metrics.output_throughput:.1f}",
        f"{metrics.total_throughput:.1f}",
        milliseconds(metrics.ttft, "p50", "p99"),
        milliseconds(metrics.tpot, "p50", "p99"),
        f"{metrics.e2e.p50:.2f}" if metrics.e2e else "-",
        f"{metrics.in_flight:.1f}",
        str(sum(metrics.errors.values())),
    ]


def target_line(result: Result) -> Text:
    """Pass or fail, and the gap."""
    target = result.target
    if target is None:
        return Text()
    head = f"target {target.throughput:g} tok/s at C={target.users}: "
    if target.measured is None:
        return Text.assemble(head, ("no valid measurement", "bold red"))
    word = ("reached", "bold green") if target.reached else ("missed", "bold red")
    step = f", measured step {target.step * 1000:.2f} ms" if target.step is not None else ""
    missing = "" if target.reached or target.factor is None else f", factor {target.factor:.2f} missing"
    return Text.assemble(
        head, word, f" with {target.measured:.1f} tok/s; step budget {target.step_budget * 1000:.2f} ms{step}{missing}"
    )


def comparison(found: Comparison) -> RenderableType:
    """Ratios, verdicts and differences."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "figure", found.a, found.b, "ratio", "95 % interval", "over", "verdict"):
        table.add_column(_said(name), justify="left" if name in ("", "figure", "over", "verdict") else "right")
    styles = {"better": "green", "worse": "bold red"}
    for row in found.ratios:
        between = "-" if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}"
        verdict = Text(row.judgement, style=styles.get(row.judgement, ""))
        unit = "tok/s" if "throughput" in row.figure else "s"
        table.add_row(
            _said(row.level),
            f"{row.figure}, {unit}",
            f"{row.a:.4g}",
            f"{row.b:.4g}",
            f"{row.ratio:.3f}",
            between,
            row.over,
            verdict,
        )
    parts: list[RenderableType] = []
    if not found.same_workload:
        parts.append(Text("The workloads differ: the ratios compare different things.", style="bold red"))
    parts.append(table if found.ratios else Text("No level has a valid window in both runs.", style="bold red"))
    if any(row.judgement == "too few runs" for row in found.ratios):
        parts.append(Text("One run says nothing of the next one: deploy bench --repeat 5, of both, can be judged."))
    parts += [_said(f"not valid in both: {name}", "yellow") for name in found.missing]
    if found.differences:
        parts.append(Text("\nWhat differed:", style="bold"))
        parts += [_said(f"  {name}: {_short(a)} -> {_short(b)}") for name, a, b in found.differences]
    return Group(*parts)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def history(results: list[Result]) -> RenderableType:
    """One line a run: throughput by level."""
    levels = list(dict.fromkeys(level.name for result in results for level in result.levels))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("created", "run", "verdict"):
        table.add_column(name, no_wrap=True)
    for name in levels:
        table.add_column(_said(name).append("\ntok/s"), justify="right")
    for result in results:
        cells: list[str] = []
        for name in levels:
            valid = [m.output_throughput for level in result.levels if level.name == name and (m := level.metrics)]
            cells.append(with_interval(valid))
        created = result.created[:16].replace("T", " ")
        verdict = Text(result.verdict, style=STYLES[result.verdict])
        table.add_row(_said(created), _said(result.label or result.id), verdict, *cells)
    return table
