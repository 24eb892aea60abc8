"""A layer's requests and caches, and the torch way to run it against the float64 layer, on the CPU."""

from types import SimpleNamespace

import pytest
import torch
from benchmarks import decode_layer
from benchmarks.decode_layer import Caches, Requests, TorchWeights, Weights, all_torch, first_state, in_float64
from hypothesis import given, settings
from hypothesis import strategies as st
from sm120_kernels import shapes


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm())


def test_there_are_43_layers_of_the_models_kinds() -> None:
    counts = {ratio: shapes.RATIOS.count(ratio) for ratio in (0, 4, 128)}
    assert counts == {0: 2, 4: 21, 128: 20}


@settings(max_examples=20, deadline=None)
@given(count=st.integers(1, 9), context=st.integers(10, 3000), seed=st.integers(0, 2**31))
def test_requests_name_existing_tokens_and_each_key_once(count: int, context: int, seed: int) -> None:
    requests = Requests.staggered(count, context, torch.Generator().manual_seed(seed))
    for row in range(count):
        length = int(requests.lengths[row])
        window = requests.window_indices[row, : int(requests.window_lengths[row])]
        assert len(window.unique()) == min(length, 128) and (window >= 0).all()
        assert int(requests.window_slots[row]) == int(window[-1])
        for ratio in (4, 128):
            held = int(requests.compressed[ratio][row])
            assert held == length // ratio
            size = decode_layer.COMPRESSED_PAGE[ratio]
            assert held <= requests.tables[ratio].shape[1] * size
            _, write, before, page = requests.plans[ratio][row].tolist()
            assert write // ratio == page and page // 2 == before // 2 == row
            assert (before != page) or length <= ratio
    tables = torch.cat([requests.tables[4].flatten()])
    assert len(tables.unique()) == tables.numel()


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_the_torch_layer_is_the_float64_layer(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Few experts: the others only take time to make.
    monkeypatch.setattr(decode_layer, "EXPERTS", 8)
    generator = torch.Generator().manual_seed(ratio)
    weights = Weights.random(ratio, generator)
    requests = Requests.staggered(3, 2200, generator)
    caches = Caches.random(weights, requests, generator)
    first = first_state(3, generator)
    state, expected = (SimpleNamespace(**vars(first)) for _ in range(2))
    for _, call in all_torch(weights, TorchWeights.of(weights), caches, requests, state):
        call()
    selected = state.selected.int() if ratio == 4 else None
    in_float64(weights, caches, requests, expected, selected=selected, ids=state.ids)
    for name in ("query", "attended", "x", "y", "residual", "post", "comb"):
        assert error(getattr(state, name), getattr(expected, name)) <= 2e-2, name
