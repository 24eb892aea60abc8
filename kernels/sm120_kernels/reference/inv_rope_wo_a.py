"""Inverse RoPE and the grouped FP8 projection in float64."""

from __future__ import annotations

import torch

from sm120_kernels.reference.fp8_block_linear import dequantise, round_activations


def rope_table(positions: int, base: float = 10000.0, device: torch.device | str = "cpu") -> torch.Tensor:
    """[positions, 64] float32: cos and sin of 32 frequencies, interleaved."""
    frequencies = base ** (-torch.arange(32, dtype=torch.float64, device=device) / 32)
    angles = torch.arange(positions, dtype=torch.float64, device=device)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], dim=-1).flatten(1).float()


def inverse_rope(o: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """o, float64 [rows, heads, D], the last 64 columns of each head turned back."""
    result = o.double().clone()
    pairs = torch.view_as_complex(result[..., -64:].unflatten(-1, (32, 2)).contiguous())
    turn = torch.view_as_complex(rope[positions.long()].double().unflatten(-1, (32, 2)))
    result[..., -64:] = torch.view_as_real(pairs * turn.conj()[:, None]).flatten(-2)
    return result


def inv_rope_wo_a(
    o: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    ue8m0: bool = False,
    rounded: bool = True,
) -> torch.Tensor:
    """y as `ops.inv_rope_wo_a` defines it, float64; with rounded False the activations stay exact."""
    groups, columns, depth = weight.shape
    value = inverse_rope(o, positions, rope).view(o.shape[0], groups, depth)
    if rounded:
        value = round_activations(value, ue8m0=ue8m0)
    matrix = dequantise(weight, weight_scale.view(groups, columns // 128, depth // 128))
    return torch.einsum("tgd,gnd->tgn", value, matrix).flatten(1)
