"""Times a whole decode step: the 43 layers of one of four tensor-parallel ranks, random weights of the real sizes.

    python -m benchmarks.decode_step --out benchmarks/results
    python -m benchmarks.decode_step --requests 16 --context 8192 --ways torch
    python -m benchmarks.decode_step --requests 16 --context 8192 --ways ours --no-error --trace traces

A step is one CUDA graph over all layers: 21 C4, 20 C128, 2 with a window only. Left out: the two all-reduces of a
layer, embedding, head and sampling. "ours" is this package's ops; "torch" is torch's functions alone, with the dense
weights turned into bf16 at load and the experts unpacked where they are used. Request i of a step has context - i
tokens, so that the first ends a group of 128 tokens and every fourth one of 4.

The share of each category comes from graphs that hold that category's calls of all layers alone. They add up to more or
less than the step where calls overlap (programmatic dependent launch) or start from another cache state.

The roofline of a step is the fewest bytes it must read (dense weights, the routed experts that are hit, cache tokens
that are scored or attended to) over the copy bandwidth of the same run, or its FLOPs over the bf16 rate where that is
more.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sm120_kernels.gpus import RTX_PRO_6000
from sm120_kernels.shapes import KINDS, LAYERS, RATIOS, Cost

from benchmarks import timing
from benchmarks.decode_layer import (
    CATEGORIES,
    RANK,
    Caches,
    Calls,
    Requests,
    TorchWeights,
    Weights,
    all_torch,
    first_state,
    in_float64,
    ours,
)

REQUESTS = (1, 16, 64)
CONTEXTS = (256, 8192, 65536)
WAYS = ("torch", "ours")
ERROR_AT = (16, 8192)
LONGEST_MICROSECONDS = 2e6
TARGET = RTX_PRO_6000
TRACED_STEPS = 5


class Model:
    """Weights of all layers, made once."""

    def __init__(self, layers: int, ways: tuple[str, ...]) -> None:
        generator = torch.Generator("cuda").manual_seed(5)
        self.weights = [Weights.random(ratio, generator) for ratio in RATIOS[:layers]]
        self.converted = [TorchWeights.of(w) if "torch" in ways else None for w in self.weights]

    @property
    def count(self) -> int:
        """Layers."""
        return len(self.weights)


class Step:
    """One way to run one setting: its calls, layer by layer, on one state."""

    def __init__(self, model: Model, way: str, requests: Requests, caches: list[Caches]) -> None:
        self.model, self.way, self.requests, self.caches = model, way, requests, caches
        self.first = first_state(requests.count, torch.Generator("cuda").manual_seed(6))
        self.hit: list[int] = []
        self.by_kind: dict[int, SimpleNamespace] = {}

    def calls(self, layer: int, state: SimpleNamespace) -> Calls:
        """The calls of one layer on `state`."""
        weights, caches = self.model.weights[layer], self.caches[layer]
        if self.way == "ours":
            return ours(weights, caches, self.requests, state)
        converted = self.model.converted[layer]
        assert converted is not None
        return all_torch(weights, converted, caches, self.requests, state)

    def run(self, record: bool = False) -> SimpleNamespace:
        """All layers from the first state; with record, keep what the graphs of categories and the bytes need."""
        state = SimpleNamespace(**vars(self.first))
        for layer in range(self.model.count):
            for _, call in self.calls(layer, state):
                call()
            if record:
                self.hit.append(len(torch.unique(state.ids)))
                self.by_kind[RATIOS[layer]] = SimpleNamespace(**vars(state))
        return state

    def category(self, name: str) -> None:
        """One category's calls of all layers."""
        for layer in range(self.model.count):
            for category, call in self.calls(layer, self.by_kind[RATIOS[layer]]):
                if category == name:
                    call()

    def launches(self, stream: torch.cuda.Stream) -> dict[str, int]:
        """Kernels, copies and memsets of a layer of each kind."""
        found = {}
        for kind, ratio in KINDS.items():
            if ratio in self.by_kind:
                calls = self.calls(RATIOS.index(ratio), SimpleNamespace(**vars(self.by_kind[ratio])))
                found[kind] = timing.count_launches(lambda calls=calls: [call() for _, call in calls], stream)
        return found


def graph_microseconds(call: Callable[[], object], stream: torch.cuda.Stream, replays: int = 12) -> float:
    """Median time of a graph that holds one call; fewer replays of one that takes seconds.

    The ops' counters belong to a stream: what is captured ran on the same one before.
    """
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call()
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < replays and (len(times) < 3 or sum(times) < LONGEST_MICROSECONDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def record_trace(step: Step, stream: torch.cuda.Stream, folder: Path) -> Path:
    """Record some replays of a step's graph with torch's profiler, marked as SGLang marks its steps.

    The file is for `deploy profile`; the profiler slows the step down and what follows (`timing.count_launches`), so no
    time is taken from here on.
    """
    with torch.cuda.stream(stream):
        step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step.run()
    graph.replay()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        for _ in range(TRACED_STEPS):
            with torch.profiler.record_function(f"step[DECODE bs={step.requests.count}]"):
                graph.replay()
        torch.cuda.synchronize()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"decode_step_{step.way}_{step.requests.count}x{step.requests.context}.trace.json.gz"
    profile.export_chrome_trace(str(file))
    return file


def costs(requests: Requests, hit: list[int]) -> dict[str, Cost]:
    """Fewest bytes a step must read and its FLOPs, by category; `hit`: experts that are hit, layer by layer."""
    return dict(RANK.step(requests.work(), hit, head=False))


def measure(step: Step, machine: timing.Machine, stream: torch.cuda.Stream, shares: bool) -> dict[str, Any]:
    """One way at one setting; with shares, each category too."""
    requests = step.requests
    # Caches and first state are made on another stream.
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step.run(record=True)
    torch.cuda.synchronize()
    least = costs(requests, step.hit)
    row: dict[str, Any] = {
        "way": step.way,
        "requests": requests.count,
        "context": requests.context,
        "bytes": sum(cost.bytes for cost in least.values()),
        "flops": sum(cost.flops for cost in least.values()),
        "bytes_by_category": {name: cost.bytes for name, cost in least.items()},
        "experts_hit": statistics.mean(step.hit),
        "launches": step.launches(stream),
    }
    row["roofline_microseconds"] = machine.roofline_microseconds(row["bytes"], row["flops"])
    row["microseconds"] = graph_microseconds(step.run, stream)
    row["ratio"] = row["microseconds"] / row["roofline_microseconds"]
    row["tokens_per_second"] = requests.count / row["microseconds"] * 1e6
    if shares:
        row["by_category"] = {
            name: graph_microseconds(lambda name=name: step.category(name), stream, 6) for name in CATEGORIES
        }
    return row


def predict(row: dict[str, Any], copy_bytes_per_second: float) -> dict[str, Any]:
    """What a step would take on an RTX PRO 6000, worked out from bytes, FLOPs and what this GPU loses to launches.

    A category's time here beyond its bytes over this GPU's bandwidth is launches, latency and idle multiprocessors.
    It is taken over as it is; the bytes are read at the target's bandwidth.
    """
    bandwidth = TARGET.bandwidth
    whole = sum(row["by_category"].values())
    found: dict[str, float] = {}
    for name, microseconds in row["by_category"].items():
        here = row["bytes_by_category"].get(name, 0) / copy_bytes_per_second * 1e6
        # The parts' sum is brought to the step's time first.
        rest = max(0.0, microseconds * row["microseconds"] / whole - here)
        found[name] = row["bytes_by_category"].get(name, 0) / bandwidth * 1e6 + rest
    microseconds = max(sum(found.values()), row["flops"] / TARGET.bf16_flop_per_second * 1e6)
    return {
        "requests": row["requests"],
        "context": row["context"],
        "microseconds": microseconds,
        "tokens_per_second": row["requests"] / microseconds * 1e6,
        "roofline_microseconds": row["bytes"] / bandwidth * 1e6,
        "by_category": found,
    }


def errors(model: Model, way: str, requests: Requests, caches: list[Caches]) -> list[dict[str, Any]]:
    """Error of one layer of each kind and of all chained, against float64.

    "own choices": the reference chooses tokens and experts by its own scores. "same choices": it takes those the
    measured step took, so that what is left is arithmetic.
    """

    def row(layer: str, choices: str, mine: SimpleNamespace, other: SimpleNamespace) -> dict[str, Any]:
        pairs = {"expert input": "x", "expert output": "y", "streams": "residual"}
        found: dict[str, Any] = {"way": way, "layer": layer, "choices": choices}
        for name, key in pairs.items():
            value, expected = getattr(mine, key).double(), getattr(other, key).double()
            found[name] = float((value - expected).norm() / expected.norm())
        return found

    found: list[dict[str, Any]] = []
    step = Step(model, way, requests, caches)
    mine = SimpleNamespace(**vars(step.first))
    theirs = {name: SimpleNamespace(**vars(step.first)) for name in ("own choices", "same choices")}
    for layer in range(model.count):
        before = SimpleNamespace(**vars(mine))
        for _, call in step.calls(layer, mine):
            call()
        weights = model.weights[layer]
        choices = {"selected": mine.selected.int() if weights.ratio == 4 else None, "ids": mine.ids}
        for name, state in theirs.items():
            forced = choices if name == "same choices" else {}
            if layer == RATIOS.index(weights.ratio):
                single = SimpleNamespace(**vars(before))
                in_float64(weights, caches[layer], requests, single, **forced)
                kind = next(kind for kind, ratio in KINDS.items() if ratio == weights.ratio)
                found.append(row(f"one {kind} layer", name, mine, single))
            in_float64(weights, caches[layer], requests, state, **forced)
            if layer + 1 in (2, 4, 8, 16, 32, model.count):
                found.append(row(f"{layer + 1} chained", name, mine, state))
    return sorted(found, key=lambda one: (one["layer"].endswith("chained"), one["choices"]))


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    m = report["machine"]
    lines = [
        f"{m['gpu']}, {m['sms']} SMs, torch {m['torch']}, Triton {m['triton']}, {m['date']}; "
        f"copy {m['copy_bytes_per_second'] / 1e12:.2f} TB/s; {report['layers']} layers\n"
    ]
    columns = ["way", "C", "context", "ms", "tok/s", "GB", "roofline ms", "ratio", "launches C4 / C128 / window"]
    rows = [
        [
            row["way"],
            str(row["requests"]),
            str(row["context"]),
            f"{row['microseconds'] / 1e3:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['roofline_microseconds'] / 1e3:.2f}",
            f"{row['ratio']:.2f}",
            " / ".join(str(row["launches"].get(kind, "-")) for kind in KINDS),
        ]
        for row in report["rows"]
    ]
    lines.append(timing.markdown_table(columns, rows))
    shared = [row for row in report["rows"] if "by_category" in row]
    if shared:
        lines.append("Milliseconds of each category's calls alone:\n")
        body = [
            [
                row["way"],
                str(row["requests"]),
                str(row["context"]),
                *[f"{row['by_category'][name] / 1e3:.2f}" for name in CATEGORIES],
                f"{sum(row['by_category'].values()) / 1e3:.2f}",
            ]
            for row in shared
        ]
        lines.append(timing.markdown_table(["way", "C", "context", *CATEGORIES, "sum"], body))
    if report["predictions"]:
        lines.append(f"**Prediction**, nothing measured: RTX PRO 6000 Blackwell. {report['assumptions']}\n")
        body = [
            [
                str(row["requests"]),
                str(row["context"]),
                f"{row['microseconds'] / 1e3:.2f}",
                f"{row['tokens_per_second']:.0f}",
                f"{row['roofline_microseconds'] / 1e3:.2f}",
                *[f"{row['by_category'][name] / 1e3:.2f}" for name in CATEGORIES],
            ]
            for row in report["predictions"]
        ]
        lines.append(timing.markdown_table(["C", "context", "ms", "tok/s", "roofline ms", *CATEGORIES], body))
    if report["errors"]:
        lines.append(
            f"Error against float64, norm of the difference over its norm, C={ERROR_AT[0]}, context {ERROR_AT[1]}:\n"
        )
        names = ["way", "layer", "choices", "expert input", "expert output", "streams"]
        body = [[row[n] if isinstance(row[n], str) else f"{row[n]:.4f}" for n in names] for row in report["errors"]]
        lines.append(timing.markdown_table(names, body))
    return "\n".join(lines)


def plot(report: dict[str, Any], folder: Path) -> None:
    """Stacked bars: each setting's time by category, brought to the step's time; ours with the roofline."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for way in WAYS:
        rows = [row for row in report["rows"] if row["way"] == way and "by_category" in row]
        if not rows:
            continue
        figure, axes = pyplot.subplots(figsize=(8, 4.5))
        bottom = [0.0] * len(rows)
        for name in CATEGORIES:
            heights = [
                row["by_category"][name] * row["microseconds"] / sum(row["by_category"].values()) / 1e3 for row in rows
            ]
            axes.bar(range(len(rows)), heights, bottom=bottom, label=name)
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        for place, row in enumerate(rows):
            floor = row["roofline_microseconds"] / 1e3
            axes.plot([place - 0.4, place + 0.4], [floor, floor], "k--", label="roofline" if place == 0 else None)
        axes.set_xticks(range(len(rows)), [f"C={row['requests']}\n{row['context']}" for row in rows])
        axes.set(
            ylabel="ms a step", title=f"decode step, {way}, {report['machine']['gpu']}, {report['machine']['date']}"
        )
        axes.legend(fontsize="small")
        figure.tight_layout()
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / f"decode_step_{way}.svg")
        pyplot.close(figure)


def assumptions(machine: timing.Machine) -> str:
    """What the prediction rests on, in words."""
    return (
        f"Assumed: {TARGET.bytes_per_second / 1e12:.3f} TB/s by the datasheet, of which "
        f"{TARGET.reached:.0%} is reached, as {machine.gpu} reaches of its own; the time a category takes "
        "here beyond its bytes (launches, latency, idle multiprocessors) is the same there; at least "
        f"FLOPs / {TARGET.bf16_flop_per_second / 1e12:.0f} TFLOP/s; no all-reduce, no head."
    )


def warm(requests: tuple[int, ...]) -> list[subprocess.Popen[bytes]]:
    """Compile in the background: processes that run one layer of each kind."""
    command = [sys.executable, "-m", "benchmarks.decode_step", "--warm"]
    return [
        subprocess.Popen([*command, kind, "--requests", str(count)], stdout=subprocess.DEVNULL)
        for kind in KINDS
        for count in requests
    ]


def run_one_layer(kind: str, count: int) -> None:
    """Compile the kernels of one layer by running it once at every context."""
    generator = torch.Generator("cuda").manual_seed(5)
    weights = Weights.random(KINDS[kind], generator)
    for context in CONTEXTS:
        requests = Requests.staggered(count, context, generator)
        caches = Caches.random(weights, requests, generator)
        state = first_state(count, generator)
        for _, call in ours(weights, caches, requests, state):
            call()
    torch.cuda.synchronize()


def report_of(
    machine: timing.Machine, layers: int, rows: list[dict[str, Any]], found: list[dict[str, Any]]
) -> dict[str, Any]:
    """The report on the rows and errors measured so far."""
    return {
        "machine": dataclasses.asdict(machine),
        "command": "python -m benchmarks.decode_step " + " ".join(sys.argv[1:]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "layers": layers,
        "rows": rows,
        "errors": found,
        "assumptions": assumptions(machine),
        "predictions": [
            predict(row, machine.copy_bytes_per_second) for row in rows if row["way"] == "ours" and "by_category" in row
        ],
    }


def write(report: dict[str, Any], folder: Path) -> None:
    """decode_step.json, decode_step.md and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "decode_step.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    (folder / "decode_step.md").write_text(f"`{report['command']}`\n\n{table(report)}")
    plot(report, folder)


def main() -> None:
    parser = timing.arguments(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    parser.add_argument("--context", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--layers", type=int, default=LAYERS, help="only the first so many layers")
    parser.add_argument("--no-error", action="store_true", help="leave out the comparison with float64")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="also write a profiler trace of the step there")
    parser.add_argument("--warm", choices=KINDS, help="only compile the kernels of one kind of layer")
    options = parser.parse_args()
    if options.warm:
        for count in options.requests:
            run_one_layer(options.warm, count)
        return
    ways = tuple(way for way in WAYS if way in options.ways)
    if options.trace and len(options.requests) * len(options.context) * len(ways) > 1:
        parser.error("--trace goes with one of --requests, --context and --ways: it slows down what is timed after it")
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    workers = warm(tuple(options.requests)) if "ours" in ways else []
    stream = torch.cuda.Stream()
    model = Model(options.layers, ways)
    torch.cuda.synchronize()
    say(f"weights of {model.count} layers: {torch.cuda.memory_allocated() / 1e9:.1f} GB")
    for worker in workers:
        worker.wait()
    say("compiled")
    machine = timing.Machine.measure()
    say(f"copy {machine.copy_bytes_per_second / 1e12:.2f} TB/s")
    rows: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    report = report_of(machine, model.count, rows, found)
    for context in options.context:
        for count in options.requests:
            generator = torch.Generator("cuda").manual_seed(7)
            requests = Requests.staggered(count, context, generator)
            caches = [Caches.random(w, requests, generator) for w in model.weights]
            for way in ways:
                try:
                    step = Step(model, way, requests, caches)
                    row = measure(step, machine, stream, way == "ours" or (count, context) == ERROR_AT)
                except Exception as error:  # one way may fail; the others must still come out
                    say(f"{way}, {count} x {context}: {type(error).__name__}: {str(error)[:500]}")
                    continue
                rows.append(row)
                say(f"{way}, {count} x {context}: {row['microseconds'] / 1e3:.2f} ms, ratio {row['ratio']:.2f}")
                if options.trace:
                    say(f"wrote {record_trace(step, stream, options.trace)}")
            if (count, context) == ERROR_AT and not options.no_error:
                for way in ways:
                    try:
                        found += errors(model, way, requests, caches)
                    except Exception as error:
                        say(f"error: {type(error).__name__}: {str(error)[:500]}")
            del caches
            torch.cuda.empty_cache()
            # A long run that is cut short leaves what it has.
            report = report_of(machine, model.count, rows, found)
            if options.out:
                write(report, options.out)
    data = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    sys.stdout.write(data if options.json else table(report))


if __name__ == "__main__":
    main()
