"""The verb that needs no GPU to say how far the limit is: `gap`. `cli.py` mounts it."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from sm120_kernels.gpus import GPUS, RTX_PRO_6000, Gpu, find_gpu
from sm120_kernels.shapes import LAYERS

from deploy.command_line import SPEC, JsonOption, Panel, ProfileOption, SpecOption, console, examples, print_json, verbs
from deploy.errors import WrongInput
from deploy.gap import measured as held
from deploy.gap import model
from deploy.gap.published import CONTEXT as CONTEXT_OF_RECORDS
from deploy.gap.published import POINTS, check

if TYPE_CHECKING:
    from deploy.spec.model import Spec

TARGET = "1000@16"
CONTEXT = 8192
MIDDLE_ACCEPTED = {"none": 1.0, "eagle": 2.5, "dspark": 4.0}
"""Assumed where `--accepted` says nothing."""

app = verbs()
out = console()
err = console(stderr=True)


class GpuName(StrEnum):
    rtx_pro_6000 = "rtx-pro-6000"
    h200 = "h200"


class KernelsName(StrEnum):
    sglang = "sglang"
    sm120 = "sm120"


class AllReduceName(StrEnum):
    nccl = "nccl"
    ipc = "ipc"


def parse_levels(text: str, what: str) -> tuple[float, int]:
    """`THROUGHPUT@C`. Raises typer.BadParameter."""
    throughput, at, users = text.partition("@")
    try:
        value = (float(throughput), int(users))
        if not at or not 0 < value[0] < float("inf") or value[1] < 1:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected THROUGHPUT@C, like 1000@16", param_hint=what) from None
    return value


def parse_numbers(text: str, what: str) -> list[int]:
    """`1,16,64`. Raises typer.BadParameter."""
    try:
        found = [int(item) for item in text.split(",")]
        if min(found) < 1 or max(found) > 1 << 20:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected whole numbers like 1,16,64", param_hint=what) from None
    return sorted(set(found))


def setting_of(
    spec: "Spec",
    gpu: Gpu,
    *,
    kernels: model.Kernels = "sglang",
    all_reduce: model.AllReduce | None = None,
    accepted: float | None = None,
) -> model.Setting:
    """What a spec asks for, as the roofline sees it. Raises WrongInput for the cpu profile."""
    if spec.profile == "cpu":
        raise WrongInput(
            "there is no roofline of the cpu profile",
            "its tiny model has other shapes, and a CPU no such limit",
            "deploy gap --profile pd, or --profile replicas",
        )
    return model.Setting(
        gpu=gpu,
        ranks=spec.gpus_per_engine,
        engines=len(spec.replica) if spec.profile == "replicas" else 1,
        variant=spec.model.variant,
        kernels=kernels,
        all_reduce=all_reduce or ("ipc" if spec.engine.pcie_ipc_all_reduce else "nccl"),
        speculation=spec.engine.speculation,
        accepted=accepted or MIDDLE_ACCEPTED[spec.engine.speculation],
    )


def gpu_of(name: GpuName | None, host_report: Path | None) -> Gpu:
    """The GPU asked for, or the report's; an RTX PRO 6000 where neither is given. Raises WrongInput."""
    if name is not None:
        return GPUS[name.value]
    if host_report is None:
        return RTX_PRO_6000
    from deploy.host.report import UnreadableReport, load

    try:
        names = {gpu.name for gpu in load(host_report).gpus if gpu.name}
    except UnreadableReport as error:
        raise WrongInput(str(error), "", "deploy doctor --save FILE writes one") from None
    known = [gpu for said in sorted(names) if (gpu := find_gpu(said))]
    if not known:
        raise WrongInput(
            f"{host_report}: {', '.join(sorted(names)) or 'no GPU'} is not in the table of GPUs",
            "the roofline needs its bandwidth and rates",
            f"--gpu {' or '.join(GPUS)}",
        )
    return known[0]


def measured_levels(values: list[str], accepted: float) -> list[held.Measured]:
    """`--measured`: files of the load test, folders that hold one, or `THROUGHPUT@C`. Raises DeployError."""
    found: list[held.Measured] = []
    for value in values:
        path = Path(value)
        if not path.exists() and "@" in value:
            throughput, users = parse_levels(value, "--measured")
            found.append(held.of_throughput(throughput, users, accepted))
            continue
        from loadtest.bench import load as load_result
        from loadtest.errors import BenchError

        try:
            result = load_result(path)
        except BenchError as error:
            raise WrongInput(error.message, error.why, error.fix) from None
        if any((engine or {}).get("device") == "cpu" for engine in result.environment.engines.values()):
            raise WrongInput(
                f"{path} was measured without GPUs",
                f"its engines ran {result.environment.model} on a CPU; what is predicted is DeepSeek-V4-Flash on GPUs",
                "name a load test of a stack with GPUs",
            )
        levels = held.of_result(result, accepted)
        if not levels:
            raise WrongInput(
                f"{path} has no valid level with a time per token",
                "a rejected window says nothing about the engine",
                "deploy bench report FOLDER names the reasons",
            )
        found += levels
    return sorted(found, key=lambda one: one.users)


def _trace_seconds(path: Path) -> dict[str, float]:
    """Seconds of a step by category, from `deploy profile --json`."""
    import json

    try:
        step = json.loads(path.read_text(encoding="utf-8"))["step"]["by_category"]
        return {str(name): float(value["seconds"]) for name, value in step.items()}
    except OSError as error:
        raise WrongInput(f"{path} cannot be read", error.strerror or str(error), "name another: --trace FILE") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WrongInput(
            f"{path} is not the summary of a trace",
            "a step's time by category is wanted",
            f"deploy profile TRACE --json > {path.name}",
        ) from None


@app.command(
    "gap",
    rich_help_panel=Panel.TUNE,
    epilog=examples(
        "deploy gap                                       what deploy.toml can reach at most, and why",
        "deploy gap -c 16 --context 65536                 at one load, with longer requests",
        "deploy gap --measured runs/2026-11-30-a          what a load test lacks, and in which part",
        "deploy gap --measured 26.6@16 --measured 11.5@1  the same from figures alone",
        "deploy gap --trace summary.json                  ... by category, from deploy profile --json",
        "deploy gap --plots plots                         waterfall of the step, tok/s over C and over context",
        "deploy gap --published                           the model against the public records",
        "deploy gap --json | jq '.ceilings[].tokens_per_second'",
    ),
)
def gap_verb(
    spec: SpecOption = SPEC,
    profile: ProfileOption = None,
    concurrency: Annotated[str, typer.Option("--concurrency", "-c", help="Requests in flight.")] = "1,16,64",
    context: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens of each request so far.")] = CONTEXT,
    target: Annotated[str, typer.Option(help="THROUGHPUT@C, for the step budget.")] = TARGET,
    prompt: Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens of the prompt to prefill.")] = CONTEXT,
    measured: Annotated[
        list[str] | None, typer.Option(metavar="FOLDER|THROUGHPUT@C", help="A load test's result, or a figure of it.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Summary by deploy profile, of a step at C.")
    ] = None,
    gpu: Annotated[GpuName | None, typer.Option(help="Instead of the report's, or rtx-pro-6000.")] = None,
    host_report: Annotated[Path | None, typer.Option(metavar="FILE", help="Of deploy doctor --save.")] = None,
    kernels: Annotated[KernelsName, typer.Option(help="Whose launches are counted.")] = KernelsName.sglang,
    all_reduce: Annotated[AllReduceName | None, typer.Option(help="Instead of the spec's.")] = None,
    accepted: Annotated[
        float | None, typer.Option(min=1.0, max=8.0, help="Tokens a request keeps of a step, with speculation.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write plots (SVG) there.")] = None,
    published: Annotated[bool, typer.Option("--published", help="Only the model against public records.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Predict what the GPUs allow: bytes, FLOPs, all-reduces and launches of a step, and what a measurement lacks.

    Nothing is measured and no GPU needed. Every figure is a prediction and rests on the assumptions that are printed
    with it.
    """
    if published:
        _show_published(as_json)
        return
    from deploy.spec.load import load

    users, goal = parse_numbers(concurrency, "--concurrency"), parse_levels(target, "--target")
    parsed = load(spec, profile.value if profile else None).spec
    setting = setting_of(
        parsed,
        gpu_of(gpu, host_report),
        kernels=kernels.value,
        all_reduce=all_reduce.value if all_reduce else None,
        accepted=accepted,
    )
    if setting.speculation == "none":
        if accepted and accepted > 1:
            raise WrongInput(
                "--accepted without speculation",
                "one step gives one token then",
                '[engine] speculation = "eagle" or "dspark" with profile replicas',
            )
    elif setting.accepted > model.VERIFIED[setting.speculation]:
        raise WrongInput(
            f"{setting.accepted:g} tokens of a step",
            f"{setting.speculation} verifies {model.VERIFIED[setting.speculation]} at once",
            "--accepted with at most that many",
        )
    levels = measured_levels(measured or [], setting.accepted)
    chunk = parsed.prefill.chunked_prefill_size
    found = _Gap(setting, context, users, goal, prompt, chunk, levels, _trace_seconds(trace) if trace else None)
    if plots:
        _write_plots(found, plots)
    if as_json:
        print_json(found.as_dict())
    else:
        found.show()


class _Gap:
    """Everything that `gap` says about one setting."""

    def __init__(
        self,
        setting: model.Setting,
        context: int,
        users: list[int],
        target: tuple[float, int],
        prompt: int,
        chunk: int,
        levels: list[held.Measured],
        traced: dict[str, float] | None,
    ) -> None:
        self.setting, self.context, self.target, self.prompt = setting, context, target, prompt
        self.chunk, self.levels = chunk, levels
        wanted, at = target
        self.budget = model.step_budget(wanted, at, setting.accepted)
        self.ceilings = [model.ceiling(n, context, setting) for n in sorted({*users, at})]
        self.at_target = next(one for one in self.ceilings if one.users == at)
        self.prefill = model.prefill(prompt, chunk, setting)
        self.missing = [
            held.missing(
                level,
                model.ceiling(level.users, context, setting).step,
                setting.gpu,
                self.budget if level.users == at else None,
            )
            for level in levels
        ]
        self.split = held.split(self.missing)
        self.categories = held.by_category(traced, self.at_target.step) if traced else []

    @property
    def prefill_seconds(self) -> float:
        return sum(one.seconds for one in self.prefill)

    def as_dict(self) -> dict[str, Any]:
        """For --json; seconds, bytes, FLOPs."""
        return {
            "prediction": True,
            "assumptions": model.assumptions(self.setting),
            "setting": asdict(self.setting),
            "context": self.context,
            "target": {
                "tokens_per_second": self.target[0],
                "users": self.target[1],
                "step_budget": self.budget,
                "reachable": self.at_target.step.seconds <= self.budget,
            },
            "ceilings": [
                {
                    "users": one.users,
                    "tokens_per_second": one.tokens_per_second,
                    "roofline_tokens_per_second": one.roofline_tokens_per_second,
                    "step_seconds": one.step.seconds,
                    "roofline_seconds": one.step.roofline,
                    "parts": [asdict(part) for part in one.step.parts],
                }
                for one in self.ceilings
            ],
            "prefill": {
                "tokens": self.prompt,
                "chunk": self.chunk,
                "seconds": self.prefill_seconds,
                "parts": [[asdict(part) for part in one.parts] for one in self.prefill],
            },
            "measured": [asdict(one) for one in self.missing],
            "split": asdict(self.split) if self.split else None,
            "categories": [asdict(one) for one in self.categories],
        }

    def show(self) -> None:
        setting = self.setting
        engines = f"{setting.engines} engines of {setting.ranks}" if setting.engines > 1 else str(setting.ranks)
        out.print(
            f"Prediction, nothing measured: {engines} x {setting.gpu.name}, {setting.variant}, "
            f"context {self.context}, speculation {setting.speculation}",
            soft_wrap=True,
        )
        out.print(self._ceilings())
        wanted, users = self.target
        step = self.at_target.step.seconds
        verdict = "within it" if step <= self.budget else f"{step / self.budget:.2f} times too long"
        out.print(
            f"{wanted:g} tok/s at C={users} leaves {self.budget * 1e3:.2f} ms a step; predicted {step * 1e3:.2f} ms "
            f"({verdict}), memory and products alone {self.at_target.step.roofline * 1e3:.2f} ms",
            soft_wrap=True,
        )
        seconds = self.prefill_seconds
        link = sum(one.seconds_of("all-reduce") for one in self.prefill)
        out.print(
            f"prefill of {self.prompt} tokens on one engine: {seconds * 1e3:.0f} ms, {self.prompt / seconds:.0f} "
            f"tok/s; all-reduce {link * 1e3:.0f} ms of it",
            soft_wrap=True,
        )
        self._show_measured()
        out.print("\nAssumed:")
        for line in model.assumptions(setting):
            out.print(f"  - {line}", soft_wrap=True)

    def _ceilings(self) -> Table:
        """A column for each number of requests."""
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for one in self.ceilings:
            table.add_column(f"C={one.users}", justify="right")
        table.add_row("tok/s at most", *(f"{one.tokens_per_second:.0f}" for one in self.ceilings))
        table.add_row("step, ms", *(f"{one.step.seconds * 1e3:.2f}" for one in self.ceilings))
        table.add_row("  memory and products alone", *(f"{one.step.roofline * 1e3:.2f}" for one in self.ceilings))
        for name in dict.fromkeys(part.name for one in self.ceilings for part in one.step.parts):
            table.add_row(f"  {name}", *(f"{one.step.seconds_of(name) * 1e3:.2f}" for one in self.ceilings))
        return table

    def _show_measured(self) -> None:
        for one in self.missing:
            level = one.measured
            out.print(
                f"\nmeasured at C={level.users}: {level.tokens_per_second:.1f} tok/s, a step {level.step * 1e3:.1f} "
                f"ms: {one.factor:.1f} times the prediction of {one.predicted * 1e3:.2f} ms",
                soft_wrap=True,
            )
            if one.budget is not None and one.target_factor is not None:
                out.print(
                    f"  to the target: {level.step * 1e3:.1f} ms / {one.budget * 1e3:.2f} ms = {one.target_factor:.1f}",
                    soft_wrap=True,
                )
            out.print(
                f"  {LAYERS} layers of {one.layer * 1e3:.2f} ms, {one.launch * 1e6:.1f} us for each launch "
                f"(an empty one takes {self.setting.gpu.launch_seconds * 1e6:.1f})",
                soft_wrap=True,
            )
            if one.latency_bound:
                out.print(
                    f"  the GPUs say {level.utilisation:.0f} % and draw {level.watts:.0f} of "
                    f"{self.setting.gpu.watts:.0f} W: they wait rather than compute",
                    soft_wrap=True,
                )
        if self.split:
            part = self.split
            out.print(
                f"\n{part.batch:g} times the requests take {part.step:.1f} times the step. Of the time over the "
                f"prediction at C={part.large}, {part.fixed * 1e3:.1f} ms are there at C={part.small} too (launches, "
                f"latency, idle GPUs) and {part.growing * 1e3:.1f} ms came with the requests (work done more often "
                "than needed)",
                soft_wrap=True,
            )
        if self.categories:
            table = Table(box=None, pad_edge=False)
            for name in ("category", "measured ms", "least ms", "times", "share of the excess"):
                table.add_column(name, justify="left" if name == "category" else "right")
            for row in self.categories:
                times = f"{row.measured / row.least:.1f}" if row.least else ""
                table.add_row(
                    row.name, f"{row.measured * 1e3:.2f}", f"{row.least * 1e3:.2f}", times, f"{row.share:.0%}"
                )
            out.print(f"\nthe trace's step against the least at C={self.target[1]} (predicted):")
            out.print(table)


def _write_plots(found: _Gap, folder: Path) -> None:
    from deploy.gap import plots

    wanted, users = found.target
    step = next((one.step for one in found.levels if one.users == users), None)
    files = dict(plots.throughput(found.setting, found.context, found.target, found.levels))
    title = f"A step at C={users} for {wanted:g} tok/s, context {found.context}"
    files["step.svg"] = plots.waterfall(title, found.at_target.step, found.budget, step)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    err.print(f"wrote {', '.join(sorted(files))} in {folder}", soft_wrap=True)


def _show_published(as_json: bool) -> None:
    found = [check(point) for point in POINTS]
    if as_json:
        print_json({"prediction": True, "checks": [asdict(one) for one in found]})
        return
    table = Table(box=None, pad_edge=False)
    for name in ("record", "GPUs", "C", "published", "predicted", "error", "roofline", "needs"):
        table.add_column(name, justify="left" if name in ("record", "needs") else "right")
    for one in found:
        figures = [""] * 3
        if one.error is not None:
            figures = [f"{one.predicted:.0f}", f"{one.error:+.0%}", f"{one.roofline:.0f}"]
        needed = ", ".join(f"{way} {value:.1f}" for way, value in one.accepted.items())
        point = one.point
        table.add_row(
            point.source, str(point.ranks), str(point.users), f"{point.tokens_per_second:g}", *figures, needed
        )
    out.print(table)
    out.print(
        "\nneeds: tokens a request must have kept of each step for the record to agree with the model, of 4 (eagle) "
        "and 8 (dspark) verified; nobody published them\n"
        "Predicted for SGLang's launches and its PCIe IPC all-reduce. Assumed:",
        soft_wrap=True,
    )
    for line in [f"context {CONTEXT_OF_RECORDS}", *model.assumptions(model.Setting(RTX_PRO_6000, all_reduce="ipc"))]:
        out.print(f"  - {line}", soft_wrap=True)
