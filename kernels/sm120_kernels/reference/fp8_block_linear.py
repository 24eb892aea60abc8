"""FP8 block-scaled linear layer in float64."""

from __future__ import annotations

import torch

BLOCK = 128
E4M3_MAX = 448.0


def scales_to_float64(scale: torch.Tensor) -> torch.Tensor:
    """float32, float8_e8m0fnu or uint8 (2 ** (byte - 127)) scales as float64."""
    if scale.dtype == torch.float8_e8m0fnu:
        scale = scale.view(torch.uint8)
    return torch.exp2(scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()


def dequantise(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[..., N, K] float64 of e4m3 weights and their [..., N / 128, K / 128] scales."""
    scale = scales_to_float64(scale)
    return weight.double() * scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)


def round_activations(x: torch.Tensor, group: int = BLOCK, ue8m0: bool = False) -> torch.Tensor:
    """x, float64 [..., K], as FP8 with one scale for each `group` columns holds it.

    Scale and quotient are fp32, as the definition has them: of bf16 values many quotients lie halfway between two FP8
    values, and exact arithmetic would round those otherwise.
    """
    groups = x.float().unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / E4M3_MAX
    if ue8m0:
        scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
    rounded = (groups * (1 / scale)).to(torch.float8_e4m3fn).double()
    return (rounded * scale.double()).flatten(-2)


def random_weight(*shape: int, generator: torch.Generator, ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 weights [..., N, K] and scales [..., N / 128, K / 128] whose values are of order K ** -0.5."""
    device = generator.device
    weight = (torch.randn(*shape, generator=generator, device=device) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks = (*shape[:-2], shape[-2] // BLOCK, shape[-1] // BLOCK)
    scale = (torch.rand(*blocks, generator=generator, device=device) + 0.5) / (100 * shape[-1] ** 0.5)
    if ue8m0:
        return weight, (torch.log2(scale).round() + 127).to(torch.uint8)
    return weight, scale


def fp8_block_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    ue8m0: bool = False,
    rounded: bool = True,
) -> torch.Tensor:
    """y as `ops.fp8_block_linear` defines it, float64; with rounded False the activations stay exact."""
    value = x.double() if residual is None else x.double() + residual.double()
    factor = 1.0
    if norm_weight is not None:
        factor = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
        value = value * norm_weight.double()
    if rounded:
        value = round_activations(value, ue8m0=ue8m0)
    return factor * (value @ dequantise(weight, weight_scale).mT)
