"""`deploy bench`: verbs and their help. Parses, calls one function, renders what it returned."""

from __future__ import annotations

import json
import re
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer
from pydantic import ValidationError
from rich.live import Live
from rich.text import Text

from deploy.command_line import console, examples, printable
from deploy.validation import first_mistake
from loadtest import bench as benchmark
from loadtest import compare as comparison
from loadtest import interop, render
from loadtest import report as reports
from loadtest.bench import Settings, State
from loadtest.capacity import limits, measure_capacity
from loadtest.errors import BenchError
from loadtest.metrics import Slo
from loadtest.run import LOCUSTFILE
from loadtest.workload import Prompts, Synthetic, Trace, Workload, parse_length, parse_lengths

DEFAULT_URL = "http://127.0.0.1:30000"
MOST_S = 7 * 86400.0
EXIT_REJECTED, EXIT_MISSED, EXIT_INTERRUPTED = 3, 4, 130

EXAMPLES = """
\b
Examples:
  deploy bench -c 1,16,64                            the three levels, 60 s each
  deploy bench --duration 10 -c 16                   a quick look
  deploy bench -c 16 --lengths 8K/1K --repeat 5      five repetitions: confidence intervals
  deploy bench -c 16 --target 1000@16                ends with pass or fail and the gap
  deploy bench --rate 2,4,8 --slo ttft=2,tpot=0.05   open loop, goodput
  deploy bench -c 16 --duration 2h --label soak      soak
  deploy bench compare runs/A runs/B

Exit codes: 0 valid, 1 failed, 2 usage, 3 rejected or partial (the reasons are listed), 4 target missed, 130 Ctrl-C.
"""

bench = typer.Typer(
    help="Load tests against the streaming endpoint.", no_args_is_help=False, rich_markup_mode=None, epilog=EXAMPLES
)


def _fail(error: BenchError) -> NoReturn:
    err = console(stderr=True)
    err.print(Text(printable(f"error: {error.message}"), "bold red"), soft_wrap=True)
    for name, text in (("why", error.why), ("fix", error.fix)):
        if text:
            err.print(Text(printable(f"  {name}: {text}")), soft_wrap=True)
    raise typer.Exit(error.exit_code)


def _numbers(text: str, name: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected numbers with commas between", param_hint=name) from None


def _users(text: str) -> tuple[int, ...]:
    values = _numbers(text, "-c")
    if not values or any(value < 1 or value != int(value) for value in values):
        raise typer.BadParameter(f"{text!r}: expected whole numbers like 1,16,64", param_hint="-c")
    return tuple(int(value) for value in values)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if not match or float(match[1]) <= 0:
        raise typer.BadParameter(f"{text!r}: expected seconds, or 10m, 2h", param_hint="--duration")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def _pairs(text: str, name: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise typer.BadParameter(f"{part!r}: expected NAME=VALUE", param_hint=name)
        pairs[key.strip()] = value.strip()
    return pairs


def _slo(text: str) -> Slo:
    pairs = _pairs(text, "--slo")
    unknown = set(pairs) - {"ttft", "tpot", "e2e"}
    if unknown:
        raise typer.BadParameter(f"{sorted(unknown)}: allowed are ttft, tpot, e2e (seconds)", param_hint="--slo")
    try:
        return Slo(**{name: float(value) for name, value in pairs.items()})
    except ValueError:
        raise typer.BadParameter(f"{text!r}: limits are seconds", param_hint="--slo") from None


def _target(text: str) -> tuple[float, int]:
    throughput, at, users = text.partition("@")
    try:
        value = (float(throughput), int(users))
        if not at or min(value) <= 0:
            raise ValueError
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected THROUGHPUT@C, like 1000@16", param_hint="--target") from None
    return value


def _workload(
    lengths: str, shared_prefix: str | None, turns: int, prompts: Path | None, trace: Path | None, speed: float
) -> Workload:
    try:
        input_length, output_length = parse_lengths(lengths)
        if prompts is not None and trace is not None:
            raise ValueError("--prompts and --trace exclude each other")
        if prompts is not None:
            return Prompts(path=str(prompts.resolve()), output=output_length)
        if trace is not None:
            return Trace(path=str(trace.resolve()), speed=speed)
        shared, groups = 0, 1
        if shared_prefix:
            given, _, number = shared_prefix.partition(":")
            shared, groups = parse_length(given).low, int(number or 1)
        return Synthetic(input=input_length, output=output_length, shared_prefix=shared, groups=groups, turns=turns)
    except ValidationError as error:
        raise typer.BadParameter(first_mistake(error)) from None
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@bench.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    concurrency: Annotated[
        str | None,
        typer.Option("-c", "--concurrency", help="requests in flight, one level each (closed loop) [1,16,64]"),
    ] = None,
    rate: Annotated[str | None, typer.Option(help="requests a second, one level each (open loop, Poisson)")] = None,
    url: Annotated[str, typer.Option(help="base URL of the server")] = DEFAULT_URL,
    api_key_file: Annotated[Path | None, typer.Option(help="file that holds the API key")] = None,
    ca_file: Annotated[Path | None, typer.Option(help="PEM file with the CA of an https URL")] = None,
    model: Annotated[str | None, typer.Option(help="served model name [the only one]")] = None,
    endpoint: Annotated[
        str, typer.Option(help="chat (/v1/chat/completions) or generate (/generate, raw comparison)")
    ] = "chat",
    duration: Annotated[str, typer.Option(help="the measured window, after the warm-up: seconds, 10m or 2h")] = "60",
    repeat: Annotated[int, typer.Option(min=1, help="repetitions of every level, for confidence intervals")] = 1,
    lengths: Annotated[
        str,
        typer.Option(help="INPUT/OUTPUT tokens: 256/256, 8K/1K, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA[:MAX] each"),
    ] = "256/256",
    shared_prefix: Annotated[
        str | None, typer.Option(help="TOKENS[:GROUPS] at the start of each prompt that a group has in common")
    ] = None,
    turns: Annotated[int, typer.Option(min=1, help="requests of one conversation, with the real answers in it")] = 1,
    prompts: Annotated[Path | None, typer.Option(help="JSONL of your own prompts instead")] = None,
    trace: Annotated[Path | None, typer.Option(help="JSONL trace to replay (Mooncake format) instead")] = None,
    trace_speed: Annotated[float, typer.Option(min=0.001, max=1e6, help="how many times as fast to replay it")] = 1.0,
    seed: Annotated[int, typer.Option(help="same seed, same requests")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = 0.0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="the served model's tokenizer.json or its folder [words are probed instead]")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=URL of an engine whose counters to compare, e.g. prefill=http://10.0.0.2:30000; repeat [found]"
        ),
    ] = None,
    ramp: Annotated[
        float, typer.Option(min=0.0, max=MOST_S, help="seconds until all users or the full rate are there")
    ] = 0.0,
    warmup_limit: Annotated[
        float, typer.Option(min=1.0, max=MOST_S, help="seconds after which a run counts as never steady")
    ] = 300.0,
    drain_limit: Annotated[
        float, typer.Option(min=1.0, max=MOST_S, help="seconds to wait for the last answers")
    ] = 120.0,
    silence_timeout: Annotated[
        float, typer.Option(min=0.1, max=MOST_S, help="seconds without a byte that fail a request")
    ] = 300.0,
    request_timeout: Annotated[float, typer.Option(min=0.1, max=MOST_S, help="seconds that fail a request")] = 1800.0,
    processes: Annotated[int, typer.Option(min=1, help="generator processes, when one is not fast enough")] = 1,
    slo: Annotated[str | None, typer.Option(help="ttft=S,tpot=S,e2e=S (seconds): goodput is what meets it")] = None,
    target: Annotated[str | None, typer.Option(help="THROUGHPUT@C that must be reached, like 1000@16")] = None,
    lock: Annotated[
        Path | None, typer.Option(help="lock file the engine must match [uv.lock, deploy.lock here]")
    ] = None,
    host_report: Annotated[Path | None, typer.Option(help="saved host report to put into the result")] = None,
    label: Annotated[str | None, typer.Option(help="a name for this run in the history")] = None,
    out: Annotated[Path, typer.Option(help="folder for the runs")] = Path("runs"),
    write_plan: Annotated[
        Path | None, typer.Option(help="write the plan for `locust -f loadtest/locustfile.py --plan FILE` and stop")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print result.json instead of tables")] = False,
) -> None:
    """Measures throughput and latency at each level and says whether the numbers can be trusted."""
    if context.invoked_subcommand is not None:
        return
    if _given(context, "url"):
        # The running stack's key and certificate are for the running stack alone.
        api_key_file = api_key_file if _given(context, "api_key_file") else None
        ca_file = ca_file if _given(context, "ca_file") else None
    if endpoint not in ("chat", "generate"):
        raise typer.BadParameter(f"{endpoint!r}: allowed are chat, generate", param_hint="--endpoint")
    if turns > 1 and endpoint != "chat":
        raise typer.BadParameter("conversations need --endpoint chat", param_hint="--turns")
    if trace is not None and (concurrency or rate):
        raise typer.BadParameter("a trace brings its own arrival times: no -c, no --rate", param_hint="--trace")
    goal = _target(target) if target else None
    users = _users(concurrency) if concurrency else (() if rate or trace else (goal[1],) if goal else (1, 16, 64))
    settings = Settings(
        url=url.rstrip("/"),
        workload=_workload(lengths, shared_prefix, turns, prompts, trace, trace_speed),
        users=users,
        rates=_numbers(rate, "--rate") if rate else (),
        duration=_seconds(duration),
        repetitions=repeat,
        endpoint=endpoint,
        model=model,
        api_key_file=api_key_file,
        ca_file=ca_file,
        seed=seed,
        temperature=temperature,
        tokenizer=tokenizer,
        engines=_pairs(",".join(engine), "--engine") if engine else {},
        out=out,
        label=label,
        processes=processes,
        ramp=ramp,
        warmup_limit=warmup_limit,
        drain_limit=drain_limit,
        silence_timeout=silence_timeout,
        request_timeout=request_timeout,
        slo=_slo(slo) if slo else None,
        target=goal,
        lock=lock,
        host_report=host_report,
    )
    shown = console(stderr=as_json)
    if write_plan is not None:
        try:
            benchmark.write_plan(settings, write_plan)
        except BenchError as error:
            _fail(error)
        typer.echo(f"locust -f {LOCUSTFILE} --plan {write_plan}")
        return
    stopped = _Interrupt()
    try:
        with Live(console=shown, refresh_per_second=2, transient=True, redirect_stdout=False) as table:

            def show(state: State) -> None:
                table.update(render.live(state))

            def say(text: str) -> None:
                if shown.is_terminal:
                    shown.print(Text(printable(text), "dim"))

            result, folder = benchmark.run(settings, show, say, stopped)
    except BenchError as error:
        _fail(error)
    if as_json:
        sys.stdout.write(result.model_dump_json(indent=1, by_alias=True) + "\n")
    else:
        shown.print(render.summary(result, str(folder)))
    if stopped():
        raise typer.Exit(EXIT_INTERRUPTED)
    if result.verdict != "valid":
        raise typer.Exit(EXIT_REJECTED)
    if result.target is not None and not result.target.reached:
        raise typer.Exit(EXIT_MISSED)


@bench.command(
    epilog=examples(
        "deploy bench compare runs/A runs/B",
        "deploy bench compare runs/A/result.json runs/B/result.json --json | jq .ratios",
    )
)
def compare(
    a: Annotated[Path, typer.Argument(help="run folder or result.json: the reference")],
    b: Annotated[Path, typer.Argument(help="run folder or result.json: what is judged")],
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Ratio B/A of each figure with its confidence interval, a verdict, and what else differed."""
    try:
        found = comparison.compare(benchmark.load(a), benchmark.load(b))
    except BenchError as error:
        _fail(error)
    if as_json:
        sys.stdout.write(found.model_dump_json(indent=1) + "\n")
    else:
        console().print(render.comparison(found))
    if not found.ratios:
        raise typer.Exit(EXIT_REJECTED)


@bench.command(epilog=examples("deploy bench history", "deploy bench history --out /mnt/runs --json | jq '.[-1]'"))
def history(
    out: Annotated[Path, typer.Option(help="folder with the runs")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """All runs in a folder, oldest first."""
    try:
        results, broken = benchmark.load_all(out)
    except BenchError as error:
        _fail(error)
    if as_json:
        sys.stdout.write(json.dumps([result.model_dump(mode="json", by_alias=True) for result in results]) + "\n")
    else:
        console().print(render.history(results))
    for path in broken:
        console(stderr=True).print(Text(printable(f"skipped {path}: not a result"), "yellow"), soft_wrap=True)


@bench.command(epilog=examples("deploy bench report runs/A"))
def report(run_folder: Annotated[Path, typer.Argument(help="run folder")]) -> None:
    """Writes report.md and report.html of a run again."""
    try:
        paths = reports.write(benchmark.load(run_folder), run_folder)
    except BenchError as error:
        _fail(error)
    for path in paths:
        typer.echo(path)


@bench.command(
    "import",
    epilog=examples(
        "deploy bench import sglang.jsonl                    of sglang.bench_serving --output-file",
        "deploy bench import profile_export_aiperf.json      of AIPerf",
        "deploy bench compare runs/A runs/sglang-ID          and set beside one of ours",
    ),
)
def import_result(
    file: Annotated[Path, typer.Argument(help="result of sglang.bench_serving (JSONL), AIPerf or genai-bench (JSON)")],
    out: Annotated[Path, typer.Option(help="folder for the runs")] = Path("runs"),
) -> None:
    """Takes another tool's result in, for compare and history."""
    try:
        result = interop.read(file)
        folder = out / f"{result.source}-{result.id}"
        if (folder / "result.json").exists():
            raise BenchError(f"{folder} exists already", "this file was imported before", "remove it, or choose --out")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BenchError(f"cannot make the folder {folder}", error.strerror or str(error)) from None
        benchmark.save(result, folder)
    except BenchError as error:
        _fail(error)
    typer.echo(folder)


@bench.command(
    "export",
    epilog=examples(
        "deploy bench export runs/A > sglang.jsonl",
        "deploy bench export runs/A --format aiperf > aiperf.jsonl",
    ),
)
def export_result(
    run_folder: Annotated[Path, typer.Argument(help="run folder or result.json")],
    tool: Annotated[str, typer.Option("--format", help="sglang, aiperf or genai-bench")] = "sglang",
) -> None:
    """Prints a run's valid levels as another tool writes them, one JSON document a line."""
    if tool not in interop.TOOLS:
        raise typer.BadParameter(f"{tool!r}: allowed are {', '.join(interop.TOOLS)}", param_hint="--format")
    try:
        sys.stdout.write(interop.export(benchmark.load(run_folder), tool))
    except BenchError as error:
        _fail(error)


@bench.command(epilog=examples("deploy bench capacity", "deploy bench capacity --json | jq .per_core"))
def capacity(as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Measures how many streamed tokens a second one generator process takes on this machine."""
    try:
        found = measure_capacity()
    except BenchError as error:
        _fail(error)
    if as_json:
        sys.stdout.write(json.dumps(asdict(found)) + "\n")
        return
    typer.echo(f"{found.per_core:.0f} streamed tokens/s a core ({found.rate:.0f}/s at {found.cpu:.0%} of a core)")
    typer.echo(limits())


class _Interrupt:
    """Turns the first Ctrl-C or SIGTERM into a question; the second one ends the program as usual."""

    def __init__(self) -> None:
        self._asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, _: FrameType | None) -> None:
        self._asked = True
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

    def __call__(self) -> bool:
        return self._asked


if __name__ == "__main__":
    bench()
