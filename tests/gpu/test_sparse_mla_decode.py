"""Sparse MLA decode on the GPU at the model's sizes, against float64 and against SGLang's own functions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks import sparse_mla_decode as benchmark
from benchmarks import upstream
from sm120_kernels.ops.sparse_mla_decode import plan, sparse_mla_decode
from sm120_kernels.reference import sparse_mla_decode as reference

BATCHES = (1, 3, 17, 64)


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected.double()).norm() / (expected.double().norm() or 1.0))


def compare(call: dict[str, Any], **more: Any) -> None:
    batch, heads, dim = call["q"].shape
    out = torch.full((batch, heads, dim), torch.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.full((batch, heads), torch.nan, device="cuda")
    sparse_mla_decode(**call, out=out, lse=lse, **more)
    expected, expected_lse = reference.sparse_mla_decode(**call)
    assert error(out, expected) <= 1e-2
    empty = torch.isinf(expected_lse)
    assert torch.equal(lse[empty], expected_lse[empty].float())
    assert ((lse - expected_lse)[~empty].abs() <= 1e-3).all()
    assert not out[empty].any()


@pytest.mark.parametrize("page_sizes", [(256, 64), (64, 64), (256, 2), (64, 2), (2, 256), (256, None)])
@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("batch", BATCHES)
def test_every_layout_batch_and_head_count_equals_float64(
    batch: int, heads: int, page_sizes: tuple[int, int | None]
) -> None:
    call = benchmark.inputs(batch, heads, page_sizes=page_sizes, seed=batch * heads, absent=0.1)
    for lengths, width in (("lengths", 128), ("extra_lengths", 512)):
        if lengths in call:
            call[lengths] = torch.randint(0, width + 1, (batch,), dtype=torch.int32, device="cuda")
            call[lengths][:3] = torch.tensor([0, 1, width], dtype=torch.int32, device="cuda")[:batch]
    compare(call)


@pytest.mark.parametrize("width", [1, 63, 64, 65, 2048, 8192])
def test_a_long_c128_list_with_short_rows_equals_float64(width: int) -> None:
    call = benchmark.inputs(5, 16, page_sizes=(256, 2), extra_width=width, seed=width)
    call["extra_lengths"] = torch.tensor([0, 1, width // 3, width, width // 2], dtype=torch.int32, device="cuda")
    compare(call)


def test_no_sink_no_lengths_and_another_scale_equal_float64() -> None:
    call = benchmark.inputs(4, 16, seed=5)
    for name in ("sink", "lengths", "extra_lengths"):
        del call[name]
    compare(call | {"scale": 0.02})


def test_every_number_of_shares_gives_the_same_result() -> None:
    call = benchmark.inputs(2, 16, seed=6)
    for splits in range(1, 21):
        compare(call, chosen=replace(plan(2, 16, 128, 512, 132, 101_376), splits=splits))


@pytest.mark.parametrize("heads", [16, 64])
def test_a_row_alone_equals_the_row_in_a_batch_of_64(heads: int) -> None:
    """Bit for bit when cut alike; otherwise within the rounding of the bf16 result."""
    call = benchmark.inputs(64, heads, seed=7)
    together, _ = sparse_mla_decode(**call)
    for row in (0, 31, 63):
        alone = call | {
            name: call[name][row : row + 1] for name in ("q", "indices", "lengths", "extra_indices", "extra_lengths")
        }
        out, _ = sparse_mla_decode(**alone)
        assert error(out[0], together[row]) <= 4e-3
        cut = plan(64, heads, 128, 512, torch.cuda.get_device_properties(0).multi_processor_count, 101_376)
        first, _ = sparse_mla_decode(**call, chosen=cut)
        again, _ = sparse_mla_decode(**alone, chosen=cut)
        assert torch.equal(again[0], first[row])


def test_a_captured_call_follows_new_lengths_and_indices() -> None:
    call = benchmark.inputs(16, 16, seed=8)
    out, lse = torch.empty_like(call["q"]), torch.empty(16, 16, device="cuda")
    sparse_mla_decode(**call, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse_mla_decode(**call, out=out, lse=lse)
    for seed in range(3):
        new = benchmark.inputs(16, 16, seed=20 + seed)
        for name in ("q", "indices", "extra_indices", "sink"):
            call[name].copy_(new[name])
        for name, width in (("lengths", 129), ("extra_lengths", 513)):
            call[name].copy_(torch.randint(0, width, (16,), device="cuda"))
        out.fill_(torch.nan)
        graph.replay()
        expected, expected_lse = reference.sparse_mla_decode(**call)
        assert error(out, expected) <= 1e-2
        assert torch.equal(torch.isinf(lse), torch.isinf(expected_lse))


def test_repeated_calls_give_the_same_bits() -> None:
    call = benchmark.inputs(16, 16, seed=9)
    first = sparse_mla_decode(**call)
    for _ in range(20):
        again = sparse_mla_decode(**call)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


@pytest.mark.parametrize("batch, heads", [(1, 16), (16, 16), (64, 64)])
@pytest.mark.parametrize("backend", ["upstream_triton", "upstream_torch"])
def test_the_result_equals_sglangs_own_function(backend: str, batch: int, heads: int) -> None:
    if upstream.source_root() is None:
        pytest.skip(f"SGLang is not installed and {upstream.ENVIRONMENT} is not set")
    call = benchmark.inputs(batch, heads, seed=10, absent=0.05)
    out, _ = sparse_mla_decode(**call)
    assert error(out, getattr(benchmark, backend)(call)()) <= 1e-2


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_the_result_equals_flashmlas(batch: int) -> None:
    pytest.importorskip("flash_mla")
    call = benchmark.inputs(batch, 64, seed=11, absent=0.05)
    out, _ = sparse_mla_decode(**call)
    assert error(out, benchmark.flash_mla(call)()) <= 1e-2
