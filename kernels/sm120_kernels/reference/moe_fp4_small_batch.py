"""FP4 experts and the shared expert in float64."""

from __future__ import annotations

from typing import Any

import torch

from sm120_kernels.ops.moe_fp4_small_batch import SWIGLU_LIMIT
from sm120_kernels.reference import fp8_block_linear as linear

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpack(packed: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
    """Weights [N, K] float64 of one expert.

    Args:
        packed: [N, K / 2] uint8, the even column in the low half.
        scale: MXFP4 [N, K / 32] float8_e8m0fnu or uint8; NVFP4 [N, K / 16] float8_e4m3fn.
        factor: NVFP4's global scale, a number or a tensor of one.
    """
    table = torch.tensor(E2M1, dtype=torch.float64, device=packed.device)
    values = torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], dim=-1).flatten(-2)
    scales = scale.double() if scale.dtype == torch.float8_e4m3fn else linear.scales_to_float64(scale)
    values *= scales.repeat_interleave(values.shape[-1] // scale.shape[-1], -1)
    return values if factor is None else values * factor.double()


def swiglu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit); gate the first half of the columns, up the second."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(gate) * up.clamp(-limit, limit)


def random_experts(
    experts: int, hidden: int, intermediate: int, generator: torch.Generator, nvfp4: bool = False
) -> dict[str, Any]:
    """Weight arguments of `ops.moe_fp4_small_batch` on the generator's device; they keep the order of magnitude."""
    device = generator.device
    found: dict[str, Any] = {}
    for name, rows, columns in (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate)):
        found[name] = torch.randint(
            0, 256, (experts, rows, columns // 2), generator=generator, device=device, dtype=torch.uint8
        )
        # The codes' root mean square is 2.9.
        level = 1 / (2.9 * columns**0.5)
        if nvfp4:
            scale = torch.rand(experts, rows, columns // 16, generator=generator, device=device) + 0.5
            found[f"{name}_scale"] = (scale * 200).to(torch.float8_e4m3fn)
            found[f"{name}_global"] = (torch.rand(experts, generator=generator, device=device) + 0.5) * level / 200
        else:
            middle = round(127 + torch.log2(torch.tensor(level)).item())
            found[f"{name}_scale"] = torch.randint(
                middle - 1, middle + 2, (experts, rows, columns // 32), generator=generator, device=device
            ).to(torch.uint8)
        weight, scale = linear.random_weight(rows, columns, generator=generator)
        found[f"shared_{name}"], found[f"shared_{name}_scale"] = weight, scale
    return found


def moe_fp4_small_batch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    w13_global: torch.Tensor | None = None,
    w2_global: torch.Tensor | None = None,
    shared_w13: torch.Tensor | None = None,
    shared_w13_scale: torch.Tensor | None = None,
    shared_w2: torch.Tensor | None = None,
    shared_w2_scale: torch.Tensor | None = None,
    swiglu_limit: float = SWIGLU_LIMIT,
    fp8_activations: bool = False,
) -> torch.Tensor:
    """y as `ops.moe_fp4_small_batch` defines it, float64; only fp8_activations rounds anything."""

    def round_(value: torch.Tensor) -> torch.Tensor:
        return linear.round_activations(value, 32, ue8m0=True) if fp8_activations else value.double()

    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in topk_ids[topk_ids >= 0].unique().tolist():
        token, place = torch.nonzero(topk_ids == expert, as_tuple=True)
        up = unpack(w13[expert], w13_scale[expert], None if w13_global is None else w13_global[expert])
        down = unpack(w2[expert], w2_scale[expert], None if w2_global is None else w2_global[expert])
        value = swiglu(round_(x[token]) @ up.T, swiglu_limit)
        value = round_(value.bfloat16() if fp8_activations else value) @ down.T
        y.index_add_(0, token, value * topk_weights[token, place, None].double())
    if shared_w13 is not None:
        assert shared_w13_scale is not None and shared_w2 is not None and shared_w2_scale is not None
        gate_up = x.double() @ linear.dequantise(shared_w13, shared_w13_scale).T
        y += swiglu(gate_up, swiglu_limit) @ linear.dequantise(shared_w2, shared_w2_scale).T
    return y
