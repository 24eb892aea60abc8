"""RoPE and the Hadamard rotation in float64."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, positions: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """x [tokens, ..., dim] float64 with the last 64 values of each vector rotated, neighbours being a pair (re, im).

    Args:
        positions: [tokens].
        rope: [positions, 64]: cos and sin of 32 frequencies, interleaved.
    """
    result = x.double().clone()
    pairs = torch.view_as_complex(result[..., -64:].unflatten(-1, (32, 2)).contiguous())
    turn = torch.view_as_complex(rope[positions.long()].double().unflatten(-1, (32, 2)))
    turn = turn.view(len(turn), *[1] * (x.ndim - 2), 32)
    result[..., -64:] = torch.view_as_real(pairs * turn).flatten(-2)
    return result


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., 2 ** n] float64 times the Hadamard matrix in natural order, divided by the square root of its size."""
    result, size, step = x.double(), x.shape[-1], 1
    while step < size:
        pairs = result.unflatten(-1, (size // (2 * step), 2, step))
        result = torch.stack([pairs.sum(-2), pairs[..., 0, :] - pairs[..., 1, :]], -2).flatten(-3)
        step *= 2
    return result / size**0.5
