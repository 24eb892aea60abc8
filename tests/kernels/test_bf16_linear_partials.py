"""The bf16 projections in Triton's interpreter against float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm120_kernels.ops.bf16_linear_partials import DEPTH, Plan, bf16_linear_partials, plan
from sm120_kernels.reference.bf16_linear_partials import bf16_linear


def arguments(tokens: int, outputs: int, depth: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, depth + 8, generator=generator).to(torch.bfloat16)[:, :depth]
    return x, torch.randn(outputs, depth, generator=generator).to(torch.bfloat16)


@settings(max_examples=10, deadline=None)
@given(
    tokens=st.sampled_from([1, 3, 16, 17, 70]),
    outputs=st.sampled_from([8, 64, 200]),
    cut=st.sampled_from([Plan(16, 1), Plan(16, 4), Plan(64, 2)]),
    seed=st.integers(0, 2**31),
)
def test_the_shares_add_up_to_the_float64_product(tokens: int, outputs: int, cut: Plan, seed: int) -> None:
    x, weight = arguments(tokens, outputs, 256, seed)
    out = torch.full((cut.splits, tokens, outputs), torch.nan)
    bf16_linear_partials(x, weight, out=out, chosen=cut)
    expected = bf16_linear(x, weight)
    assert (out.double().sum(0) - expected).norm() <= 1e-5 * expected.norm()


def test_no_tokens_give_an_empty_result() -> None:
    x, weight = arguments(0, 64, 64)
    assert bf16_linear_partials(x, weight).shape[1:] == (0, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 128)}, "x must be torch.bfloat16"),
        ({"x": torch.zeros(2, 100, dtype=torch.bfloat16)}, "x must have a positive multiple of 64 columns"),
        ({"x": torch.zeros(2, 131, dtype=torch.bfloat16)[:, :128]}, "strides of 8"),
        ({"weight": torch.zeros(8, 64, dtype=torch.bfloat16)}, "weight must have shape"),
        ({"out": torch.zeros(1, 3, 8)}, "out must have shape"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_name(change: dict, message: str) -> None:
    x, weight = arguments(2, 8, 128)
    with pytest.raises(ValueError, match=message):
        bf16_linear_partials(**{"x": x.contiguous(), "weight": weight} | change)


@given(
    tokens=st.integers(1, 300),
    outputs=st.integers(1, 4096),
    turns=st.integers(1, 64),
    sms=st.sampled_from([1, 132, 188]),
)
def test_a_plan_divides_the_depth(tokens: int, outputs: int, turns: int, sms: int) -> None:
    cut = plan(tokens, outputs, turns * DEPTH, sms)
    assert turns % cut.splits == 0
    assert cut.splits & (cut.splits - 1) == 0
