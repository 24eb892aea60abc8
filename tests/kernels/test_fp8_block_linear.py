"""The FP8 linear layer in Triton's interpreter against the float64 reference, and the launch parameters."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sm120_kernels.aot import LIMITS
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
    splits = splits if blocks // splits in (1, 2, 4) and blocks % splits == 0 else blocks // 2 if blocks > 1 else 1
    fp8_block_linear(**call, residual_out=total, out=out, chosen=Plan(64, splits, 8))
    assert error(out, reference.fp8_block_linear(**call)) <= 1e-2
    assert error(out, reference.fp8_block_linear(**call, rounded=False)) <= 5e-2
    if total is not None:
        assert torch.equal(total, (x.float() + call["residual"].float()).bfloat16())


def call_with(**change: object) -> dict:
    generator = torch.Generator().manual_seed(0)
    weight, scale = reference.random_weight(128, 256, generator=generator)
    return {"x": torch.zeros(3, 256, dtype=torch.bfloat16), "weight": weight, "weight_scale": scale} | change


def test_no_rows_give_an_empty_result() -> None:
    assert fp8_block_linear(**call_with(x=torch.zeros(0, 256, dtype=torch.bfloat16))).shape == (0, 128)


def test_zeros_give_zeros() -> None:
    assert not fp8_block_linear(**call_with()).any()


def test_ue8m0_weight_scales_equal_float32_scales_of_the_same_value() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, scale = reference.random_weight(128, 256, generator=generator, ue8m0=True)
    call = call_with(x=torch.randn(3, 256, generator=generator).bfloat16(), weight=weight, weight_scale=scale)
    out = fp8_block_linear(**call)
    assert torch.equal(fp8_block_linear(**call | {"weight_scale": scale.view(torch.float8_e8m0fnu)}), out)
    assert torch.equal(fp8_block_linear(**call | {"weight_scale": torch.exp2(scale.float() - 127)}), out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 256)}, "x must be torch.bfloat16"),
        ({"x": torch.zeros(3, 128, dtype=torch.bfloat16)}, "x must have 256 columns"),
        ({"x": torch.zeros(3, 512, dtype=torch.bfloat16)[:, ::2]}, "x's rows must be contiguous"),
        ({"x": torch.zeros(3, 260, dtype=torch.bfloat16)[:, :256]}, "x's rows must lie apart by a multiple of 8"),
        ({"weight": torch.zeros(100, 256).to(torch.float8_e4m3fn)}, "both multiples of 128"),
        ({"weight": torch.zeros(128, 256, dtype=torch.bfloat16)}, "weight must be torch.float8_e4m3fn"),
        ({"weight_scale": torch.zeros(1, 2, dtype=torch.float16)}, "weight_scale must be float32, float8_e8m0fnu"),
        ({"weight_scale": torch.zeros(1, 3)}, "weight_scale must have shape"),
        ({"residual": torch.zeros(2, 256, dtype=torch.bfloat16)}, "residual must have 3 rows"),
        ({"residual_out": torch.zeros(3, 256, dtype=torch.bfloat16)}, "residual_out without residual"),
        ({"residual": torch.zeros(3, 256, dtype=torch.bfloat16), "settled": True}, "settled with residual"),
        ({"norm_weight": torch.zeros(128, dtype=torch.bfloat16)}, "norm_weight must have shape"),
        ({"out": torch.zeros(3, 256, dtype=torch.bfloat16)}, "out must have shape"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fp8_block_linear(**call_with(**change))


@given(
    tokens=st.integers(1, 300),
    rows=st.integers(1, 200).map(lambda n: 128 * n),
    blocks=st.integers(1, 64),
    sms=st.sampled_from([1, 132, 188]),
    inputs=st.sampled_from([1, 2]),
)
def test_a_plan_cuts_every_shape_into_whole_shares(tokens: int, rows: int, blocks: int, sms: int, inputs: int) -> None:
    cut = plan(tokens, rows, 128 * blocks, sms, inputs)
    assert rows % cut.rows == 0 and cut.rows in (64, 128)
    assert blocks % cut.splits == 0 and blocks // cut.splits in (1, 2, 4)
    # A head is four blocks: wo_a keeps them together.
    assert blocks % 4 or blocks // cut.splits == 4
    assert cut.tokens in (16, 32)
    shared = (cut.rows + cut.tokens) * 128 * (blocks // cut.splits)
    assert shared < LIMITS[120].shared_per_block
