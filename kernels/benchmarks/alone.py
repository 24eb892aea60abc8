"""Times one op at the shapes of a decode step, ours against the function of SGLang that it replaces.

    python -m benchmarks.alone indexer_logits --requests 16 --context 8192 --ranks 4

Prints JSON: for each shape the microseconds of both, or why SGLang's does not run alone. `deploy tune` runs it in the
engine's image, on the engine's GPU, before it tries the op in the engine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sm120_kernels import shapes
from sm120_kernels.ops.sparse_mla_decode import sparse_mla_decode
from sm120_kernels.ops.topk_indices import PAGE_TOKENS

from benchmarks import fp8_block_linear as linear
from benchmarks import indexer_logits as logits
from benchmarks import sparse_mla_decode as attention
from benchmarks import timing
from benchmarks import topk_indices as topk

REPLAYS = 6
Maker = Callable[[dict[str, Any]], timing.Call]
Cases = Iterator[tuple[dict[str, Any], list[dict[str, Any]], Maker, Maker]]
"""Shape, input sets, ours, upstream's."""


def attention_cases(requests: int, context: int, ranks: int) -> Cases:
    """The C4 layers' attention: a window and at most 512 compressed tokens a request."""
    heads, width = shapes.HEADS // ranks, min(attention.TOPK, max(1, context // 4))
    sets = [attention.inputs(requests, heads, extra_width=width, seed=s) for s in range(timing.INPUT_SETS)]
    yield (
        {"requests": requests, "heads": heads, "compressed": width},
        sets,
        lambda call: lambda: sparse_mla_decode(**call),
        attention.upstream_triton,
    )


def logits_cases(requests: int, context: int, ranks: int) -> Cases:
    """Every rank scores all heads of the indexer."""
    lengths = [max(1, context // 4)] * requests
    sets = [logits.inputs(requests, 1, lengths, s) for s in range(timing.INPUT_SETS)]
    yield {"requests": requests, "keys": lengths[0]}, sets, logits.ours, logits.torch_fallback


def topk_cases(requests: int, context: int, ranks: int) -> Cases:
    length = max(1, context // 4)
    sets = [topk.inputs(requests, length, length, s) for s in range(timing.INPUT_SETS)]

    def upstream(call: dict[str, Any]) -> timing.Call:
        from sglang.kernels.ops.attention.dsv4.topk import topk_transform_paged

        scores, lengths, table, out = (call[name] for name in ("scores", "lengths", "page_table", "out"))
        return lambda: topk_transform_paged(scores, lengths, table, out, PAGE_TOKENS)

    yield {"requests": requests, "scores": length}, sets, topk.ours, upstream


def linear_cases(requests: int, context: int, ranks: int) -> Cases:
    """The FP8 linears of a rank of four; of other numbers of ranks they are other shapes, but much alike."""

    def upstream(call: dict[str, Any]) -> timing.Call:
        from sglang.srt.layers.quantization.fp8_utils import cutlass_w8a8_block_fp8_linear_with_fallback

        block = [shapes.SCALE_BLOCK] * 2
        return lambda: cutlass_w8a8_block_fp8_linear_with_fallback(
            call["x"], call["weight"], block, call["weight_scale"]
        )

    for columns, depth in linear.SHAPES:
        sets = [linear.inputs(requests, columns, depth, s) for s in range(timing.INPUT_SETS)]
        yield {"requests": requests, "columns": columns, "depth": depth}, sets, linear.ours, upstream


CASES: dict[str, Callable[[int, int, int], Cases]] = {
    "sparse_mla_decode": attention_cases,
    "indexer_logits": logits_cases,
    "topk_indices": topk_cases,
    "fp8_block_linear": linear_cases,
}
"""The ops whose upstream function can be called without an engine around it."""


def compare(op: str, requests: int, context: int, ranks: int) -> list[dict[str, Any]]:
    """Time both at each shape; a function that fails is None with the reason."""
    found: list[dict[str, Any]] = []
    for shape, sets, ours, upstream in CASES[op](requests, context, ranks):
        row: dict[str, Any] = {"shape": shape, "ours": None, "upstream": None, "note": ""}
        for name, make in (("ours", ours), ("upstream", upstream)):
            try:
                row[name] = timing.time_calls([make(call) for call in sets], REPLAYS).microseconds
            except Exception as error:  # either may fail in any way; the engine's own trial is still to come
                row["note"] = f"{name}: {type(error).__name__}: {error}"[:300]
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.op in CASES:
        rows = compare(options.op, options.requests, options.context, options.ranks)
    gpu = torch.cuda.get_device_properties(0).name
    json.dump({"op": options.op, "gpu": gpu, "rows": rows}, sys.stdout)


if __name__ == "__main__":
    main()
