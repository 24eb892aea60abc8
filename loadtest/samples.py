"""What the generator records: one sample a request, one tick a worker and interval. JSON lines on disk.

Times are seconds. `start` is wall clock (Unix epoch) taken from a monotonic clock with one fixed offset a process, so
that differences are exact and files of several workers can be laid over each other; all other times of a sample are
relative to its `start`. docs/metrics.md owns the definitions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

ErrorKind = Literal[
    "connect",  # refused, unreachable, name not found
    "tls",
    "timeout",  # connect, first byte, silence between bytes, or the whole request
    "http",  # status other than 200
    "cut",  # the connection ended before the response did
    "protocol",  # not HTTP, not SSE, not JSON
    "server",  # an error event in the stream, or an abort
    "no_usage",  # the stream ended without token counts
    "cancelled",  # we ended it: the run was over
]


@dataclass(slots=True)
class Sample:
    """One request."""

    index: int
    worker: str
    start: float
    end: float
    asked_input: int | None = None
    asked_output: int | None = None
    headers: float | None = None
    first_token: float | None = None
    first_content: float | None = None
    times: list[float] = field(default_factory=list[float])
    counts: list[int | None] = field(default_factory=list["int | None"])
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    finish: str | None = None
    error: ErrorKind | None = None
    status: int | None = None
    detail: str | None = None
    scheduled: float | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def finished(self) -> float:
        """Wall-clock end."""
        return self.start + self.end


@dataclass(slots=True)
class Tick:
    """One worker's state at time `at`; counters are cumulative, the rest is since the last tick.

    `lag` is the longest delay of a 10 ms timer and `late` the longest that bytes waited to be read (seconds); `cpu` is
    the share of one core it used; `backlog` counts open-loop requests that are due but not sent.
    """

    at: float
    worker: str
    users: int
    in_flight: int
    arrivals: int
    started: int
    finished: int
    failed: int
    lag: float
    late: float
    cpu: float
    backlog: int = 0


def to_line(record: Sample | Tick) -> str:
    """One JSON line; fields without a value are left out. Token times become whole microseconds (small and quick)."""
    values: dict[str, Any] = {"kind": "sample" if isinstance(record, Sample) else "tick"}
    for name in record.__slots__:
        value: Any = getattr(record, name)
        if value is None:
            continue
        if name == "times":
            values["times_us"] = [int(t * 1e6 + 0.5) for t in value]
        elif name == "counts":
            if value and value[-1] is not None:
                values[name] = value
        else:
            values[name] = round(value, 6) if isinstance(value, float) else value
    return json.dumps(values, separators=(",", ":"))


def from_line(line: str) -> Sample | Tick:
    """Inverse of `to_line`, to the microsecond. Raises ValueError when the line is not one of ours."""
    try:
        loaded: Any = json.loads(line)
        values = cast("dict[str, Any]", loaded)
        kind = values.pop("kind")
        if kind == "tick":
            return Tick(**values)
        if kind == "sample":
            values["times"] = [t / 1e6 for t in values.pop("times_us", ())]
            values.setdefault("counts", [None] * len(values["times"]))
            return Sample(**values)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a sample: {line[:120]!r} ({error})") from error
    raise ValueError(f"unknown kind {kind!r}")


def read_lines(lines: Iterable[str]) -> Iterator[Sample | Tick]:
    """Parses lines; an unfinished last line (a generator that was killed) is dropped."""
    pending: str | None = None
    for line in lines:
        if pending is not None:
            yield from_line(pending)
        pending = line
    if pending is not None and pending.endswith("\n"):
        yield from_line(pending)


def read_file(path: Path) -> tuple[list[Sample], list[Tick]]:
    """Reads a samples file. Raises OSError, or ValueError naming the file."""
    samples: list[Sample] = []
    ticks: list[Tick] = []
    with path.open(encoding="utf-8") as lines:
        try:
            for record in read_lines(lines):
                if isinstance(record, Sample):
                    samples.append(record)
                else:
                    ticks.append(record)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    return samples, ticks
