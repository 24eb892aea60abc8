"""Reads a profiler trace (Chrome's format, as torch writes it) front to back, keeping only numbers and names.

Events stream through ijson, so that memory holds a few numbers of each kernel or operator and never the text.
"""

import gzip
import json
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import ijson  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import numpy.typing as npt

from deploy.errors import WrongInput
from loadtest.plain import mapping

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
HEADER_BYTES = 1 << 18
PROGRESS_EVENTS = 20000
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
SPAN_CATEGORIES = ("user_annotation", "gpu_user_annotation")
LAUNCH = re.compile(r"^(cuda|cu|hip)(GraphLaunch|Launch\w*Kernel\w*|Memcpy\w*Async|Memset\w*Async)")


class UnreadableTrace(WrongInput):
    """The file is no trace, or ends in the middle."""


@dataclass(frozen=True)
class Span:
    """A named range. Times in seconds since the trace's first event; `thread` is the host's, 0 on the GPU."""

    name: str
    begin: float
    end: float
    on_gpu: bool
    thread: int


@dataclass(frozen=True)
class Events:
    """Events of one kind, ordered by their begin: one entry each in all arrays.

    Attributes:
        begin, end: seconds since the trace's first event.
        name: index into the trace's names.
        lane: stream of a kernel, thread of an operator.
        blocks: of a kernel's grid, 0 where it has none.
        occupancy: of a kernel's multiprocessors as the profiler estimates it, percent; -1 where it says nothing.
    """

    begin: Floats
    end: Floats
    name: Integers
    lane: Integers
    blocks: Integers
    occupancy: Floats

    def __len__(self) -> int:
        return len(self.begin)

    def where(self, mask: npt.NDArray[np.bool_]) -> "Events":
        """Those that `mask` chooses."""
        kept = (getattr(self, name)[mask] for name in ("begin", "end", "name", "lane", "blocks", "occupancy"))
        return Events(*kept)


@dataclass(frozen=True)
class Trace:
    """What a trace says.

    Attributes:
        gpu_name, multiprocessors: of the device whose kernels these are; empty and 0 without one.
        kernels: of that device, copies and fills of memory too.
        operators: of the host.
        spans: named ranges.
        graph_launches: when the host launched a CUDA graph.
        host_launches: launches by the host: kernels one by one, graphs, copies.
        events: how many the file has.
    """

    file: str
    gpu_name: str
    multiprocessors: int
    names: list[str]
    kernels: Events
    operators: Events
    spans: list[Span]
    graph_launches: Floats
    host_launches: int
    events: int


@dataclass
class _Column:
    """Events of one kind while they are read."""

    begin: "array[float]" = field(default_factory=lambda: array("d"))
    duration: "array[float]" = field(default_factory=lambda: array("d"))
    name: "array[int]" = field(default_factory=lambda: array("q"))
    lane: "array[int]" = field(default_factory=lambda: array("q"))
    device: "array[int]" = field(default_factory=lambda: array("q"))
    blocks: "array[int]" = field(default_factory=lambda: array("q"))
    occupancy: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, begin: float, duration: float, name: int, lane: int) -> None:
        self.begin.append(begin)
        self.duration.append(duration)
        self.name.append(name)
        self.lane.append(lane)

    def events(self, origin: float) -> Events:
        begin = (np.asarray(self.begin, dtype=np.float64) - origin) * 1e-6
        end = begin + np.asarray(self.duration, dtype=np.float64) * 1e-6
        count = len(begin)
        # What contains another comes before it.
        order = np.lexsort((-end, begin))
        blocks = np.asarray(self.blocks, dtype=np.int64) if self.blocks else np.zeros(count, dtype=np.int64)
        occupancy = np.asarray(self.occupancy, dtype=np.float64) if self.occupancy else np.full(count, -1.0)
        return Events(
            begin[order],
            end[order],
            np.asarray(self.name, dtype=np.int64)[order],
            np.asarray(self.lane, dtype=np.int64)[order],
            blocks[order],
            occupancy[order],
        )


def read(path: Path, progress: Callable[[int, int], None] | None = None) -> Trace:
    """Read a trace, compressed or not.

    Args:
        progress: called now and then with the bytes of the file that are read, and all of them.

    Raises:
        UnreadableTrace: no JSON, cut off, or without events.
    """
    fix = "name a file that torch's profiler or SGLang's /start_profile wrote"
    try:
        size = path.stat().st_size
        with path.open("rb") as raw:
            compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if compressed else raw
            device = _device(stream.read(HEADER_BYTES))
            stream.seek(0)
            tell = (lambda: progress(raw.tell(), size)) if progress else None
            return _collect(path.name, ijson.items(stream, "traceEvents.item", use_float=True), device, tell)
    except OSError as error:
        if isinstance(error, gzip.BadGzipFile):
            raise UnreadableTrace(f"{path} is damaged", str(error), fix) from None
        raise UnreadableTrace(f"{path} cannot be read", error.strerror or str(error), fix) from None
    except (ijson.JSONError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnreadableTrace(f"{path} is not a whole trace", reason, fix) from None


def _device(header: bytes) -> tuple[str, int]:
    """Name and multiprocessors of the first GPU."""
    text = header.decode("utf-8", "replace")
    if not (found := re.search(r'"deviceProperties"\s*:\s*(?=\[)', text)):
        return "", 0
    try:
        devices, _ = json.JSONDecoder().raw_decode(text, found.end())
        return str(devices[0].get("name", "")), int(devices[0].get("numSms", 0))
    except (ValueError, IndexError, AttributeError, TypeError):
        return "", 0


def _collect(file: str, events: Iterator[Any], device: tuple[str, int], tell: Callable[[], None] | None) -> Trace:
    names: dict[str, int] = {}
    kernels, operators = _Column(), _Column()
    spans: list[tuple[str, float, float, bool, int]] = []
    graphs: array[float] = array("d")
    origin, launches, count = float("inf"), 0, 0
    for event in events:
        count += 1
        if tell and count % PROGRESS_EVENTS == 0:
            tell()
        one = mapping(event)
        kind = one.get("cat")
        if one.get("ph") != "X" or kind is None:
            continue
        try:
            name, begin, duration = str(one["name"]), float(one["ts"]), float(one.get("dur", 0.0))
        except (KeyError, TypeError, ValueError):
            continue
        if kind in GPU_CATEGORIES:
            arguments = mapping(one.get("args"))
            kernels.add(begin, duration, names.setdefault(name, len(names)), _whole(arguments.get("stream")))
            kernels.device.append(_whole(arguments.get("device")))
            kernels.blocks.append(_product(arguments.get("grid")))
            kernels.occupancy.append(_number(arguments.get("est. achieved occupancy %")))
        elif kind == "cpu_op":
            operators.add(begin, duration, names.setdefault(name, len(names)), _whole(one.get("tid")))
        elif kind in SPAN_CATEGORIES:
            spans.append((name, begin, begin + duration, kind != "user_annotation", _whole(one.get("tid"))))
        elif kind in ("cuda_runtime", "cuda_driver"):
            if LAUNCH.match(name):
                launches += 1
                if "GraphLaunch" in name:
                    graphs.append(begin)
            continue
        else:
            continue
        origin = min(origin, begin)
    if not count:
        raise UnreadableTrace(f"{file} has no events", "a trace has a list named traceEvents", "name another file")
    origin = 0.0 if origin == float("inf") else origin
    return Trace(
        file=file,
        gpu_name=device[0],
        multiprocessors=device[1],
        names=list(names),
        kernels=_one_device(kernels, origin),
        operators=operators.events(origin),
        spans=[
            Span(name, (begin - origin) * 1e-6, (end - origin) * 1e-6, on_gpu, 0 if on_gpu else thread)
            for name, begin, end, on_gpu, thread in sorted(spans, key=lambda span: span[1])
        ],
        graph_launches=np.sort((np.asarray(graphs, dtype=np.float64) - origin) * 1e-6),
        host_launches=launches,
        events=count,
    )


def _one_device(column: _Column, origin: float) -> Events:
    """The kernels of the device that has most of them: a rank has one."""
    if not len(column.begin):
        return column.events(origin)
    devices = np.asarray(column.device, dtype=np.int64)
    found = column.events(origin)
    begin = np.asarray(column.begin, dtype=np.float64)
    end = begin + np.asarray(column.duration, dtype=np.float64)
    order = np.lexsort((-end, begin))
    values, counts = np.unique(devices, return_counts=True)
    return found.where(devices[order] == values[counts.argmax()])


def _whole(value: object) -> int:
    return value if isinstance(value, int) and abs(value) < 1 << 62 else -1


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else -1.0


def _product(grid: object) -> int:
    """Blocks of a grid given as a list of three."""
    if not isinstance(grid, list):
        return 0
    blocks = 1
    for size in cast("list[object]", grid):
        blocks *= size if isinstance(size, int) else 1
    return blocks
