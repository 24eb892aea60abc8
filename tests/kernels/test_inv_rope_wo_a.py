"""Inverse RoPE and the grouped FP8 projection in Triton's interpreter against the float64 reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm120_kernels.ops.inv_rope_wo_a import inv_rope_wo_a
from sm120_kernels.reference import fp8_block_linear as linear
from sm120_kernels.reference import inv_rope_wo_a as reference


def arguments(tokens: int, groups: int, heads: int, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weight, scale = linear.random_weight(groups, 128, heads // groups * 512, generator=generator)
    return {
        "o": torch.randn(tokens, heads, 512, generator=generator).bfloat16(),
        "positions": torch.randint(0, 50, (tokens,), generator=generator, dtype=torch.int32),
        "rope": reference.rope_table(50, base=3.0),
        "weight": weight,
        "weight_scale": scale,
    }


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@settings(max_examples=10, deadline=None)
@given(
    tokens=st.integers(1, 9),
    shape=st.sampled_from([(1, 1), (1, 2), (2, 2), (2, 4)]),
    ue8m0=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_call_equals_the_float64_reference(tokens: int, shape: tuple[int, int], ue8m0: bool, seed: int) -> None:
    call = arguments(tokens, *shape, seed)
    out = torch.full((tokens, shape[0] * 128), torch.nan, dtype=torch.bfloat16)
    inv_rope_wo_a(**call, ue8m0=ue8m0, out=out)
    assert error(out, reference.inv_rope_wo_a(**call, ue8m0=ue8m0)) <= 1e-2
    assert error(out, reference.inv_rope_wo_a(**call, rounded=False)) <= 5e-2
    # The rotation counts: without it the result would be another one.
    still = reference.inv_rope_wo_a(**call | {"positions": torch.zeros_like(call["positions"])}, ue8m0=ue8m0)
    assert not call["positions"].any() or error(out, still) > 5e-2
