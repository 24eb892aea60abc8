"""The FP4 experts on the GPU at a TP4 rank's sizes, against float64."""

from typing import Any

import pytest
import torch
from benchmarks import moe_fp4_small_batch as benchmark
from sm120_kernels.ops.moe_fp4_small_batch import moe_fp4_small_batch
from sm120_kernels.reference import moe_fp4_small_batch as reference


@pytest.fixture(scope="module", params=benchmark.KINDS)
def layer(request: pytest.FixtureRequest) -> dict[str, Any]:
    return benchmark.weights(request.param)


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / (expected.norm() or 1.0))


def compare(call: dict[str, Any]) -> None:
    out = torch.full_like(call["x"], torch.nan)
    moe_fp4_small_batch(**call, out=out, check=True)
    assert error(out, reference.moe_fp4_small_batch(**call)) <= 1e-2


@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 16, 17, 33, 64])
def test_random_routing_equals_float64(layer: dict[str, Any], tokens: int) -> None:
    compare(layer | benchmark.tokens_of(tokens, seed=tokens))


@pytest.mark.parametrize("tokens", [1, 9, 64])
def test_all_tokens_on_the_same_experts_and_absent_routes_equal_float64(layer: dict[str, Any], tokens: int) -> None:
    call = layer | benchmark.tokens_of(tokens)
    call["topk_ids"] = torch.tensor([0, 7, 255, 100, 3, 200], dtype=torch.int32, device="cuda").repeat(tokens, 1)
    compare(call)
    call["topk_ids"][tokens // 2] = -1
    call["topk_ids"][0, 3] = -1
    compare(call)


def test_without_a_shared_expert_equals_float64(layer: dict[str, Any]) -> None:
    call = {name: value for name, value in layer.items() if not name.startswith("shared")}
    compare(call | benchmark.tokens_of(16))


def test_up_rows_before_gate_rows_give_the_same_bits(layer: dict[str, Any]) -> None:
    """The interpreter does not read what is asked for by row: only this looks at where the rows are."""
    call = layer | benchmark.tokens_of(16)
    swapped = {name: torch.cat(call[name].chunk(2, dim=1)[::-1], dim=1) for name in ("w13", "w13_scale")}
    assert torch.equal(moe_fp4_small_batch(**call | swapped, up_first=True), moe_fp4_small_batch(**call))


def test_large_inputs_meet_the_clamp(layer: dict[str, Any]) -> None:
    call = layer | benchmark.tokens_of(4)
    call["x"] *= 30
    assert (
        error(moe_fp4_small_batch(**call), reference.moe_fp4_small_batch(**call | {"swiglu_limit": float("inf")}))
        > 1e-1
    )
    compare(call)


def test_fp8_activations_equal_the_reference_with_the_same_rounding() -> None:
    call = benchmark.weights("MXFP4") | benchmark.tokens_of(16)
    out = moe_fp4_small_batch(**call, fp8_activations=True)
    assert error(out, reference.moe_fp4_small_batch(**call, fp8_activations=True)) <= 1e-2
    assert error(out, reference.moe_fp4_small_batch(**call)) <= 5e-2


def test_a_token_alone_has_the_bits_of_the_token_in_a_batch(layer: dict[str, Any]) -> None:
    """Bit for bit within a plan; across plans within the rounding of the bf16 result."""
    from sm120_kernels.ops.moe_fp4_small_batch import plan

    call = layer | benchmark.tokens_of(64)
    nvfp4 = call["w13_scale"].dtype == torch.float8_e4m3fn
    cut = plan(64, benchmark.HIDDEN, benchmark.INTERMEDIATE, nvfp4=nvfp4)
    together = moe_fp4_small_batch(**call)
    for token in (0, 31, 63):
        one = {name: call[name][token : token + 1] for name in ("x", "topk_ids", "topk_weights")}
        assert torch.equal(moe_fp4_small_batch(**call | one, chosen=cut)[0], together[token])
        assert error(moe_fp4_small_batch(**call | one)[0], together[token].double()) <= 4e-3


def test_a_captured_call_follows_new_tokens_and_experts(layer: dict[str, Any]) -> None:
    call = layer | benchmark.tokens_of(16)
    out = torch.empty_like(call["x"])
    moe_fp4_small_batch(**call, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe_fp4_small_batch(**call, out=out)
    for seed in range(1, 4):
        for name, value in benchmark.tokens_of(16, seed=seed).items():
            call[name].copy_(value)
        out.fill_(torch.nan)
        graph.replay()
        assert error(out, reference.moe_fp4_small_batch(**call)) <= 1e-2
        assert torch.equal(moe_fp4_small_batch(**call), out)
