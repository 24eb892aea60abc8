"""Times launch parameters of an op side by side; its best ones are the constants in the op.

    python -m benchmarks.tune indexer_logits
    python -m benchmarks.tune topk_indices
    python -m benchmarks.tune fp8_block_linear       # and inv_rope_wo_a
    python -m benchmarks.tune moe_fp4_small_batch

Prints, for each shape, the microseconds of every candidate, best first. A candidate replaces the op's `plan` (and, for
the logits, STAGES) for the time of the measurement.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import triton
from sm120_kernels.ops import fp8_block_linear as linear
from sm120_kernels.ops import indexer_logits as logits
from sm120_kernels.ops import moe_fp4_small_batch as moe
from sm120_kernels.ops import topk_indices as topk
from sm120_kernels.ops.inv_rope_wo_a import inv_rope_wo_a

from benchmarks import fp8_block_linear as linear_benchmark
from benchmarks import indexer_logits as logits_benchmark
from benchmarks import moe_fp4_small_batch as moe_benchmark
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


def linear_candidates(tokens: int, rows: int, depth: int, unit: int) -> Iterator[linear.Plan]:
    """Plans of 44 to 1100 programs whose shares have whole units of blocks, eight blocks at most."""
    blocks = depth // linear.BLOCK
    for block, share in itertools.product((64, 128), (1, 2, 4, 8)):
        if blocks % share == 0 and share % unit == 0 and 44 <= rows // block * (blocks // share) <= 1100:
            for padded in (16, 32) if tokens > 16 else (16,):
                yield linear.Plan(block, blocks // share, padded)


def tune_linear() -> None:
    for tokens in (1, 16, 64):
        for columns, depth in linear_benchmark.SHAPES:
            sets = [linear_benchmark.inputs(tokens, columns, depth, s) for s in range(timing.INPUT_SETS)]
            calls = [lambda chosen, s=s: linear.fp8_block_linear(**s, chosen=chosen) for s in sets]
            compare(
                {"tokens": tokens, "columns": columns, "depth": depth},
                calls,
                linear_candidates(tokens, columns, depth, 1),
            )
        sets = [linear_benchmark.wo_a_inputs(tokens, s) for s in range(timing.INPUT_SETS)]
        calls = [lambda chosen, s=s: inv_rope_wo_a(**s, chosen=chosen) for s in sets]
        compare({"wo_a, tokens": tokens}, calls, linear_candidates(tokens, 2048, 4096, 4))


def moe_candidates(tokens: int) -> Iterator[moe.Plan]:
    """The plan with one of its two products cut otherwise."""
    base = moe.plan(tokens, moe_benchmark.HIDDEN, moe_benchmark.INTERMEDIATE)
    # Of integers a warp has 32 rows, and a turn's columns are given.
    cuts = ((64, 2),) if base.integers else ((32, 1), (32, 2), (64, 1), (64, 2))
    for (rows, warps), stages, registers in itertools.product(cuts, (2, 3), (None, 112, 128)):
        yield dataclasses.replace(base, gate_up=moe.Cut(rows, warps, stages=stages, registers=registers))
    if base.integers:
        cuts, turns = ((32, 1), (64, 2)), ((2, 2), (2, 3), (2, 4))
    else:
        turns = ((2, 2), (2, 3), (4, 2))
    for (rows, warps), blocks, (parts, stages) in itertools.product(cuts, (1, 2, 4, 8), turns):
        yield dataclasses.replace(base, down=moe.Cut(rows, warps, blocks, parts=parts, stages=stages))
    for rows in (32, 64):
        yield dataclasses.replace(base, shared_rows=rows)


def tune_moe() -> None:
    layers = [moe_benchmark.weights("MXFP4", seed) for seed in range(timing.INPUT_SETS)]
    for tokens in (1, 16, 64):
        sets = [layer | moe_benchmark.tokens_of(tokens, seed) for seed, layer in enumerate(layers)]
        calls = [lambda chosen, s=s: moe.moe_fp4_small_batch(**s, chosen=chosen) for s in sets]
        compare({"tokens": tokens}, calls, moe_candidates(tokens))


def compare(shape: dict[str, int], calls: list[Callable[[Any], object]], candidates: Iterator[Any]) -> None:
    """Time each candidate that the GPU has room for, and print them."""
    found: list[tuple[float, dict[str, Any]]] = []
    for chosen in candidates:
        with contextlib.suppress(triton.OutOfResources):
            timed = timing.time_calls([lambda c=c, chosen=chosen: c(chosen) for c in calls], replays=6)
            found.append((timed.microseconds, dataclasses.asdict(chosen)))
    show(shape, found)


def show(shape: dict[str, int], found: list[tuple[float, dict[str, Any]]]) -> None:
    print(shape)
    for microseconds, candidate in sorted(found, key=lambda entry: entry[0]):
        print(f"  {microseconds:8.2f} µs  {candidate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tuners = {
        "indexer_logits": tune_logits,
        "topk_indices": tune_topk,
        "fp8_block_linear": tune_linear,
        "moe_fp4_small_batch": tune_moe,
    }
    parser.add_argument("op", choices=tuners)
    tuners[parser.parse_args().op]()


if __name__ == "__main__":
    main()
