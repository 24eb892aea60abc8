"""The FP8 linear layer and wo_a on the GPU at the model's sizes, against float64."""

from typing import Any

import pytest
import torch
from benchmarks import fp8_block_linear as benchmark
from sm120_kernels.checks import sm_count
from sm120_kernels.ops.fp8_block_linear import fp8_block_linear, plan
from sm120_kernels.ops.inv_rope_wo_a import inv_rope_wo_a
from sm120_kernels.reference import fp8_block_linear as reference
from sm120_kernels.reference import inv_rope_wo_a as wo_a_reference


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / (expected.norm() or 1.0))


def compare(call: dict[str, Any]) -> None:
    out = torch.full((len(call["x"]), len(call["weight"])), torch.nan, dtype=torch.bfloat16, device="cuda")
    fp8_block_linear(**call, out=out)
    assert error(out, reference.fp8_block_linear(**call)) <= 1e-2
    assert error(out, reference.fp8_block_linear(**call, rounded=False)) <= 5e-2


@pytest.mark.parametrize("shape", benchmark.SHAPES)
@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 64, 100])
def test_every_shape_equals_float64(tokens: int, shape: tuple[int, int]) -> None:
    compare(benchmark.inputs(tokens, *shape, seed=tokens))


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_residual_norm_and_ue8m0_scales_equal_float64(tokens: int, residual: bool, ue8m0: bool) -> None:
    for columns, depth in ((8192, 1024), (1536, 4096)):
        generator = torch.Generator("cuda").manual_seed(tokens)
        call = benchmark.inputs(tokens, columns, depth, seed=tokens)
        call["weight"], call["weight_scale"] = reference.random_weight(columns, depth, generator=generator, ue8m0=ue8m0)
        call["norm_weight"] = (torch.rand(depth, generator=generator, device="cuda") + 0.5).bfloat16()
        if residual:
            call["residual"] = torch.randn(tokens, depth, generator=generator, device="cuda").bfloat16()
        compare(call | {"ue8m0": ue8m0})


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 16, 64, 70])
def test_wo_a_equals_float64(tokens: int, ue8m0: bool) -> None:
    call = benchmark.wo_a_inputs(tokens, seed=tokens)
    out = torch.full((tokens, 2048), torch.nan, dtype=torch.bfloat16, device="cuda")
    inv_rope_wo_a(**call, ue8m0=ue8m0, out=out)
    assert error(out, wo_a_reference.inv_rope_wo_a(**call, ue8m0=ue8m0)) <= 1e-2
    assert error(out, wo_a_reference.inv_rope_wo_a(**call, rounded=False)) <= 5e-2


def test_a_row_alone_has_the_bits_of_the_row_in_a_batch_when_cut_alike() -> None:
    call = benchmark.inputs(64, 1536, 4096)
    device = torch.device("cuda", 0)
    cut = plan(64, 1536, 4096, sm_count(device))
    together = fp8_block_linear(**call, chosen=cut)
    for row in (0, 31, 63):
        alone = fp8_block_linear(**call | {"x": call["x"][row : row + 1]})
        assert error(alone, together[row : row + 1].double()) <= 4e-3
        alike = fp8_block_linear(**call | {"x": call["x"][row : row + 1]}, chosen=cut)
        assert torch.equal(alike[0], together[row])


def test_repeated_calls_give_the_same_bits_and_leave_the_counters_at_zero() -> None:
    for columns, depth in benchmark.SHAPES:
        call = benchmark.inputs(16, columns, depth)
        first = fp8_block_linear(**call)
        for _ in range(50):
            assert torch.equal(fp8_block_linear(**call), first)


def test_a_captured_call_follows_new_inputs() -> None:
    call = benchmark.inputs(16, 1536, 4096)
    out = torch.empty(16, 1536, dtype=torch.bfloat16, device="cuda")
    fp8_block_linear(**call, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8_block_linear(**call, out=out)
    for seed in range(1, 4):
        call["x"].copy_(benchmark.inputs(16, 1536, 4096, seed=seed)["x"])
        out.fill_(torch.nan)
        graph.replay()
        assert error(out, reference.fp8_block_linear(**call)) <= 1e-2


def test_the_result_equals_deep_gemms() -> None:
    pytest.importorskip("deep_gemm")
    call = benchmark.inputs(16, 1536, 4096)
    theirs = benchmark.deep_gemm(call)()
    assert isinstance(theirs, torch.Tensor)
    assert error(fp8_block_linear(**call), theirs.double()) <= 1e-2
