"""Summaries and comparisons as tables of text, and as one HTML page with plots. Pure."""

from pathlib import Path

import jinja2

from deploy.profile.categories import CATEGORIES
from deploy.profile.summary import TOP, Comparison, Summary

Table = list[list[str]]

_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=jinja2.select_autoescape(["html.j2"]),
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)


def milliseconds(seconds: float) -> str:
    """Three digits after the point: a microsecond shows."""
    return f"{seconds * 1e3:.3f}"


def headline(summary: Summary) -> list[str]:
    """What the trace says, a sentence each."""
    stage = "" if summary.stage == "all" else f"{summary.stage} "
    said = [
        f"{summary.file}: {summary.steps} {stage}steps of {milliseconds(summary.step.seconds)} ms on {summary.device}, "
        f"{summary.step.launches:.0f} launches each",
        f"a layer: {summary.layer_seconds * 1e6:.1f} us, {summary.layer_launches:.1f} launches "
        f"({summary.layers} layers)",
        f"busy {summary.busy:.1%}; idle or in kernels under 5 us {summary.launch_bound:.1%}; "
        f"our kernels {summary.ours:.1%} of the busy time",
    ]
    if summary.few_blocks is not None:
        said.append(f"{summary.few_blocks:.1%} of the busy time in kernels with fewer blocks than multiprocessors")
    if summary.occupancy is not None:
        said.append(f"occupancy of the multiprocessors while busy: {summary.occupancy:.0f} % (the profiler's estimate)")
    return [*said, *summary.notes]


def categories(summary: Summary) -> Table:
    """A row for each category of a step."""
    rows: Table = [["category", "ms a step", "share", "us a layer", "launches a step", "ours"]]
    for name in CATEGORIES:
        if share := summary.step.by_category.get(name):
            ours = f"{share.ours / share.seconds:.0%}" if share.seconds and share.ours else ""
            rows.append(
                [
                    name,
                    milliseconds(share.seconds),
                    f"{share.seconds / summary.step.seconds:.1%}",
                    f"{share.seconds / summary.layers * 1e6:.1f}",
                    f"{share.launches:.1f}",
                    ours,
                ]
            )
    return rows


def kernels(summary: Summary, count: int = TOP, width: int = 0) -> Table:
    """The kernels that take longest; names cut to `width` characters, 0: whole."""
    rows: Table = [["kernel", "category", "ms a step", "launches", "us each", "whose"]]
    for one in summary.kernels[:count]:
        each = one.seconds / one.launches * 1e6
        whose = "ours" if one.ours else "upstream"
        rows.append(
            [cut(one.name, width), one.category, milliseconds(one.seconds), f"{one.launches:.1f}", f"{each:.2f}", whose]
        )
    return rows


def cut(name: str, width: int) -> str:
    """A name of at most `width` characters."""
    return name if not width or len(name) <= width else name[: width - 1] + "…"


def changes(comparison: Comparison) -> Table:
    """A row for each category, and the whole step."""
    rows: Table = [["category", "before, ms", "after, ms", "difference", "times"]]
    for one in [*comparison.categories, comparison.step]:
        times = f"{one.after / one.before:.2f}" if one.before else ""
        before, after = milliseconds(one.before), milliseconds(one.after)
        rows.append([one.name, before, after, f"{one.difference * 1e3:+.3f}", times])
    return rows


def kernel_changes(comparison: Comparison, count: int = TOP, width: int = 0) -> Table:
    """The kernels that changed most."""
    rows: Table = [["kernel", "before, ms", "after, ms", "difference"]]
    for one in comparison.kernels[:count]:
        if one.difference:
            before, after = milliseconds(one.before), milliseconds(one.after)
            rows.append([cut(one.name, width), before, after, f"{one.difference * 1e3:+.3f}"])
    return rows


def html(summaries: list[Summary], comparison: Comparison | None) -> str:
    """One page: no script, nothing loaded from elsewhere.

    Args:
        summaries: one, or the two that are compared.
    """
    from loadtest import plots

    names = [name for name in CATEGORIES if any(name in one.step.by_category for one in summaries)]
    parts = {
        name: [share.seconds * 1e3 if (share := one.step.by_category.get(name)) else 0.0 for one in summaries]
        for name in names
    }
    groups = [cut(one.file, 24) for one in summaries]
    images = [("A step by category", plots.stacked("a step", "ms", groups, parts))]
    for one in summaries:
        top = [(cut(kernel.name, 40), kernel.seconds * 1e3) for kernel in one.kernels[:12]]
        images.append((f"{one.file}: the longest kernels, one after the other", plots.waterfall("", "ms", top, {})))
    tables: list[tuple[str, Table]] = []
    if comparison:
        tables += [("Before and after", changes(comparison)), ("Kernels", kernel_changes(comparison))]
    for one in summaries:
        tables += [(f"{one.file}: categories", categories(one)), (f"{one.file}: kernels", kernels(one))]
    title = f"{comparison.before} → {comparison.after}" if comparison else f"Profile of {summaries[0].file}"
    lines = [line for one in summaries for line in headline(one)]
    return _TEMPLATES.get_template("profile.html.j2").render(title=title, lines=lines, images=images, tables=tables)
