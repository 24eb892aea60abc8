"""The FP8 linear layer in Triton's interpreter against the float64 reference, and the launch parameters."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sm120_kernels.ops.fp8_block_linear import Plan, fp8_block_linear, plan
from sm120_kernels.reference import fp8_block_linear as reference


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / (expected.norm() or 1.0))


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 20),
    columns=st.sampled_from([128, 256]),
    blocks=st.sampled_from([1, 2, 4, 6]),
    splits=st.sampled_from([1, 2]),
    norm=st.booleans(),
    residual=st.booleans(),
    ue8m0=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example(tokens=17, columns=128, blocks=4, splits=2, norm=True, residual=True, ue8m0=True, seed=0)
def test_any_call_equals_the_float64_reference(
    tokens: int, columns: int, blocks: int, splits: int, norm: bool, residual: bool, ue8m0: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    depth = 128 * blocks
    weight, scale = reference.random_weight(columns, depth, generator=generator, ue8m0=ue8m0)
    x = torch.randn(tokens, depth + 8, generator=generator).bfloat16()[:, :depth]
    call = {
        "x": x,
        "weight": weight,
        "weight_scale": scale,
        "ue8m0": ue8m0,
        "norm_weight": (torch.rand(depth, generator=generator) + 0.5).bfloat16() if norm else None,
        "residual": torch.randn(tokens, depth, generator=generator).bfloat16() if residual else None,
    }
    out = torch.full((tokens, columns), torch.nan, dtype=torch.bfloat16)
    total = torch.full((tokens, depth), torch.nan, dtype=torch.bfloat16) if residual else None
    splits = splits if blocks % splits == 0 else 1
    turn = 2 if blocks // splits % 2 == 0 else 1
    fp8_block_linear(**call, residual_out=total, out=out, chosen=Plan(64, splits, 8, turn, 4, 1))
    assert error(out, reference.fp8_block_linear(**call)) <= 1e-2
    assert error(out, reference.fp8_block_linear(**call, rounded=False)) <= 5e-2
    if total is not None:
        assert torch.equal(total, (x.float() + call["residual"].float()).bfloat16())
