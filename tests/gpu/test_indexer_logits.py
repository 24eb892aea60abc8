"""Indexer logits on the GPU at the model's sizes, against float64 and against SGLang's own function."""

from collections.abc import Sequence

import pytest
import torch
from benchmarks import indexer_logits as benchmark
from benchmarks import upstream
from sm120_kernels.ops.indexer_logits import indexer_logits
from sm120_kernels.reference import indexer_logits as reference


def compare(requests: int, rows: int, lengths: Sequence[int], skip_length: int = 0, seed: int = 0) -> None:
    arguments = benchmark.inputs(requests, rows, lengths, seed)
    out = torch.full((requests * rows, arguments["width"]), torch.nan, device="cuda")
    indexer_logits(**arguments, out=out, skip_length=skip_length, check=True)
    expected = reference.indexer_logits(**arguments, skip_length=skip_length)
    written = ~expected.isnan()
    assert torch.equal(~out.isnan(), written)
    assert (out - expected)[written].norm() <= 1e-2 * expected[written].norm()


@pytest.mark.parametrize("length", [1, 63, 64, 65, 512, 513, 4096, 32768, 262144])
def test_one_row_of_any_length_equals_float64(length: int) -> None:
    compare(1, 1, [length], seed=length)


@pytest.mark.parametrize("requests", [2, 16, 17, 64, 513, 700])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_rows_of_mixed_lengths_equal_float64(requests: int, rows: int) -> None:
    lengths = torch.randint(0, 700, (requests * rows,), generator=torch.Generator().manual_seed(requests)).tolist()
    lengths[0], lengths[-1] = 9000, 0
    compare(requests, rows, lengths, seed=rows)


def test_a_prefill_chunk_equals_float64() -> None:
    compare(1, 257, [1000 + i // 4 for i in range(257)])


def test_short_rows_are_skipped() -> None:
    compare(5, 1, [512, 513, 0, 100, 4097], skip_length=512)


def test_the_same_row_gives_the_same_bits_alone_and_in_a_batch() -> None:
    arguments = benchmark.inputs(64, 1, [4096 + i for i in range(64)])
    batch = indexer_logits(**arguments)
    one = {name: value[7:8] for name, value in arguments.items() if name in ("q", "weights", "lengths", "page_table")}
    alone = indexer_logits(**(arguments | one))
    assert torch.equal(alone[0, :4103], batch[7, :4103])


def test_a_captured_graph_replays_with_other_lengths() -> None:
    arguments = benchmark.inputs(4, 1, [3000, 100, 513, 64])
    out = torch.empty(4, arguments["width"], device="cuda")
    indexer_logits(**arguments, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indexer_logits(**arguments, out=out)
    arguments["lengths"].copy_(torch.tensor([1, 100, 0, 64], dtype=torch.int32))
    out.fill_(torch.nan)
    graph.replay()
    assert (~out.isnan()).sum(dim=1).tolist() == [1, 100, 0, 64]


def test_sglangs_torch_function_gives_the_same_logits() -> None:
    if upstream.source_root() is None:
        pytest.skip(f"no SGLang source; set {upstream.ENVIRONMENT}")
    arguments = benchmark.inputs(16, 1, [1, 64, 65, *range(1000, 14000, 1000)])
    theirs = benchmark.torch_fallback(arguments)()
    assert isinstance(theirs, torch.Tensor)
    mine = indexer_logits(**arguments)
    inside = torch.arange(mine.shape[1], device="cuda")[None, :] < arguments["lengths"][:, None]
    assert (mine - theirs)[inside].norm() <= 1e-2 * theirs[inside].norm()
