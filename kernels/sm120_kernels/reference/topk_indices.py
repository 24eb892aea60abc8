"""The best-scored tokens of each row, by a full sort."""

from __future__ import annotations

import torch

from sm120_kernels.ops.topk_indices import PAGE_TOKENS


def topk_indices(scores: torch.Tensor, lengths: torch.Tensor, topk: int = 512) -> list[list[int]]:
    """Positions of the topk largest of each row's first `length` scores, best first; all of them for shorter rows."""
    rows: list[list[int]] = []
    for row, length in enumerate(lengths.tolist()):
        order = torch.sort(scores[row, :length].double(), descending=True, stable=True).indices
        rows.append(order[:topk].tolist())
    return rows


def slots(positions: list[int], page_table: torch.Tensor) -> list[int]:
    """Cache slots of token positions of one request, whose page ids are `page_table` [pages]."""
    pages = page_table.tolist()
    return [pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in positions]
