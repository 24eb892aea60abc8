"""Top-512 on the GPU at the model's sizes, against a full sort and against SGLang's own function."""

import pytest
import torch
from benchmarks import topk_indices as benchmark
from benchmarks import upstream
from sm120_kernels.ops.topk_indices import Workspace, topk_indices

LENGTHS = {
    1000: [0, 1, 511, 512, 513, 1000],
    8192: [8192, 600, 8191, 1025],
    20000: [20000, 8192, 8193, 513, 512, 16385],
    262144: [262144, 16384, 16385, 600, 100000, 262143, 16884],
}


def scores_of(kind: str, rows: int, width: int) -> torch.Tensor:
    scores = torch.randn(rows, width, generator=torch.Generator("cuda").manual_seed(width), device="cuda")
    return {
        "distinct": scores,
        "positive": scores.abs(),
        "many ties": (scores * 4).round(),
        "constant": torch.zeros_like(scores),
        "narrow": 100 + scores * 1e-3,
        "rising": scores.sort(dim=1).values,
        "clustered": scores + 10 * (torch.arange(width, device="cuda") // 700 % 13 == 3),
        "infinite": torch.where(scores > 1.5, torch.inf, torch.where(scores < -1.5, -torch.inf, scores)),
    }[kind]


@pytest.mark.parametrize("width", LENGTHS)
@pytest.mark.parametrize(
    "kind", ["distinct", "positive", "many ties", "constant", "narrow", "rising", "clustered", "infinite"]
)
def test_the_set_of_largest_scores_is_exact(kind: str, width: int) -> None:
    lengths = LENGTHS[width]
    arguments = benchmark.inputs(len(lengths), width, width)
    arguments["scores"] = scores_of(kind, len(lengths), width)
    arguments["lengths"] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    out, raw = arguments["out"], torch.full_like(arguments["out"], -7)
    workspace = Workspace.allocate(len(lengths), width, "cuda")
    for _ in range(2):
        out.fill_(-7)
        topk_indices(**arguments, raw_out=raw, workspace=workspace, check=True)
        for row, length in enumerate(lengths):
            count = min(512, length)
            chosen = raw[row, :count].long()
            assert (raw[row, count:] == -1).all() and (out[row, count:] == -1).all()
            assert len(chosen.unique()) == count and ((chosen >= 0) & (chosen < length)).all()
            best = arguments["scores"][row, :length].topk(count).values
            assert torch.equal(arguments["scores"][row, chosen].sort().values, best.sort().values)
            pages = arguments["page_table"][row].long()
            assert torch.equal(out[row, :count].long(), pages[chosen // 64] * 64 + chosen % 64)


@pytest.mark.parametrize("width", [700, 8192, 16384, 262144])
def test_nan_has_a_place_in_the_order_and_nothing_is_written_beside_the_result(width: int) -> None:
    arguments = benchmark.inputs(2, width, width)
    # What the GPU makes of inf - inf.
    nan = torch.full((), torch.inf, device="cuda") - torch.inf
    arguments["scores"][0] = nan
    arguments["scores"][1, ::3] = nan
    around = torch.full((4, 512), -7, dtype=torch.int32, device="cuda")
    raw = torch.full_like(arguments["out"], -7)
    topk_indices(**arguments | {"out": around[1:3]}, raw_out=raw, check=True)
    assert (around[0] == -7).all() and (around[3] == -7).all()
    assert all(len(row.unique()) == 512 for row in raw) and ((raw >= 0) & (raw < width)).all()
    found = int(arguments["scores"][1, raw[1].long()].isnan().sum())
    assert found == (min(512, -(-width // 3)) if nan.view(torch.int32) > 0 else 0)


@pytest.mark.parametrize("width", [2048, 20000, 262144])
def test_a_row_gives_the_same_result_alone_and_in_a_batch_and_in_every_run(width: int) -> None:
    arguments = benchmark.inputs(64, width, width)
    arguments["scores"] = (arguments["scores"] * 50).round()
    first = topk_indices(**arguments).clone()
    for _ in range(5):
        assert torch.equal(topk_indices(**arguments), first)
    one = {name: value[9:10].contiguous() for name, value in arguments.items()}
    assert torch.equal(topk_indices(**one)[0], first[9])


def test_a_captured_graph_replays_with_other_lengths() -> None:
    arguments = benchmark.inputs(3, 20000, 20000)
    workspace = Workspace.allocate(3, 20000, "cuda")
    topk_indices(**arguments, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        topk_indices(**arguments, workspace=workspace)
    arguments["lengths"].copy_(torch.tensor([0, 9000, 20], dtype=torch.int32))
    graph.replay()
    assert (arguments["out"] >= 0).sum(dim=1).tolist() == [0, 512, 20]
    assert torch.equal(arguments["out"], topk_indices(**arguments | {"out": None}))


def test_sglangs_torch_function_selects_the_same_set() -> None:
    if upstream.source_root() is None:
        pytest.skip(f"no SGLang source; set {upstream.ENVIRONMENT}")
    arguments = benchmark.inputs(16, 20000, 20000)
    arguments["lengths"] = torch.arange(16, dtype=torch.int32, device="cuda") * 1333
    mine = topk_indices(**arguments | {"out": None}).sort(dim=1).values
    benchmark.torch_fallback(arguments)()
    assert torch.equal(arguments["out"].sort(dim=1).values, mine)
