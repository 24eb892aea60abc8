"""The verb that shows where the time goes: `profile`. `cli.py` mounts it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from sm120_kernels.shapes import LAYERS

from deploy import completion, render
from deploy.command_line import ROOT, STATE, JsonOption, Panel, StateOption, console, examples, print_json
from deploy.profile import report
from deploy.profile.summary import Stage, Summary, compare, summarise
from deploy.profile.trace import UnreadableTrace, read
from deploy.spec.profiles import ALL_ENGINES

STEPS, SECONDS = 10, 60.0
NAME_WIDTH, WIDE = 44, 120
STAGES: dict[str, Stage] = {"all": "all", "decode": "decode", "prefill": "prefill"}

app = typer.Typer()
out = console()
err = console(stderr=True)


@app.command(
    "profile",
    rich_help_panel=Panel.TUNE,
    epilog=examples(
        "deploy profile TRACE.json.gz                    time and launches of a step by category",
        "deploy profile decode --load 16                 record 10 steps of the running decode, 16 requests in flight",
        "deploy profile decode --steps 3 --out traces    while something else sends requests",
        "deploy profile BEFORE.json.gz AFTER.json.gz     what became faster, what slower",
        "deploy profile TRACE.json.gz --html step.html   one page with plots",
        "deploy profile TRACE.json.gz --json > s.json && deploy gap --trace s.json",
    ),
)
def profile_verb(
    what: Annotated[
        str,
        typer.Argument(
            metavar="TRACE|ROLE",
            help="A trace, or a running engine to record.",
            # Where no role fits, the shell offers files.
            autocompletion=completion.engines,
        ),
    ],
    after: Annotated[Path | None, typer.Argument(metavar="[TRACE]", help="Compare with this one.")] = None,
    stage: Annotated[str, typer.Option(help="decode, prefill, or all: whichever took longest.")] = "all",
    layers: Annotated[int, typer.Option(min=1, help="Of the model.")] = LAYERS,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
    top: Annotated[int, typer.Option(min=1, max=1000, help="How many kernels to show.")] = 10,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps to record.")] = STEPS,
    seconds: Annotated[float, typer.Option(min=1, max=3600, help="The longest to wait for them.")] = SECONDS,
    load: Annotated[int, typer.Option(min=0, max=256, help="Requests to keep in flight while it records.")] = 0,
    folder: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Where recorded traces go.")] = Path("traces"),
    state: StateOption = STATE,
    as_json: JsonOption = False,
) -> None:
    """Show where the time of a step goes: by category, by kernel, launches, idle, ours and upstream's.

    Given a role, first records its next steps through SGLang's profiler. Recording slows the engine down for those
    steps; a load test that runs beside it is not valid.
    """
    if stage not in STAGES:
        raise typer.BadParameter(f"{stage!r}: one of {', '.join(STAGES)}", param_hint="--stage")
    if what in ALL_ENGINES and not Path(what).is_file():
        if after:
            raise typer.BadParameter("two traces are compared, not a role and a trace", param_hint="[TRACE]")
        first, *_ = _record(what, folder, steps, seconds, load, state)
    else:
        first = Path(what)
    summaries = [_summary(path, layers, STAGES[stage]) for path in (first, after) if path]
    comparison = compare(*summaries) if len(summaries) == 2 else None
    if html:
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(report.html(summaries, comparison), encoding="utf-8")
        err.print(f"wrote {html}", soft_wrap=True)
    if as_json:
        print_json((comparison or summaries[0]).model_dump(mode="json"))
        return
    for one in summaries:
        for line in report.headline(one):
            out.print(line, markup=False, soft_wrap=True)
    if comparison:
        _show(report.changes(comparison))
        _show(report.kernel_changes(comparison, top, NAME_WIDTH))
        return
    _show(report.categories(summaries[0]))
    _show(report.kernels(summaries[0], top, NAME_WIDTH))


def _record(role: str, folder: Path, steps: int, seconds: float, load: int, state: Path) -> list[Path]:
    from deploy.host import probe
    from deploy.host.docker_facts import require_docker
    from deploy.stack.compose import running_stack
    from deploy.stack.profiling import capture
    from deploy.stack.state import State
    from deploy.stack.status import running_endpoint

    require_docker(probe.docker_facts(), cdi=False)
    stack = running_stack(ROOT, State(state).environment)
    target = running_endpoint(stack, tuple(stack.roles())) if load else None
    return capture(
        stack,
        role,
        folder,
        steps=steps,
        seconds=seconds,
        load=load,
        target=target,
        say=lambda text: err.print(text, markup=False, soft_wrap=True),
    )


def _summary(path: Path, layers: int, stage: Stage) -> Summary:
    """Read one trace.

    Raises:
        UnreadableTrace: it cannot be used.
    """
    with render.transfer(err) as progress:
        trace = read(path, lambda done, total: progress("trace", done, total))
    try:
        return summarise(trace, layers, stage)
    except ValueError as error:
        raise UnreadableTrace(
            f"{path} has no step to show", str(error), "record it while requests run: deploy profile decode --load 4"
        ) from None


def _show(rows: report.Table) -> None:
    """A table; the first column is left, the others right."""
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows[1:]:
        table.add_row(*row)
    out.print()
    # A pipe has no width to keep to.
    wide = out if out.is_terminal else Console(highlight=False, width=WIDE)
    wide.print(table)
