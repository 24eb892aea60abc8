"""The FP4 experts in Triton's interpreter against the float64 reference."""

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sm120_kernels.ops.moe_fp4_small_batch import moe_fp4_small_batch, plan
from sm120_kernels.reference import moe_fp4_small_batch as reference

HIDDEN, INTERMEDIATE, EXPERTS = 256, 128, 5


def arguments(ids: list[list[int]], nvfp4: bool = False, shared: bool = True, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    call = reference.random_experts(EXPERTS, HIDDEN, INTERMEDIATE, generator, nvfp4)
    if not shared:
        call = {name: value for name, value in call.items() if not name.startswith("shared")}
    topk_ids = torch.tensor(ids, dtype=torch.int32)
    return call | {
        "x": torch.randn(len(ids), HIDDEN, generator=generator).bfloat16(),
        "topk_ids": topk_ids,
        "topk_weights": torch.rand(topk_ids.shape, generator=generator),
    }


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / (expected.norm() or 1.0))


@st.composite
def routings(draw: st.DrawFn) -> list[list[int]]:
    tokens, top_k = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    row = st.permutations(range(EXPERTS)).map(lambda order: order[:top_k])
    rows = draw(st.lists(row, min_size=tokens, max_size=tokens))
    absent = draw(st.lists(st.tuples(st.integers(0, tokens - 1), st.integers(0, top_k - 1)), max_size=3))
    for token, place in absent:
        rows[token][place] = -1
    return rows


@settings(max_examples=20, deadline=None)
@given(ids=routings(), nvfp4=st.booleans(), shared=st.booleans(), seed=st.integers(0, 2**31))
@example(ids=[[0]] * 17, nvfp4=False, shared=True, seed=0)
@example(ids=[[-1, -1]], nvfp4=True, shared=False, seed=0)
def test_any_routing_equals_the_float64_reference(
    ids: list[list[int]], nvfp4: bool, shared: bool, seed: int
) -> None:
    call = arguments(ids, nvfp4, shared, seed)
    out = torch.full((len(ids), HIDDEN), torch.nan, dtype=torch.bfloat16)
    moe_fp4_small_batch(**call, out=out, check=True)
    assert error(out, reference.moe_fp4_small_batch(**call)) <= 5e-3


@settings(max_examples=10, deadline=None)
@given(ids=routings(), seed=st.integers(0, 2**31))
def test_fp8_activations_equal_the_reference_with_the_same_rounding(ids: list[list[int]], seed: int) -> None:
    call = arguments(ids, seed=seed)
    out = moe_fp4_small_batch(**call, fp8_activations=True)
    assert error(out, reference.moe_fp4_small_batch(**call, fp8_activations=True)) <= 1e-2
    assert error(out, reference.moe_fp4_small_batch(**call)) <= 5e-2
