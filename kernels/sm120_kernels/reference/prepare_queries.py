"""Query preparation in float64."""

from __future__ import annotations

import torch

from sm120_kernels.ops.prepare_queries import HEAD_DIM, INDEX_DIM, INDEX_HEADS
from sm120_kernels.reference.rotation import hadamard, rotate


def prepare_queries(
    q: torch.Tensor,
    heads: int,
    rope: torch.Tensor,
    positions: torch.Tensor,
    *,
    eps: float = 1e-6,
    head_weights: torch.Tensor | None = None,
    weight_scale: float = (INDEX_DIM * INDEX_HEADS) ** -0.5,
    quantised: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As `ops.prepare_queries` defines it, float64 and q unchanged.

    Args:
        head_weights: [tokens, 64], the projected weights.
        quantised: with False the indexer's queries stay exact, and their weights without the scale.

    Returns:
        Query heads [tokens, heads, 512], indexer queries [tokens, 64, 128], their weights [tokens, 64].
    """
    query = q[:, : heads * HEAD_DIM].double().unflatten(1, (heads, HEAD_DIM))
    query = rotate(query * torch.rsqrt(query.square().mean(-1, keepdim=True) + eps), positions, rope)
    if head_weights is None:
        return query, None, None
    index_q = q[:, heads * HEAD_DIM :].double().unflatten(1, (INDEX_HEADS, INDEX_DIM))
    index_q = hadamard(rotate(index_q, positions, rope))
    weights = head_weights.double() * weight_scale
    if not quantised:
        return query, index_q, weights
    scale = index_q.abs().amax(-1).clamp(min=1e-4) / 448
    return query, (index_q / scale[..., None]).float().to(torch.float8_e4m3fn).double(), weights * scale
