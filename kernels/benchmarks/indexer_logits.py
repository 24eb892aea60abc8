"""Times indexer logits against SGLang's torch fallback and DeepGEMM.

    python -m benchmarks.indexer_logits --out results

Peers that are not installed are left out: DeepGEMM is the package `sgl-deep-gemm`; SGLang's functions come from the
installed package or from the unpacked wheel that SGLANG_SOURCE names. DeepGEMM's schedule is computed before and not
timed, although a real step pays for it once; ours is computed inside the timed kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sm120_kernels.ops.indexer_logits import HEAD_DIM, HEADS, PAGE_TOKENS, indexer_logits
from sm120_kernels.reference.indexer_logits import random_cache

from benchmarks import timing, upstream

GRID = [(batch, length) for batch in (1, 16, 64) for length in (4096, 32768)]
LENGTHS = (256, 1024, 4096, 16384, 32768, 65536, 262144)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
MIXED = (32768, *[256] * 15)


def inputs(requests: int, rows: int, lengths: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """Random arguments of `ops.indexer_logits` on the GPU; every request has pages of its own, in random order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    device = generator.device
    pages_of = [-(-max(lengths[i * rows : (i + 1) * rows]) // PAGE_TOKENS) for i in range(requests)]
    pages, columns = sum(pages_of), max(pages_of)
    order = torch.randperm(pages, generator=generator, device=device).to(torch.int32)
    table = torch.zeros(requests, columns, dtype=torch.int32, device=device)
    at = 0
    for request, count in enumerate(pages_of):
        table[request, :count] = order[at : at + count]
        at += count
    q = torch.randn(requests, rows, HEADS, HEAD_DIM, generator=generator, device=device)
    return {
        "q": q.to(torch.float8_e4m3fn),
        "cache": random_cache(pages, generator),
        "weights": torch.randn(requests * rows, HEADS, generator=generator, device=device),
        "lengths": torch.tensor(lengths, dtype=torch.int32, device=device),
        "page_table": table,
        "width": columns * PAGE_TOKENS,
    }


def ours(arguments: dict[str, Any]) -> Callable[[], object]:
    out = torch.empty(len(arguments["lengths"]), arguments["width"], device="cuda")
    return lambda: indexer_logits(**arguments, out=out)


def deep_gemm(arguments: dict[str, Any]) -> Callable[[], object]:
    import deep_gemm as library

    q, cache = arguments["q"], arguments["cache"]
    lengths = arguments["lengths"].view(q.shape[:2])
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    schedule = library.get_paged_mqa_logits_metadata(lengths, PAGE_TOKENS, sms)
    pages = cache.view(-1, PAGE_TOKENS, 1, HEAD_DIM + 4)
    weights, table, width = arguments["weights"], arguments["page_table"], arguments["width"]
    return lambda: library.fp8_paged_mqa_logits(q, pages, weights, lengths, table, schedule, width, False)


def torch_fallback(arguments: dict[str, Any]) -> Callable[[], object]:
    (function,) = upstream.load(
        "srt/layers/attention/dsv4/indexer.py", "fp8_paged_mqa_logits_torch_sm120", is_fp8_fnuz=lambda: False
    )
    pages = arguments["cache"].view(-1, PAGE_TOKENS, 1, HEAD_DIM + 4)
    q, weights, lengths = arguments["q"], arguments["weights"], arguments["lengths"]
    table, width = arguments["page_table"], arguments["width"]
    return lambda: function(q, pages, weights, lengths, table, None, width, False)


def row(
    name: str,
    make: Callable[[dict[str, Any]], Callable[[], object]],
    shape: dict[str, Any],
    requests: int,
    rows: int,
    lengths: Sequence[int],
) -> timing.Row:
    """Time one implementation; every input set is checked against ours before."""
    tokens = sum(max(lengths[i * rows : (i + 1) * rows]) for i in range(requests))
    scores = sum(lengths)
    counted = {
        "bytes": tokens * (HEAD_DIM + 4) + scores * 4 + requests * rows * HEADS * (HEAD_DIM + 4),
        "flops": 2.0 * scores * HEADS * HEAD_DIM,
        "dtype": "fp8",
    }
    try:
        sets = [inputs(requests, rows, lengths, seed) for seed in range(timing.INPUT_SETS)]
        calls = [make(arguments) for arguments in sets]
        note = "" if make is ours else difference(calls[0](), sets[0])
    except Exception as error:  # a peer may fail in any way; the table must still come out
        return timing.Row("indexer_logits", shape, name, None, note=f"{type(error).__name__}: {error}"[:200], **counted)
    return timing.measure("indexer_logits", shape, name, calls, note=note, **counted)


def difference(result: object, arguments: dict[str, Any]) -> str:
    """How far a peer's logits are from ours where both are defined: norm of the difference over norm of ours."""
    assert isinstance(result, torch.Tensor)
    mine = indexer_logits(**arguments)
    inside = torch.arange(mine.shape[1], device="cuda")[None, :] < arguments["lengths"][:, None]
    theirs = result[:, : mine.shape[1]].float()
    error = torch.where(inside, theirs - mine, 0).norm() / torch.where(inside, mine, 0).norm()
    return f"differs from ours by {float(error):.1e}"


def rows() -> list[timing.Row]:
    found: list[timing.Row] = []

    def add(shape: dict[str, Any], requests: int, rows: int, lengths: Sequence[int], *peers: str) -> None:
        makers = {"ours": ours, "DeepGEMM": deep_gemm, "SGLang torch": torch_fallback}
        for name in ("ours", *peers):
            found.append(row(name, makers[name], shape, requests, rows, lengths))
            print(found[-1].implementation, shape, found[-1].timing, found[-1].note, file=sys.stderr, flush=True)

    for batch in (1, 16, 64):
        for length in LENGTHS:
            peers = ("DeepGEMM", "SGLang torch") if (batch, length) in GRID else ("DeepGEMM",)
            add({"B": batch, "L": length}, batch, 1, [length] * batch, *peers)
    for batch in BATCHES:
        if (batch, 4096) not in GRID:
            add({"B": batch, "L": 4096}, batch, 1, [4096] * batch, "DeepGEMM")
    add({"B": 16, "L": "32768 + 15 x 256"}, 16, 1, MIXED, "DeepGEMM")
    add({"B": 16, "L": "16 x 2288"}, 16, 1, [sum(MIXED) // 16] * 16, "DeepGEMM")
    for length in (4096, 32768):
        for per_request in (2, 4):
            lengths = [length] * (16 * per_request)
            add({"B": 16, "rows": per_request, "L": length}, 16, per_request, lengths, "DeepGEMM")
    # Prefill chunks of one request, whose compressed context grows to 1024, 4096, 16384 and 65536.
    for rows, end in ((512, 1024), (2048, 4096), (2048, 16384), (2048, 65536)):
        chunk = [end - rows // 4 + token // 4 + 1 for token in range(rows)]
        add({"B": 1, "rows": rows, "L": f"{chunk[0]} to {end}"}, 1, rows, chunk)
    return found


def main() -> None:
    options = timing.arguments("Time indexer logits.").parse_args()
    command = "python -m benchmarks.indexer_logits"
    report = timing.Report(timing.Machine.measure(), command, rows())

    def plots(folder: Path) -> None:
        for batch in (1, 16, 64):
            timing.plot_times(report, "indexer_logits", "L", folder / f"indexer_logits_B{batch}.svg", B=batch)
        timing.plot_times(report, "indexer_logits", "B", folder / "indexer_logits_L4096.svg", L=4096)

    timing.publish(report, "indexer_logits", options, plots)


if __name__ == "__main__":
    main()
