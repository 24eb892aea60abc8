"""Whole layers on the GPU against the float64 layer, and the launches they take."""

from types import SimpleNamespace

import pytest
import torch
from benchmarks import timing
from benchmarks.decode_layer import Caches, Requests, Weights, first_state, in_float64, ours


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize(("count", "context"), [(1, 4096), (3, 300), (16, 8192), (64, 2500)])
def test_a_layer_is_the_float64_layer_but_for_its_fp8_activations(ratio: int, count: int, context: int) -> None:
    generator = torch.Generator("cuda").manual_seed(ratio + count)
    weights = Weights.random(ratio, generator)
    requests = Requests.staggered(count, context, generator)
    caches = Caches.random(weights, requests, generator)
    first = first_state(count, generator)
    state, expected = (SimpleNamespace(**vars(first)) for _ in range(2))
    for _, call in ours(weights, caches, requests, state):
        call()
    selected = state.selected if ratio == 4 else None
    in_float64(weights, caches, requests, expected, selected=selected, ids=state.ids)
    for name in ("attended", "x", "y", "residual"):
        assert error(getattr(state, name), getattr(expected, name)) <= 0.1, name


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_a_layer_takes_at_most_25_launches(ratio: int) -> None:
    generator = torch.Generator("cuda").manual_seed(ratio)
    weights = Weights.random(ratio, generator)
    requests = Requests.staggered(16, 8192, generator)
    caches = Caches.random(weights, requests, generator)
    state = first_state(16, generator)
    calls = ours(weights, caches, requests, state)
    assert timing.count_launches(lambda: [call() for _, call in calls]) <= 25
