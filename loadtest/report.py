"""A run's folder as Markdown and as one self-contained HTML page. Numbers of rejected windows are in neither."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from deploy.stack.state import write_all
from loadtest.errors import BenchError
from loadtest.metrics import time_per_output_token, timeline
from loadtest.plain import mapping
from loadtest.result import LevelResult, Result
from loadtest.samples import Sample, read_file
from loadtest.stats import Distribution, interval

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=jinja2.select_autoescape(["html.j2"]),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


def levels_by_load(result: Result) -> dict[str, list[LevelResult]]:
    """Repetitions of each level together, in order."""
    grouped: dict[str, list[LevelResult]] = {}
    for level in result.levels:
        grouped.setdefault(level.name, []).append(level)
    return grouped


def with_interval(values: Sequence[float], digits: int = 1) -> str:
    """`mean ± half` over repetitions; the mean alone where there is one."""
    if not values:
        return "-"
    found = interval(values)
    half = "" if found.half is None else f" ± {found.half:.{digits}f}"
    return f"{found.mean:.{digits}f}{half}"


def rows(result: Result) -> list[dict[str, str]]:
    """One row a level: means over the valid repetitions, with 95 % intervals where there are several."""
    table: list[dict[str, str]] = []
    measured = [level.metrics for level in result.levels if level.metrics is not None]
    for name, repetitions in levels_by_load(result).items():
        valid = [level.metrics for level in repetitions if level.metrics is not None]

        def each(found: Sequence[Distribution | None], field: str) -> str:
            return with_interval([getattr(d, field) * 1000 for d in found if d is not None])

        table.append(
            {
                "level": name,
                "valid": f"{len(valid)} of {len(repetitions)}",
                "output tok/s": with_interval([m.output_throughput for m in valid]),
                "total tok/s": with_interval([m.total_throughput for m in valid]),
                "req/s": with_interval([m.request_rate for m in valid], 2),
                "TTFT p50 ms": each([m.ttft for m in valid], "p50"),
                "TTFT p99 ms": each([m.ttft for m in valid], "p99"),
                "TPOT p50 ms": each([m.tpot for m in valid], "p50"),
                "TPOT p99 ms": each([m.tpot for m in valid], "p99"),
                "ITL p99 ms": each([m.itl for m in valid], "p99"),
                "E2E p50 ms": each([m.e2e for m in valid], "p50"),
                "in flight": with_interval([m.in_flight for m in valid]),
                "errors": str(sum(sum(m.errors.values()) for m in valid)) if valid else "-",
            }
        )
        if any(m.goodput is not None for m in measured):
            table[-1]["goodput req/s"] = with_interval([m.goodput for m in valid if m.goodput is not None], 2)
        if any(m.cached_tokens is not None for m in measured):
            shares = [
                100 * m.cached_tokens / m.prompt_tokens
                for m in valid
                if m.cached_tokens is not None and m.prompt_tokens
            ]
            table[-1]["prompt from cache %"] = with_interval(shares)
    return table


def engine_rows(result: Result) -> list[dict[str, str]]:
    """What each engine said of itself during each level."""
    table: list[dict[str, str]] = []
    for level in result.levels:
        if level.verdict != "valid":
            continue
        for engine, found in level.engines.items():
            row = {"level": level.folder, "engine": engine}
            row |= {name: f"{value:.2f}" for name, value in found.mean.items() if value}
            table.append(row)
        for role, book in level.accounts.items():
            row = {"level": level.folder, "role": role}
            row |= {name.replace("_", " "): f"{value:.0f}" for name, value in book.counted.items() if value}
            if book.counted.get("verify_calls"):
                row["acceptance length"] = f"{book.counted['generation_tokens'] / book.counted['verify_calls']:.2f}"
            table.append(row)
    return table


def environment_rows(result: Result) -> dict[str, str]:
    """What was measured, short enough for a table."""
    environment = result.environment
    host = environment.host
    facts = {
        "server": environment.url,
        "model": environment.model,
        "workload": describe_workload(result.workload),
        "image": environment.image or "-",
        **{f"lock {name}": str(value) for name, value in environment.lock.items()},
        "generator host": f"{host.get('cores')} cores, {int(host.get('memory_bytes') or 0) // 2**30} GiB, "
        f"Linux {host.get('kernel')}",
        "generator": ", ".join(f"{name} {value}" for name, value in environment.generator.items()),
        "command": " ".join(result.command),
        "schema": result.schema_,
    }
    return {name: value for name, value in facts.items() if value}


def describe_workload(described: Mapping[str, Any]) -> str:
    """The workload in one line: lengths, what is shared, seed, temperature."""
    kind = mapping(described.get("workload"))
    parts = [str(kind.get("kind", "unknown"))]
    for name in ("input", "output"):
        length = mapping(kind.get(name))
        if length:
            low, high = length.get("low"), length.get("high")
            parts.append(f"{name} {low}" if low == high else f"{name} {low} to {high}")
    for name in ("shared_prefix", "turns", "path", "speed"):
        if kind.get(name) not in (None, 0, 1, 1.0):
            parts.append(f"{name.replace('_', ' ')} {kind[name]}")
    parts += [f"endpoint {described.get('endpoint')}", f"seed {described.get('seed')}"]
    parts += [f"temperature {described.get('temperature')}"]
    return ", ".join(parts)


def verdict_lines(result: Result) -> list[tuple[str, str, str]]:
    """(level, severity, text) of each finding."""
    return [(level.folder, finding.severity, finding.text) for level in result.levels for finding in level.findings]


def target_text(result: Result) -> str:
    """The target in one sentence, empty without one."""
    target = result.target
    if target is None:
        return ""
    head = f"Target {target.throughput:g} tok/s at C={target.users}: "
    if target.measured is None:
        return head + "no valid measurement."
    step = f", measured step {target.step * 1000:.2f} ms" if target.step is not None else ""
    missing = "" if target.reached or target.factor is None else f"; a factor of {target.factor:.2f} is missing"
    word = "reached" if target.reached else "missed"
    budget = f"step budget {target.step_budget * 1000:.2f} ms"
    return f"{head}{word} with {target.measured:.1f} tok/s ({budget}{step}){missing}."


def figures(result: Result, folder: Path) -> list[tuple[str, str]]:
    """(caption, SVG) of each plot that the valid levels allow."""
    made: list[tuple[str, str]] = []
    valid = [level for level in result.levels if level.verdict == "valid"]
    if not valid:
        return made
    from loadtest import plots  # matplotlib takes a second to load, which no other verb should wait for

    points: list[tuple[int, float, float | None]] = []
    for repetitions in levels_by_load(result).values():
        values = [level.metrics.output_throughput for level in repetitions if level.metrics is not None]
        users = repetitions[0].users
        if values and users is not None:
            found = interval(values)
            points.append((users, found.mean, found.half))
    if points:
        goal = (result.target.users, result.target.throughput) if result.target else None
        made.append(("Throughput against concurrency", plots.throughput(sorted(points), goal)))
    ttft: dict[str, list[float]] = {}
    tpot: dict[str, list[float]] = {}
    timelines: list[tuple[str, str]] = []
    for level in valid:
        try:
            samples, _ = read_file(folder / level.folder / "samples.jsonl")
        except (OSError, ValueError):
            continue
        begin, end = level.window.begin, level.window.end
        done = [s for s in samples if s.ok and begin <= s.finished < end]
        ttft.setdefault(level.name, []).extend(s.first_token * 1000 for s in done if s.first_token is not None)
        values = [value * 1000 for s in done if (value := time_per_output_token(s)) is not None]
        tpot.setdefault(level.name, []).extend(values)
        timelines += level_timelines(level, samples, folder)
    for title, found in (("Time to first token", ttft), ("Time per output token", tpot)):
        filled = {name: values for name, values in found.items() if values}
        if filled:
            made.append((f"{title}, all requests", plots.distributions(title, "ms", filled)))
    return made + timelines


def level_timelines(level: LevelResult, samples: Sequence[Sample], folder: Path) -> list[tuple[str, str]]:
    """Prefill and decode load as the client saw them, the engines' own gauges, and GPU power."""
    from loadtest import plots

    begin = level.window.started
    end = max(level.window.end, max((s.finished for s in samples), default=begin))
    seen = timeline(samples, begin, end, max(1.0, (end - begin) / 300))
    window = f"window from {level.window.begin - begin:.0f} to {level.window.end - begin:.0f} s"
    load = {
        "decode (output tok/s)": (seen["at"], seen["output"]),
        "prefill (prompt tok/s)": (seen["at"], seen["prompt"]),
    }
    made = [(f"{level.folder}: load over time, {window}", plots.lines(level.folder, "s", "tokens/s", load))]
    engines: dict[str, tuple[list[float], list[float]]] = {}
    power: dict[str, tuple[list[float], list[float]]] = {}
    for record in _server_records(folder / level.folder / "server.jsonl"):
        at = float(record.get("at", 0)) - begin
        if record.get("kind") == "gpu":
            _append(power, str(record.get("gpu"))[:12], at, record.get("power"))
        else:
            values = mapping(record.get("values"))
            for name in ("running", "queued"):
                _append(engines, f"{record.get('engine')} {name}", at, values.get(name))
    if engines:
        made.append((f"{level.folder}: the engines' batches", plots.lines(level.folder, "s", "requests", engines)))
    if power:
        made.append((f"{level.folder}: GPU power", plots.lines(level.folder, "s", "W", power)))
    return made


def _append(series: dict[str, tuple[list[float], list[float]]], name: str, at: float, value: object) -> None:
    if isinstance(value, int | float):
        horizontal, vertical = series.setdefault(name, ([], []))
        horizontal.append(at)
        vertical.append(float(value))


def _server_records(path: Path) -> list[dict[str, Any]]:
    try:
        return [mapping(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return []


def _context(result: Result) -> dict[str, Any]:
    return {
        "result": result,
        "verdict": result.verdict,
        "created": datetime.fromisoformat(result.created).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "rows": rows(result),
        "engines": engine_rows(result),
        "environment": environment_rows(result),
        "findings": verdict_lines(result),
        "target": target_text(result),
    }


def markdown(result: Result) -> str:
    """The report as Markdown."""
    return _TEMPLATES.get_template("report.md.j2").render(_context(result))


def html(result: Result, images: Sequence[tuple[str, str]]) -> str:
    """The report as one page: no script, nothing loaded from elsewhere."""
    return _TEMPLATES.get_template("report.html.j2").render(_context(result), images=images)


def write(result: Result, folder: Path) -> tuple[Path, Path]:
    """Writes `report.md` and `report.html`; returns their paths. Raises BenchError."""
    paths = folder / "report.md", folder / "report.html"
    try:
        texts = markdown(result), html(result, figures(result, folder))
        write_all({path: (text, 0o644) for path, text in zip(paths, texts, strict=True)})
    except OSError as error:
        raise BenchError(f"cannot write the report in {folder}", error.strerror or str(error), "") from None
    return paths
