"""Times launch parameters of the indexer's ops side by side; its best ones are the constants in the ops.

    python -m benchmarks.tune indexer_logits
    python -m benchmarks.tune topk_indices

Prints, for each shape, the microseconds of every candidate, best first. A candidate replaces the op's `plan` (and, for
the logits, STAGES) for the time of the measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from sm120_kernels.ops import indexer_logits as logits
from sm120_kernels.ops import topk_indices as topk

from benchmarks import indexer_logits as logits_benchmark
from benchmarks import timing
from benchmarks import topk_indices as topk_benchmark

STAGES = (3, 5, 7)
PROGRAMS = (2, 3, 4, 5, 6)


@contextlib.contextmanager
def logits_candidate(rows: int, programs_per_sm: int, stages: int) -> Iterator[None]:
    """The logits op with these rows a unit, programs a multiprocessor and pipeline stages."""
    table = {torch.cuda.get_device_capability(): {rows: programs_per_sm}}
    with (
        mock.patch.object(logits, "PROGRAMS_PER_SM", table),
        mock.patch.object(logits, "MAX_ROWS", rows),
        mock.patch.object(logits, "STAGES", stages),
    ):
        yield


def tune_logits() -> None:
    for requests, rows, length in (
        (1, 1, 4096),
        (16, 1, 4096),
        (16, 1, 32768),
        (64, 1, 32768),
        (16, 4, 4096),
        (16, 4, 32768),
    ):
        sets = [
            logits_benchmark.inputs(requests, rows, [length] * requests * rows, s) for s in range(timing.INPUT_SETS)
        ]
        found: list[tuple[float, dict[str, int]]] = []
        for unit, programs, stages in itertools.product((1, 2, 4), PROGRAMS, STAGES):
            if unit > rows:
                continue
            with logits_candidate(unit, programs, stages):
                microseconds = timing.time_calls([logits_benchmark.ours(s) for s in sets], replays=6).microseconds
            found.append((microseconds, {"rows": unit, "programs_per_sm": programs, "stages": stages}))
        show({"requests": requests, "rows": rows, "length": length}, found)


def topk_candidates(width: int) -> Iterator[topk.Plan]:
    """Plans whose programs hold 8 to 32 keys a thread, and whose groups are enough to bound the answer."""
    for block in (1024, 2048, 4096, 8192, 16384):
        chunks = max(1, 2 ** (-(-width // block) - 1).bit_length())
        if block >= 2 * width or chunks > 16:
            continue
        for warps in (4, 8, 16, 32):
            chosen = topk.Plan(block, chunks, warps, 0 if chunks == 1 else 16)
            if 8 <= block // (32 * warps) <= 32 and chosen.groups * chunks >= 2 * topk.TOPK:
                yield chosen


def tune_topk() -> None:
    for rows, width in (
        (1, 2048),
        (16, 2048),
        (1, 8192),
        (16, 8192),
        (64, 8192),
        (16, 32768),
        (1, 262144),
        (16, 262144),
    ):
        sets = [topk_benchmark.inputs(rows, width, width, s) for s in range(timing.INPUT_SETS)]
        found: list[tuple[float, dict[str, int]]] = []
        for chosen in topk_candidates(width):
            with mock.patch.object(topk, "plan", lambda width, chosen=chosen: chosen):
                microseconds = timing.time_calls([topk_benchmark.ours(s) for s in sets], replays=6).microseconds
            found.append((microseconds, dataclasses.asdict(chosen)))
        show({"rows": rows, "width": width}, found)


def show(shape: dict[str, int], found: list[tuple[float, dict[str, Any]]]) -> None:
    print(shape)
    for microseconds, candidate in sorted(found, key=lambda entry: entry[0]):
        print(f"  {microseconds:8.2f} µs  {candidate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=("indexer_logits", "topk_indices"))
    {"indexer_logits": tune_logits, "topk_indices": tune_topk}[parser.parse_args().op]()


if __name__ == "__main__":
    main()
