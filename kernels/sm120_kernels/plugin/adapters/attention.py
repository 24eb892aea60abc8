"""The attention's ops: sparse MLA decode, the indexer's logits and top-k, and what prepares queries and keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sm120_kernels.ops.indexer_logits import indexer_logits
from sm120_kernels.ops.sparse_mla_decode import sparse_mla_decode
from sm120_kernels.ops.topk_indices import MAX_WIDTH, TOPK, topk_indices
from sm120_kernels.plugin.adapters.base import DECODE_ROWS, relative_error, require_rows_at_most
from sm120_kernels.plugin.table import Hook

PAGE = 64


class SparseMlaDecode:
    """`flash_mla_with_kvcache_sm120`."""

    def __init__(self, active: tuple[Hook, ...]) -> None:
        pass

    def run(
        self,
        *,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        indices: torch.Tensor,
        head_dim_v: int,
        topk_length: torch.Tensor | None = None,
        attn_sink: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        extra_k_cache: torch.Tensor | None = None,
        extra_indices_in_kvcache: torch.Tensor | None = None,
        extra_topk_length: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        rows, queries, _, dimension = q.shape
        if queries != 1 or head_dim_v != dimension:
            raise ValueError(f"one query a row with values as wide as keys, got q {list(q.shape)}, values {head_dim_v}")
        require_rows_at_most(rows, DECODE_ROWS)
        out, _ = sparse_mla_decode(
            q[:, 0],
            k_cache,
            _two_dimensions(indices),
            topk_length,
            extra_cache=extra_k_cache,
            extra_indices=None if extra_indices_in_kvcache is None else _two_dimensions(extra_indices_in_kvcache),
            extra_lengths=extra_topk_length,
            sink=attn_sink,
            scale=softmax_scale,
        )
        return out.unsqueeze(1), None

    def error(self, upstream: Callable[..., Any], result: Any, **kwargs: Any) -> float:
        return relative_error(result[0], upstream(**kwargs)[0])


class IndexerLogits:
    """`tilelang_fp8_paged_mqa_logits` and `fp8_paged_mqa_logits_torch_sm120`."""

    def __init__(self, active: tuple[Hook, ...]) -> None:
        # Our top-k takes all tokens of a short row without reading a score.
        self._skips = {"TopkIndices", "TopkIndicesV2"} <= {hook.adapter for hook in active}

    def run(
        self,
        q_fp8: torch.Tensor,
        kvcache_fp8: torch.Tensor,
        weight: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        deep_gemm_metadata: Any,
        max_seq_len: int,
        clean_logits: bool = True,
    ) -> torch.Tensor:
        if clean_logits:
            raise ValueError("logits beyond a row's length are not written, so they cannot be clean")
        if kvcache_fp8.shape[1:] != (PAGE, 1, 132):
            raise ValueError(f"pages of {PAGE} tokens of 132 bytes, got {list(kvcache_fp8.shape)}")
        return indexer_logits(
            q_fp8,
            kvcache_fp8,
            weight,
            seq_lens.squeeze(-1) if seq_lens.ndim == 2 else seq_lens,
            page_table,
            max_seq_len,
            skip_length=TOPK if self._skips and max_seq_len <= MAX_WIDTH else 0,
        )

    def error(self, upstream: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> float:
        theirs = upstream(*args, **kwargs)
        lengths = (args[3] if len(args) > 3 else kwargs["seq_lens"]).reshape(-1, 1)
        column = torch.arange(theirs.shape[1], device=theirs.device)
        counts = (column < lengths) & (lengths > (TOPK if self._skips else 0))
        return relative_error(torch.where(counts, result, 0.0), torch.where(counts, theirs, 0.0))


class TopkIndices:
    """`topk_transform_paged`."""

    # Places of the arguments that are written: out_page_indices, out_raw_indices.
    written = (3, 5)

    def __init__(self, active: tuple[Hook, ...]) -> None:
        pass

    def run(
        self,
        scores: torch.Tensor,
        seq_lens: torch.Tensor,
        page_tables: torch.Tensor | None,
        out_page_indices: torch.Tensor,
        page_size: int,
        out_raw_indices: torch.Tensor | None = None,
    ) -> None:
        if page_tables is None or page_size != PAGE:
            raise ValueError(f"a page table of pages of {PAGE}, got pages of {page_size}")
        lengths = seq_lens.squeeze(-1) if seq_lens.ndim == 2 else seq_lens
        topk_indices(scores, lengths, page_tables, out_page_indices, raw_out=out_raw_indices)

    def error(self, upstream: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> float:
        ours = args[3] if len(args) > 3 else kwargs["out_page_indices"]
        # SGLang's own run must not write over what ours wrote.
        own = list(args)
        for place, name in zip(self.written, ("out_page_indices", "out_raw_indices"), strict=True):
            if place < len(own) and own[place] is not None:
                own[place] = torch.empty_like(own[place])
            elif kwargs.get(name) is not None:
                kwargs[name] = torch.empty_like(kwargs[name])
        theirs = own[3] if len(own) > 3 else kwargs["out_page_indices"]
        upstream(*own, **kwargs)
        # Which of equal scores is taken may differ; the share of slots that do is the error.
        return float((ours.sort(dim=1).values != theirs.sort(dim=1).values).double().mean())


class TopkIndicesV2(TopkIndices):
    """`topk_transform_paged_v2`: the same with a routing plan, which ours does not need."""

    written = (3, 6)

    def run(
        self,
        scores: torch.Tensor,
        seq_lens: torch.Tensor,
        page_tables: torch.Tensor | None,
        out_page_indices: torch.Tensor,
        page_size: int,
        metadata: Any,
        out_raw_indices: torch.Tensor | None = None,
    ) -> None:
        super().run(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)


def _two_dimensions(indices: torch.Tensor) -> torch.Tensor:
    return indices.squeeze(1) if indices.ndim == 3 else indices
