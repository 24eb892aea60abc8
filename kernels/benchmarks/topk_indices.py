"""Times top-512 against torch.topk and SGLang's torch fallback.

    python -m benchmarks.topk_indices --out results

SGLang's functions come from the installed package or from the unpacked wheel that SGLANG_SOURCE names. torch.topk
alone does less: no lengths, no page transform. Ours is given its workspace, as a server would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sm120_kernels.ops.topk_indices import PAGE_TOKENS, TOPK, Workspace, topk_indices

from benchmarks import timing, upstream

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)


def inputs(batch: int, length: int, width: int, seed: int = 0) -> dict[str, Any]:
    """Random arguments of `ops.topk_indices` on the GPU: normally distributed scores, full rows."""
    generator = torch.Generator("cuda").manual_seed(seed)
    pages = -(-width // PAGE_TOKENS)
    table = [torch.randperm(pages, generator=generator, device="cuda") for _ in range(batch)]
    return {
        "scores": torch.randn(batch, width, generator=generator, device="cuda"),
        "lengths": torch.full((batch,), length, dtype=torch.int32, device="cuda"),
        "page_table": torch.stack(table).to(torch.int32),
        "out": torch.empty(batch, TOPK, dtype=torch.int32, device="cuda"),
    }


def ours(arguments: dict[str, Any]) -> Callable[[], object]:
    workspace = Workspace.allocate(*arguments["scores"].shape, "cuda")
    return lambda: topk_indices(**arguments, workspace=workspace)


def torch_topk(arguments: dict[str, Any]) -> Callable[[], object]:
    scores = arguments["scores"]
    return lambda: torch.topk(scores, min(TOPK, scores.shape[1]), dim=1, sorted=False)


def torch_fallback(arguments: dict[str, Any]) -> Callable[[], object]:
    (function,) = upstream.load(
        "srt/layers/attention/dsv4/indexer.py", "topk_transform_pytorch_vectorized", is_fp8_fnuz=lambda: False
    )
    scores, lengths, table, out = (arguments[name] for name in ("scores", "lengths", "page_table", "out"))
    return lambda: function(scores, lengths, table, out, PAGE_TOKENS)


def row(
    name: str, make: Callable[[dict[str, Any]], Callable[[], object]], shape: dict[str, Any], batch: int, width: int
) -> timing.Row:
    length = shape["L"]
    counted = {"bytes": batch * (length * 4.0 * (length > TOPK) + TOPK * 4 + length // PAGE_TOKENS * 4)}
    try:
        calls = [make(inputs(batch, length, width, seed)) for seed in range(timing.INPUT_SETS)]
        note = same_set(make, inputs(batch, length, width, 7)) if make is torch_fallback else ""
    except Exception as error:  # a peer may fail in any way; the table must still come out
        return timing.Row("topk_indices", shape, name, None, note=f"{type(error).__name__}: {error}"[:200], **counted)
    return timing.measure("topk_indices", shape, name, calls, note=note, **counted)


def same_set(make: Callable[[dict[str, Any]], Callable[[], object]], arguments: dict[str, Any]) -> str:
    """Whether a peer fills in the same slots as ours."""
    make(arguments)()
    theirs = arguments["out"].sort(dim=1).values
    mine = topk_indices(**{**arguments, "out": None}).sort(dim=1).values
    return "same set as ours" if torch.equal(theirs, mine) else "not the same set as ours"


def rows() -> list[timing.Row]:
    found: list[timing.Row] = []
    makers = {"ours": ours, "torch.topk": torch_topk, "SGLang torch": torch_fallback}

    def add(shape: dict[str, Any], batch: int, width: int, *names: str) -> None:
        for name in names:
            found.append(row(name, makers[name], shape, batch, width))
            print(found[-1].implementation, shape, found[-1].timing, found[-1].note, file=sys.stderr, flush=True)

    for batch in (1, 16, 64):
        for length in LENGTHS:
            peers = ("torch.topk", "SGLang torch") if batch == 16 else ("torch.topk",)
            add({"B": batch, "L": length}, batch, length, "ours", *peers)
    for batch in BATCHES:
        if batch not in (1, 16, 64):
            add({"B": batch, "L": 8192}, batch, 8192, "ours", "torch.topk")
    # Graphs are captured for the longest context; the rows of a step are shorter.
    for length in (256, 2048, 16384):
        add({"B": 16, "L": length, "width": 262144}, 16, 262144, "ours")
    return found


def main() -> None:
    options = timing.arguments("Time top-512.").parse_args()
    report = timing.Report(timing.Machine.measure(), "python -m benchmarks.topk_indices", rows())

    def plots(folder: Path) -> None:
        for batch in (1, 16, 64):
            timing.plot_times(report, "topk_indices", "L", folder / f"topk_indices_B{batch}.svg", B=batch)
        timing.plot_times(report, "topk_indices", "B", folder / "topk_indices_L8192.svg", L=8192)

    timing.publish(report, "topk_indices", options, plots)


if __name__ == "__main__":
    main()
