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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o": torch.zeros(2, 2, 448, dtype=torch.bfloat16)}, r"o must be \[rows, heads, 512\]"),
        ({"o": torch.zeros(2, 2, 512)}, "o must be torch.bfloat16"),
        ({"positions": torch.zeros(2)}, "positions must be torch.int32 or torch.int64"),
        ({"rope": torch.zeros(9, 32)}, "rope must have shape"),
        ({"weight": torch.zeros(3, 128, 512).to(torch.float8_e4m3fn)}, "weight must be"),
        ({"weight": torch.zeros(2, 128, 1024).to(torch.float8_e4m3fn)}, "weight must have shape"),
        ({"weight_scale": torch.zeros(2, 1, 8)}, "weight_scale must have shape"),
        ({"out": torch.zeros(2, 128, dtype=torch.bfloat16)}, "out must have shape"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inv_rope_wo_a(**arguments(2, 2, 2) | change)


def test_scales_may_be_flat_and_no_rows_give_an_empty_result() -> None:
    call = arguments(3, 2, 2)
    flat = call | {"weight_scale": call["weight_scale"].flatten(0, 1)}
    assert torch.equal(inv_rope_wo_a(**flat), inv_rope_wo_a(**call))
    assert inv_rope_wo_a(**call | {"o": call["o"][:0], "positions": call["positions"][:0]}).shape == (0, 256)
