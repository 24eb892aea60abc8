"""The small ops of a layer on the GPU at the model's sizes, against float64."""

import dataclasses
from typing import Any

import pytest
import torch
from benchmarks.decode_layer import Caches, Requests, Weights
from sm120_kernels.ops.bf16_linear_partials import bf16_linear_partials
from sm120_kernels.ops.prepare_queries import Queries, prepare_queries
from sm120_kernels.ops.route_experts import route_experts
from sm120_kernels.ops.store_attention_inputs import Compressor, store_attention_inputs
from sm120_kernels.reference import prepare_queries as queries_reference
from sm120_kernels.reference import route_experts as route_reference
from sm120_kernels.reference import store_attention_inputs as store_reference
from sm120_kernels.reference.bf16_linear_partials import bf16_linear
from sm120_kernels.reference.inv_rope_wo_a import rope_table

TOKENS = [1, 3, 16, 17, 64]


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm())


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda")


@pytest.mark.parametrize("tokens", [*TOKENS, 70])
@pytest.mark.parametrize("outputs", [2624, 1024, 256])
def test_the_shares_of_a_projection_add_up_to_float64(tokens: int, outputs: int) -> None:
    x, weight = normal(tokens, 4096).bfloat16(), normal(outputs, 4096).bfloat16()
    assert error(bf16_linear_partials(x, weight).sum(0), bf16_linear(x, weight)) <= 1e-5


@pytest.mark.parametrize("tokens", TOKENS)
def test_queries_equal_float64(tokens: int) -> None:
    q, projected = normal(tokens, 16384).bfloat16(), normal(8, tokens, 2624)
    rope = rope_table(9000, device="cuda")
    positions = torch.randint(0, 9000, (tokens,), dtype=torch.int32, device="cuda")
    weights = projected.sum(0)[:, 2560:]
    expected = queries_reference.prepare_queries(q.clone(), 16, rope, positions, head_weights=weights)
    found = prepare_queries(q, 16, rope, positions, projected=projected, first_column=2560)
    for mine, other in zip(found, expected, strict=True):
        assert mine is not None and other is not None
        assert error(mine, other) <= 1e-2


@pytest.mark.parametrize("tokens", TOKENS)
def test_routing_equals_float64(tokens: int) -> None:
    projected, bias = normal(16, tokens, 256), normal(256)
    ids, weights = route_experts(projected, bias)
    expected = route_reference.route_experts(projected.sum(0), bias)
    assert torch.equal(ids.long(), expected[0])
    assert error(weights, expected[1]) <= 1e-5


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("tokens", TOKENS)
def test_stored_keys_and_states_equal_float64(ratio: int, tokens: int) -> None:
    generator = torch.Generator("cuda").manual_seed(tokens)
    weights = Weights.random(ratio, generator)
    requests = Requests.staggered(tokens, 1024, generator)
    caches = Caches.random(weights, requests, generator)
    kv = normal(tokens, 1536).bfloat16()[:, 1024:]
    projected = normal(8, tokens, 2624) / 8**0.5 if ratio else None
    compressors: dict[str, Any] = dict(zip(("compressor", "index_compressor"), caches.compressors, strict=False))
    expected: dict[str, tuple[Compressor, torch.Tensor, torch.Tensor]] = {}
    for name, one in compressors.items():
        assert projected is not None
        before = dataclasses.replace(one, state=one.state.clone())
        expected[name] = (before, *store_reference.pooled_key(before, projected.sum(0), requests.rope))
    store_attention_inputs(
        kv,
        weights.kv_norm,
        requests.rope,
        requests.positions,
        caches.window,
        requests.window_slots,
        projected=projected,
        **compressors,
    )
    key = store_reference.window_key(kv, weights.kv_norm, requests.rope, requests.positions)
    held = store_reference.read(caches.window, requests.window_slots)
    assert error(held, store_reference.quantise(key)) <= 1e-2
    for name, (before, keys, ending) in expected.items():
        one = compressors[name]
        held = store_reference.read(one.cache, one.slots)[ending]
        rounded = store_reference.quantise_index(keys) if keys.shape[1] == 128 else store_reference.quantise(keys, True)
        assert error(held, rounded) <= 1e-2
        rows = before.state
        assert projected is not None
        columns = slice(one.first_column, one.first_column + one.columns)
        rows[one.plan[:, 1].long()] = projected.sum(0)[:, columns]
        assert torch.allclose(one.state, rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("tokens", TOKENS)
def test_queries_in_the_launch_of_the_stores_are_those_of_a_launch_of_their_own(tokens: int, ratio: int) -> None:
    generator = torch.Generator("cuda").manual_seed(tokens)
    weights = Weights.random(ratio, generator)
    requests = Requests.staggered(tokens, 2048, generator)
    qkv, q = normal(tokens, 1536).bfloat16(), normal(tokens, 16384 if ratio == 4 else 8192).bfloat16()
    projected = normal(8, tokens, 2624 if ratio == 4 else 1024) if ratio else None
    indexed = {"projected": projected, "first_column": 2560} if ratio == 4 else {}
    stored = []
    for together in (False, True):
        caches = Caches.random(weights, requests, torch.Generator("cuda").manual_seed(ratio))
        given = dict(zip(("compressor", "index_compressor"), caches.compressors, strict=False))
        queries = Queries.of(q.clone(), 16, **indexed)
        store_attention_inputs(
            qkv[:, 1024:],
            weights.kv_norm,
            requests.rope,
            requests.positions,
            caches.window,
            requests.window_slots,
            projected=projected,
            queries=queries if together else None,
            **given,
        )
        if not together:
            prepare_queries(
                queries.q,
                16,
                requests.rope,
                requests.positions,
                index_q=queries.index_q,
                index_weights=queries.index_weights,
                **indexed,
            )
        stored.append([caches.window, caches.compressed, caches.index, queries.q, queries.index_q])
        stored[-1] += [queries.index_weights, *(one.state for one in caches.compressors)]
    for apart, together in zip(*stored, strict=True):
        assert (apart is None) == (together is None)
        if apart is not None and together is not None:
            assert torch.equal(apart.contiguous().view(torch.uint8), together.contiguous().view(torch.uint8))
