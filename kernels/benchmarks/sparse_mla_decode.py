"""Times sparse MLA decode against SGLang's Triton fallback and FlashMLA.

    python -m benchmarks.sparse_mla_decode --out results

Peers that are not installed are left out: FlashMLA is the package `sgl-flash-mla`; SGLang's functions come from the
installed package or from the unpacked wheel that SGLANG_SOURCE names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sm120_kernels import kv_layout
from sm120_kernels.ops.sparse_mla_decode import sparse_mla_decode
from sm120_kernels.reference.sparse_mla_decode import random_cache

from benchmarks import timing, upstream

WINDOW, TOPK = 128, 512
BATCHES = (1, 2, 4, 8, 16, 32, 64)
FALLBACK_BATCHES = (1, 16, 64)
HEADS = (16, 64)


def inputs(
    batch: int,
    heads: int,
    *,
    page_sizes: tuple[int, int | None] = (256, 64),
    extra_width: int = TOPK,
    seed: int = 0,
    absent: float = 0.0,
) -> dict[str, Any]:
    """Random arguments on the GPU: 128 consecutive window tokens a row, scattered tokens of the compressed cache.

    Args:
        page_sizes: of the window cache and of the compressed cache, None for no compressed cache.
        extra_width: compressed tokens a row.
        absent: share of the indices that are -1.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    device = generator.device

    def drop(indices: torch.Tensor) -> torch.Tensor:
        gone = torch.rand(indices.shape, generator=generator, device=device) < absent
        return indices.masked_fill(gone, -1).to(torch.int32)

    def full(length: int) -> torch.Tensor:
        return torch.full((batch,), length, dtype=torch.int32, device=device)

    window = torch.arange(batch * WINDOW, device=device).view(batch, WINDOW)
    call: dict[str, Any] = {
        "q": torch.randn(batch, heads, kv_layout.HEAD_DIM, generator=generator, device=device).to(torch.bfloat16),
        "cache": random_cache(batch * WINDOW, page_sizes[0], generator),
        "indices": drop(window),
        "lengths": full(WINDOW),
        "sink": torch.randn(heads, generator=generator, device=device),
    }
    if page_sizes[1] is not None:
        pool = 4 * batch * extra_width
        scattered = torch.randperm(pool, generator=generator, device=device)[: batch * extra_width]
        call["extra_cache"] = random_cache(pool, page_sizes[1], generator)
        call["extra_indices"] = drop(scattered.view(batch, extra_width))
        call["extra_lengths"] = full(extra_width)
    return call


def _upstream_arguments(call: dict[str, Any]) -> tuple[Any, ...]:
    return (
        call["q"][:, None],
        call["cache"].view(torch.float8_e4m3fn),
        call["indices"][:, None],
        call["lengths"],
        call["sink"],
        kv_layout.HEAD_DIM,
        kv_layout.HEAD_DIM**-0.5,
        call["extra_cache"].view(torch.float8_e4m3fn),
        call["extra_indices"][:, None],
        call["extra_lengths"],
    )


def upstream_triton(call: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """SGLang's Triton fallback on these arguments."""
    path = "kernels/ops/attention/flash_mla_sm120_triton.py"
    (decode,) = upstream.load(path, "flash_mla_sparse_decode_triton")
    return lambda: decode(*_upstream_arguments(call))[0][:, 0]


def upstream_torch(call: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """SGLang's torch fallback on these arguments."""
    (decode,) = upstream.load("kernels/ops/attention/flash_mla_sm120.py", "_sm120_sparse_decode_fwd")
    return lambda: decode(*_upstream_arguments(call))[0][:, 0]


def flash_mla(call: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """FlashMLA's sm_90 kernel on these arguments; it takes 64 or 128 heads, so fewer are padded beforehand."""
    import flash_mla as package

    q, cache, indices, lengths, sink, dim, scale, extra_cache, extra_indices, extra_lengths = _upstream_arguments(call)
    heads = q.shape[2]
    if heads < 64:
        q = torch.nn.functional.pad(q, (0, 0, 0, 64 - heads))
        sink = torch.nn.functional.pad(sink, (0, 64 - heads))
    schedule = package.get_mla_metadata()[0]

    def decode() -> torch.Tensor:
        return package.flash_mla_with_kvcache(
            q=q,
            k_cache=cache,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=dim,
            tile_scheduler_metadata=schedule,
            softmax_scale=scale,
            is_fp8_kvcache=True,
            indices=indices,
            topk_length=lengths,
            attn_sink=sink,
            extra_k_cache=extra_cache,
            extra_indices_in_kvcache=extra_indices,
            extra_topk_length=extra_lengths,
            use_legacy=True,
        )[0][:, 0, :heads]

    return decode


def main() -> int:
    options = timing.arguments(__doc__ or "").parse_args()
    rows: list[timing.Row] = []
    for heads in HEADS:
        for batch in BATCHES:
            calls = [inputs(batch, heads, seed=seed) for seed in range(timing.INPUT_SETS)]
            tokens = batch * (WINDOW + TOPK)
            shape = {"H": heads, "B": batch}
            work: dict[str, Any] = {
                "bytes": tokens * kv_layout.TOKEN_BYTES + 4 * batch * heads * kv_layout.HEAD_DIM,
                "flops": 4.0 * heads * tokens * kv_layout.HEAD_DIM,
            }

            def row(name: str, functions: list[timing.Call], shape: Any = shape, work: Any = work) -> timing.Row:
                return timing.measure("sparse_mla_decode", shape, name, functions, **work)

            rows.append(row("ours", [lambda call=call: sparse_mla_decode(**call) for call in calls]))
            peers: list[tuple[str, Callable[[dict[str, Any]], timing.Call]]] = []
            if upstream.source_root() is not None and batch in FALLBACK_BATCHES:
                peers.append(("SGLang 0.5.23 Triton fallback", upstream_triton))
            peers.append(("FlashMLA sm_90" + (", padded to 64 heads" if heads < 64 else ""), flash_mla))
            for name, peer in peers:
                try:
                    functions = [peer(call) for call in calls]
                except ImportError:
                    continue
                rows.append(row(name, functions))
    report = timing.Report(timing.Machine.measure(), "python -m benchmarks.sparse_mla_decode", rows)

    def plots(folder: Path) -> None:
        for heads in HEADS:
            timing.plot_times(report, "sparse_mla_decode", "B", folder / f"sparse_mla_decode_h{heads}.svg", H=heads)

    timing.publish(report, "sparse_mla_decode", options, plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
