"""The mHC boundary on the GPU at the model's sizes, against float64."""

import pytest
import torch
from benchmarks.mhc_post_pre_norm import inputs
from sm120_kernels.ops.mhc_post_pre_norm import Boundary, Plan, mhc_post_pre_norm
from sm120_kernels.reference import mhc_post_pre_norm as reference

CUTS = [Plan(16, 32, 1), Plan(16, 32, 4), Plan(16, 64, 1, 8), Plan(32, 32, 1), Plan(32, 32, 2), Plan(32, 64, 2, 8)]


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("tokens", [1, 3, 16, 17, 64, 200, 256])
@pytest.mark.parametrize("cut", [None, *CUTS])
def test_any_number_of_tokens_equals_float64(tokens: int, cut: Plan | None) -> None:
    call = inputs(tokens, tokens)
    out = Boundary(*(value.fill_(torch.nan) for value in Boundary.empty(tokens, "cuda")))
    mhc_post_pre_norm(**call, out=out, chosen=cut)
    for mine, expected in zip(out, reference.mhc_post_pre_norm(**call), strict=True):
        assert error(mine, expected) <= 1e-2


def test_the_same_token_gives_the_same_bits_alone_and_in_a_batch() -> None:
    call = inputs(64)
    batch = mhc_post_pre_norm(**call, chosen=CUTS[0])
    one = {n: v[7:8].clone() if n in ("y", "residual", "post", "comb") else v for n, v in call.items()}
    alone = mhc_post_pre_norm(**one, chosen=CUTS[0])
    assert all(torch.equal(mine[7:8], other) for mine, other in zip(batch, alone, strict=True))


def test_a_captured_graph_replays_with_other_values() -> None:
    call = inputs(16)
    out = Boundary.empty(16, "cuda")
    mhc_post_pre_norm(**call, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mhc_post_pre_norm(**call, out=out)
    call["y"].copy_(inputs(16, 1)["y"])
    graph.replay()
    assert error(out.x, reference.mhc_post_pre_norm(**call).x) <= 1e-2
