"""The FP4 experts in Triton's interpreter against the float64 reference."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sm120_kernels.ops.moe_fp4_small_batch import Cut, moe_fp4_small_batch, plan
from sm120_kernels.reference import moe_fp4_small_batch as reference

HIDDEN, INTERMEDIATE, EXPERTS = 256, 128, 5


def arguments(
    ids: list[list[int]], nvfp4: bool = False, shared: bool = True, seed: int = 0, intermediate: int = INTERMEDIATE
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    call = reference.random_experts(EXPERTS, HIDDEN, intermediate, generator, nvfp4)
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


@settings(max_examples=6, deadline=None)
@given(
    ids=routings(),
    nvfp4=st.booleans(),
    shared=st.booleans(),
    seed=st.integers(0, 2**31),
    # Of a multiple of 256 MXFP4 makes integers.
    intermediate=st.sampled_from([128, 256]),
)
@example(ids=[[0]] * 9, nvfp4=False, shared=True, seed=0, intermediate=256)
@example(ids=[[0]] * 17, nvfp4=False, shared=True, seed=0, intermediate=128)
@example(ids=[[-1, -1]], nvfp4=True, shared=False, seed=0, intermediate=128)
def test_any_routing_equals_the_float64_reference(
    ids: list[list[int]], nvfp4: bool, shared: bool, seed: int, intermediate: int
) -> None:
    call = arguments(ids, nvfp4, shared, seed, intermediate)
    out = torch.full((len(ids), HIDDEN), torch.nan, dtype=torch.bfloat16)
    moe_fp4_small_batch(**call, out=out, check=True)
    assert error(out, reference.moe_fp4_small_batch(**call)) <= 5e-3


@settings(max_examples=6, deadline=None)
@given(ids=routings(), seed=st.integers(0, 2**31))
def test_fp8_activations_equal_the_reference_with_the_same_rounding(ids: list[list[int]], seed: int) -> None:
    call = arguments(ids, seed=seed)
    out = moe_fp4_small_batch(**call, fp8_activations=True)
    rounded, exact = (reference.moe_fp4_small_batch(**call, fp8_activations=fp8) for fp8 in (True, False))
    assert error(out, rounded) <= 1e-2
    # What the rounding itself costs is about 5e-2, a little more or less with the values.
    assert error(out, exact) <= error(rounded.float(), exact) + 5e-3


def test_groups_of_activations_of_any_size_and_of_zeros_count_alike() -> None:
    call = arguments([[0, 1], [1, 2], [0, -1]], shared=False, intermediate=256)
    assert plan(3, HIDDEN, 256).integers
    # The first 32 activations are zeros, and the next ones a millionth of what they were, which w2 makes up for.
    call["w13"][:, 256:288] = 0
    call["w13_scale"][:, 288:320] -= 20
    call["w2_scale"][:, :, 1] += 20
    out = moe_fp4_small_batch(**call)
    assert error(out, reference.moe_fp4_small_batch(**call)) <= 5e-3


def test_any_cut_of_down_as_integers_gives_the_same_bits() -> None:
    call = arguments([[0], [1], [0]], shared=False, intermediate=512)
    base = plan(3, HIDDEN, 512)
    expected = moe_fp4_small_batch(**call)
    assert error(expected, reference.moe_fp4_small_batch(**call)) <= 5e-3
    for down in (Cut(32, 1, 4, stages=3), Cut(64, 2, 1, stages=3), Cut(128, 4)):
        assert torch.equal(moe_fp4_small_batch(**call, chosen=dataclasses.replace(base, down=down)), expected)


def test_integers_need_a_warp_for_each_32_rows_and_whole_groups() -> None:
    base = plan(3, HIDDEN, 256)
    for change in ({"down": Cut(64, 4)}, {"gate_up": Cut(32, 1)}):
        with pytest.raises(ValueError, match="a warp for each 32 rows"):
            dataclasses.replace(base, **change)


def test_up_rows_before_gate_rows_give_the_same_result() -> None:
    call = arguments([[0, 1], [4, -1]])
    swapped = {name: torch.cat(call[name].chunk(2, dim=1)[::-1], dim=1) for name in ("w13", "w13_scale")}
    assert torch.equal(moe_fp4_small_batch(**call | swapped, up_first=True), moe_fp4_small_batch(**call))


def test_no_tokens_give_an_empty_result() -> None:
    call = arguments([[0, 1]])
    empty = {name: call[name][:0] for name in ("x", "topk_ids", "topk_weights")}
    assert moe_fp4_small_batch(**call | empty).shape == (0, HIDDEN)


def test_the_clamp_holds_large_activations_back() -> None:
    call = arguments([[0, 1], [2, 3]])
    call["x"] *= 40
    out = moe_fp4_small_batch(**call)
    assert error(out, reference.moe_fp4_small_batch(**call)) <= 5e-3
    assert error(out, reference.moe_fp4_small_batch(**call, swiglu_limit=float("inf"))) > 1e-1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, HIDDEN)}, "x must be torch.bfloat16"),
        ({"x": torch.zeros(2, 128, dtype=torch.bfloat16)}, "a multiple of 256"),
        ({"x": torch.zeros(65, HIDDEN, dtype=torch.bfloat16)}, "0 to 64"),
        ({"topk_ids": torch.zeros(2, 2, dtype=torch.int64)}, "topk_ids must be torch.int32"),
        ({"topk_ids": torch.zeros(2, 9, dtype=torch.int32)}, "1 to 8"),
        ({"topk_ids": torch.tensor([[0, 1], [2, 5]], dtype=torch.int32), "check": True}, r"topk_ids\[1, 1\] is 5"),
        ({"topk_weights": torch.zeros(2, 1)}, "topk_weights must have shape"),
        ({"w13": torch.zeros(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.uint8)}, "w13 must have shape"),
        ({"w2": torch.zeros(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.uint8)}, "w2 must have shape"),
        ({"w2_scale": torch.zeros(EXPERTS, HIDDEN, 4)}, "w2_scale must be torch.uint8"),
        ({"w13_global": torch.ones(EXPERTS)}, "w13_global goes with NVFP4"),
        ({"shared_w2": None}, "go together: give all or none"),
        ({"shared_w2_scale": torch.zeros(2, 1, dtype=torch.uint8)}, "must have the same type"),
        ({"out": torch.zeros(2, HIDDEN)}, "out must be torch.bfloat16"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_fp4_small_batch(**arguments([[0, 1], [2, 3]]) | change)


def test_weights_that_do_not_begin_at_16_bytes_are_refused() -> None:
    call = arguments([[0, 1], [2, 3]])
    moved = torch.empty(call["w2"].numel() + 4, dtype=torch.uint8)[4:].view(call["w2"].shape)
    with pytest.raises(ValueError, match="w2 must begin at a multiple of 16 bytes"):
        moe_fp4_small_batch(**call | {"w2": moved})


def test_nvfp4_scales_need_their_factors_and_bf16_activations() -> None:
    call = arguments([[0]], nvfp4=True)
    with pytest.raises(ValueError, match="w2_global goes with NVFP4"):
        moe_fp4_small_batch(**call | {"w2_global": None})
    with pytest.raises(ValueError, match="fp8_activations needs MXFP4"):
        moe_fp4_small_batch(**call, fp8_activations=True)


@given(
    tokens=st.integers(1, 64),
    hidden=st.integers(1, 32).map(lambda n: 256 * n),
    intermediate=st.integers(1, 32).map(lambda n: 128 * n),
)
def test_a_plan_cuts_every_shape_into_whole_blocks(tokens: int, hidden: int, intermediate: int) -> None:
    for fp8 in (False, True):
        cut = plan(tokens, hidden, intermediate, fp8)
        assert 2 * intermediate % cut.gate_up.rows == 0 and hidden % cut.gate_up.depth == 0
        assert hidden % (cut.down.rows * cut.down.blocks) == 0
        assert 2 * intermediate % cut.shared_rows == 0 and hidden % (cut.shared_rows * cut.down.blocks) == 0
        assert fp8 or (hidden % (128 * cut.gate_up.parts) == 0 and intermediate % (128 * cut.down.parts) == 0)
        assert not fp8 or intermediate % cut.down.depth == 0
        assert not cut.integers or intermediate % 256 == 0
