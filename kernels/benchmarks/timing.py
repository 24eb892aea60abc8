"""How every benchmark here measures, counts and reports.

A time is the median of several replays of one CUDA graph that holds many calls, divided by the calls. The calls
rotate over several input sets, so that a small problem is not timed from one warm set alone; what still fits in the
L2 cache is read from it, as in a real step. One call a graph would add about 10 µs of replay overhead to each figure.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

INPUT_SETS = 3
REPLAYS = 12
MIN_CALLS, MAX_CALLS = 6, 100
GRAPH_MICROSECONDS = 2000.0

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Timing:
    """Time of one call, microseconds: the median of the replays, and the fastest and slowest of them."""

    microseconds: float
    fastest: float
    slowest: float
    calls: int


def _capture(calls: Sequence[Call], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    return graph


_awake_until = 0.0


def _wake() -> None:
    """Keep an idle GPU lightly busy until its clocks are up; heavy matrix work would bring them down again."""
    global _awake_until
    if time.monotonic() > _awake_until:
        values = torch.zeros(2**22, device="cuda")
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            for _ in range(100):
                values.add_(1.0)
            torch.cuda.synchronize()
    _awake_until = time.monotonic() + 0.3


def _replay(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Microseconds of each replay."""
    times: list[float] = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return times


def calls_per_graph(microseconds: float, input_sets: int) -> int:
    """Calls to capture for a call of about `microseconds`: 6 to 100, a whole number of turns over the input sets."""
    wanted = min(MAX_CALLS, max(MIN_CALLS, round(GRAPH_MICROSECONDS / max(microseconds, 1e-3))))
    return max(1, wanted // input_sets) * input_sets


def time_calls(calls: Sequence[Call], replays: int = REPLAYS) -> Timing:
    """Time one call of a capturable function.

    Args:
        calls: the same call on different input sets; every one must be safe to capture in a CUDA graph.
        replays: timed replays of the graph.

    Raises:
        ValueError: no call given.
    """
    if not calls:
        raise ValueError("time_calls needs at least one call")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            for _ in range(2):
                call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    _wake()

    probe = _capture(calls, 2 * len(calls))
    probe.replay()
    estimate = min(_replay(probe, 3)) / (2 * len(calls))
    count = calls_per_graph(estimate, len(calls))
    graph = _capture(calls, count)
    graph.replay()
    times = [t / count for t in _replay(graph, replays)]
    return Timing(statistics.median(times), min(times), max(times), count)


# CUgraphNodeType of the CUDA driver API: kernel, memcpy, memset.
_LAUNCHES = (0, 1, 2)


def count_launches(call: Call, stream: torch.cuda.Stream | None = None) -> int:
    """Kernels, copies and memsets that one call puts on the GPU: the nodes of its CUDA graph.

    Not counted by torch's profiler: once that has run, kernels of the process take longer (on an H200 a decode step
    7.1 ms instead of 6.7, mHC's two launches 6.3 µs instead of 5.4), as dependent launches no longer overlap.

    Args:
        call: safe to capture.
        stream: to run it on first and capture it on.

    Raises:
        OSError: no CUDA driver.
        RuntimeError: the driver refuses to list the nodes.
    """
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph, stream=stream):
        call()
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count, kind = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t(), ctypes.c_int()
    failed = driver.cuGraphGetNodes(handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    failed = failed or driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count))
    launches = 0
    for node in nodes:
        failed = failed or driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind))
        launches += kind.value in _LAUNCHES
    if failed:
        raise RuntimeError(f"the CUDA driver does not list the graph's nodes: error {failed}")
    return launches


def copy_bandwidth(gibibytes: float = 1.0) -> float:
    """Bytes a second of a large elementwise kernel, read and written bytes both counted.

    Not `copy_`: in a graph that is a memcpy node, which reached two thirds of this on an H200.
    """
    elements = int(gibibytes * 2**30) // 4
    pairs = [(torch.randn(elements, device="cuda"), torch.empty(elements, device="cuda")) for _ in range(2)]
    timing = time_calls([lambda s=s, d=d: torch.neg(s, out=d) for s, d in pairs])
    return 2 * 4 * elements / (timing.microseconds * 1e-6)


def matmul_rate(dtype: torch.dtype, size: int = 8192) -> float | None:
    """FLOP a second of a large square product of random values, or None where torch has none for `dtype`.

    Args:
        dtype: torch.bfloat16, or torch.float8_e4m3fn (per-tensor scales, bf16 out).
        size: rows, columns and depth.
    """
    a = torch.randn(size, size, device="cuda").to(dtype)
    b = torch.randn(size, size, device="cuda").to(dtype)
    try:
        if dtype == torch.float8_e4m3fn:
            one = torch.ones((), device="cuda")
            timing = time_calls([lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)])
        else:
            timing = time_calls([lambda: a @ b.t()])
    except (RuntimeError, NotImplementedError):
        return None
    return 2.0 * size**3 / (timing.microseconds * 1e-6)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The GPU of a run and its two ceilings, measured in that run."""

    gpu: str
    sms: int
    torch: str
    triton: str
    date: str
    copy_bytes_per_second: float
    flop_per_second: dict[str, float]

    @staticmethod
    def measure() -> Machine:
        """Read the versions and measure copy bandwidth and matrix rates on the current GPU."""
        import triton

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        rates = {"bf16": matmul_rate(torch.bfloat16), "fp8": matmul_rate(torch.float8_e4m3fn)}
        return Machine(
            gpu=properties.name,
            sms=properties.multi_processor_count,
            torch=torch.__version__,
            triton=triton.__version__,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            copy_bytes_per_second=copy_bandwidth(),
            flop_per_second={name: rate for name, rate in rates.items() if rate is not None},
        )

    def roofline_microseconds(self, bytes_moved: float, flops: float = 0.0, dtype: str = "bf16") -> float:
        """The larger of bytes over copy bandwidth and FLOPs over the matrix rate of `dtype`."""
        by_bytes = bytes_moved / self.copy_bytes_per_second
        by_flops = flops / self.flop_per_second[dtype] if dtype in self.flop_per_second else 0.0
        return max(by_bytes, by_flops) * 1e6


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table: an implementation at a shape.

    Attributes:
        op: the op's name.
        shape: what varies, for example {"B": 16, "L": 4096}.
        implementation: "ours", or the name of the peer.
        timing: None where the implementation does not run; `note` then says why.
        bytes: fewest bytes the op must move at this shape.
        flops: multiplications and additions it must do.
        dtype: whose matrix rate bounds the FLOPs.
        launches: kernels, copies and memsets a call.
    """

    op: str
    shape: dict[str, Any]
    implementation: str
    timing: Timing | None
    bytes: float
    flops: float = 0.0
    dtype: str = "bf16"
    launches: int | None = None
    note: str = ""


def measure(
    op: str,
    shape: dict[str, Any],
    implementation: str,
    calls: Sequence[Call],
    *,
    bytes: float,
    flops: float = 0.0,
    dtype: str = "bf16",
    note: str = "",
) -> Row:
    """Time the calls and count one call's launches; a call that fails gives a row that says why."""
    try:
        timing = time_calls(calls)
        launches = count_launches(calls[0])
    except Exception as error:  # a peer may fail in any way; the table must still come out
        torch.cuda.synchronize()
        return Row(op, shape, implementation, None, bytes, flops, dtype, None, f"{type(error).__name__}: {error}"[:200])
    return Row(op, shape, implementation, timing, bytes, flops, dtype, launches, note)


@dataclasses.dataclass(frozen=True)
class Report:
    """A run: the machine, the command and its rows."""

    machine: Machine
    command: str
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        """Plain data, with the roofline and the ratio to it worked out for each row."""
        rows = []
        for row in self.rows:
            roofline = self.machine.roofline_microseconds(row.bytes, row.flops, row.dtype)
            ratio = row.timing.microseconds / roofline if row.timing and roofline else None
            rows.append(dataclasses.asdict(row) | {"roofline_microseconds": roofline, "ratio_to_roofline": ratio})
        return {"machine": dataclasses.asdict(self.machine), "command": self.command, "rows": rows}

    def table(self) -> str:
        """The report as a Markdown table under a line that names the machine."""
        m = self.machine
        rates = ", ".join(f"{name} {rate / 1e12:.0f} TFLOP/s" for name, rate in m.flop_per_second.items())
        head = (
            f"{m.gpu}, {m.sms} SMs, torch {m.torch}, Triton {m.triton}, {m.date}; "
            f"copy {m.copy_bytes_per_second / 1e12:.2f} TB/s; {rates}\n\n"
        )
        columns = [
            "op",
            "shape",
            "implementation",
            "µs",
            "launches",
            "MB",
            "GFLOP",
            "roofline µs",
            "time / roofline",
            "note",
        ]
        body = []
        for row in self.as_json()["rows"]:
            timing = row["timing"]
            body.append(
                [
                    row["op"],
                    " ".join(f"{k}={v}" for k, v in row["shape"].items()),
                    row["implementation"],
                    f"{timing['microseconds']:.2f}" if timing else "-",
                    "-" if row["launches"] is None else str(row["launches"]),
                    f"{row['bytes'] / 1e6:.2f}",
                    f"{row['flops'] / 1e9:.2f}",
                    f"{row['roofline_microseconds']:.2f}",
                    f"{row['ratio_to_roofline']:.2f}" if row["ratio_to_roofline"] else "-",
                    row["note"],
                ]
            )
        return head + markdown_table(columns, body)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table with padded cells, one line a row."""
    cells = [list(columns), *[[cell.replace("|", "/") for cell in row] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines) + "\n"


def plot_times(report: Report, op: str, x: str, path: Path, **fixed: Any) -> None:
    """Plot microseconds against one shape parameter, one line an implementation, and the roofline.

    Args:
        report: where the rows come from.
        op: which op's rows.
        x: the shape's key on the horizontal axis (base-2 logarithmic).
        path: the SVG or PNG to write.
        fixed: shape keys held at one value.
    """
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text as text: a quarter of the size
    from matplotlib import pyplot

    lines: dict[str, list[tuple[float, float]]] = {}
    for row in report.rows:
        if row.op != op or any(row.shape.get(k) != v for k, v in fixed.items()):
            continue
        if not isinstance(row.shape.get(x), int):
            continue
        if row.timing is None or set(row.shape) != {x, *fixed}:
            continue
        lines.setdefault(row.implementation, []).append((row.shape[x], row.timing.microseconds))
        roofline = report.machine.roofline_microseconds(row.bytes, row.flops, row.dtype)
        lines.setdefault("roofline", []).append((row.shape[x], roofline))
    if not lines:
        return
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for name, points in lines.items():
        xs, ys = zip(*sorted(set(points)), strict=True)
        axes.plot(
            xs, ys, "--" if name == "roofline" else "o-", label=name, color="grey" if name == "roofline" else None
        )
    axes.set(xscale="log", yscale="log", xlabel=x, ylabel="µs a call", title=_title(op, fixed, report.machine))
    axes.set_xscale("log", base=2)
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _title(op: str, fixed: dict[str, Any], machine: Machine) -> str:
    return ", ".join([op, *[f"{k}={v}" for k, v in fixed.items()], machine.gpu, machine.date])


def arguments(description: str) -> argparse.ArgumentParser:
    """The options every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of a table")
    parser.add_argument("--out", type=Path, help="also write report JSON, table and plots into this folder")
    return parser


def publish(
    report: Report, name: str, options: argparse.Namespace, plots: Callable[[Path], None] | None = None
) -> None:
    """Print the report and, with --out, write NAME.json, NAME.md and the plots."""
    data = json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n"
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{name}.json").write_text(data)
        (options.out / f"{name}.md").write_text(f"`{report.command}`\n\n{report.table()}")
        if plots:
            plots(options.out)
    sys.stdout.write(data if options.json else report.table())
