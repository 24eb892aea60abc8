"""Writes traces as torch's profiler does, from a few numbers."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = tuple[str, float, float]
"""Name, begin and duration in microseconds."""


def kernel(name: str, begin: float, duration: float, *, stream: int = 7, grid: int = 300, device: int = 0) -> Any:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": device,
        "tid": stream,
        "ts": begin,
        "dur": duration,
        "args": {
            "device": device,
            "stream": stream,
            "grid": [grid, 1, 1],
            "block": [128, 1, 1],
            "est. achieved occupancy %": 40,
        },
    }


def operator(name: str, begin: float, duration: float, thread: int = 1) -> Any:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": begin,
        "dur": duration,
        "args": {"Input Dims": [[1, 2], []], "Concrete Inputs": ["", "},\n  {"]},
    }


def span(name: str, begin: float, duration: float, *, gpu: bool = False, thread: int = 1) -> Any:
    category = "gpu_user_annotation" if gpu else "user_annotation"
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": begin, "dur": duration}


def launch(begin: float, name: str = "cudaGraphLaunch") -> Any:
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": 1.0}


def write(path: Path, events: Sequence[Any], multiprocessors: int = 188) -> Path:
    """The events as a trace; compressed if the name says so."""
    device = {"id": 0, "name": "NVIDIA RTX PRO 6000 Blackwell Server Edition", "numSms": multiprocessors}
    others = [{"ph": "M", "name": "process_name", "ts": 0.0, "pid": 1, "args": {"name": "python"}}]
    trace = {"schemaVersion": 1, "deviceProperties": [device], "traceEvents": [*others, *events], "traceName": "t"}
    data = json.dumps(trace, indent=1).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
