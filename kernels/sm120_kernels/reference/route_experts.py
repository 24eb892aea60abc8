"""Expert routing in float64."""

from __future__ import annotations

import torch

from sm120_kernels.ops.route_experts import TOP


def route_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    table: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    factor: float = 1.5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [tokens, 6] and weights [tokens, 6] float64 as `ops.route_experts` defines them, of logits [tokens, 256]."""
    scores = torch.nn.functional.softplus(logits.double(), threshold=1e6).sqrt()
    if bias is None:
        assert table is not None and token_ids is not None
        ids = table[token_ids.long()].long()
    else:
        ids = torch.sort(scores + bias.double(), dim=-1, descending=True, stable=True).indices[:, :TOP]
    chosen = scores.gather(1, ids)
    return ids, factor * chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
