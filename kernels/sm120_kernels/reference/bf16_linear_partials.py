"""A linear layer in float64."""

from __future__ import annotations

import torch


def bf16_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The sum over the shares of `ops.bf16_linear_partials`: [tokens, outputs] float64."""
    return x.double() @ weight.double().T
