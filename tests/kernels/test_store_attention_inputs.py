"""The cache store and the compressors in Triton's interpreter against the float64 reference."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm120_kernels import kv_layout
from sm120_kernels.ops.prepare_queries import Queries, prepare_queries
from sm120_kernels.ops.store_attention_inputs import Compressor, store_attention_inputs
from sm120_kernels.reference import indexer_logits
from sm120_kernels.reference import store_attention_inputs as reference
from sm120_kernels.reference.inv_rope_wo_a import rope_table
from sm120_kernels.reference.sparse_mla_decode import random_cache


def compressor(ratio: int, dim: int, first_column: int, lengths: list[int], generator: torch.Generator) -> Compressor:
    """A compressor whose requests have a ring of two groups each."""
    tokens = len(lengths)
    columns = dim * (4 if ratio == 4 else 2)
    plan = [
        (
            length,
            request * 2 * ratio + (length - 1) % (2 * ratio),
            request * 2 + max(length - 1 - ratio, 0) // ratio % 2,
            request * 2 + (length - 1) // ratio % 2,
        )
        for request, length in enumerate(lengths)
    ]
    pages = 2 + tokens // 64
    cache = indexer_logits.random_cache(pages, generator) if dim == 128 else random_cache(128, 64, generator)
    return Compressor(
        ratio,
        first_column,
        torch.randn(8 if ratio == 4 else 128, dim, generator=generator),
        torch.rand(dim, generator=generator) + 0.5,
        torch.randn(tokens * 2 * ratio, columns, generator=generator),
        torch.tensor(plan, dtype=torch.int32).view(tokens, 4),
        cache,
        torch.randperm(128, generator=generator)[:tokens].to(torch.int32),
    )


def arguments(ratio: int, lengths: list[int], page_size: int = 64, splits: int = 2, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tokens = len(lengths)
    found: dict[str, Any] = {
        "kv": torch.randn(tokens, 1536, generator=generator).to(torch.bfloat16)[:, 1024:],
        "norm_weight": (torch.rand(512, generator=generator) + 0.5).to(torch.bfloat16),
        "rope": rope_table(1000),
        "positions": torch.tensor(lengths, dtype=torch.int32) - 1,
        "window": random_cache(200, page_size, generator),
        "window_slots": torch.randperm(200, generator=generator)[:tokens].to(torch.int32),
    }
    if ratio:
        found["compressor"] = compressor(ratio, 512, 16, lengths, generator)
        columns = 16 + found["compressor"].columns
        if ratio == 4:
            found["index_compressor"] = compressor(4, 128, columns, lengths, generator)
            columns += found["index_compressor"].columns
        found["projected"] = torch.randn(splits, tokens, columns, generator=generator) / splits**0.5
    return found


def close(value: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    return bool((value - expected).norm() <= bound * expected.norm())


def check_compressor(one: Compressor, before: Compressor, call: dict[str, Any]) -> None:
    projected = call["projected"].sum(0)
    keys, ending = reference.pooled_key(before, projected, call["rope"])
    held = reference.read(one.cache, one.slots)
    rounded = reference.quantise_index(keys) if keys.shape[1] == 128 else reference.quantise(keys, pooled=True)
    assert close(held[ending], rounded, 1e-2) and close(held[ending], keys, 5e-2)
    old = reference.read(before.cache, before.slots)
    kept = [token for token in range(len(held)) if token not in ending.tolist()]
    assert torch.equal(held[kept].nan_to_num(), old[kept].nan_to_num())
    rows = before.state.clone()
    rows[one.plan[:, 1].long()] = projected[:, one.first_column : one.first_column + one.columns]
    assert torch.allclose(one.state, rows, rtol=1e-5, atol=1e-5)


@settings(max_examples=10, deadline=None)
@given(
    ratio=st.sampled_from([0, 4, 128]),
    lengths=st.lists(st.sampled_from([1, 3, 4, 5, 8, 12, 127, 128, 129, 256, 384]), min_size=1, max_size=4),
    page_size=st.sampled_from(kv_layout.PAGE_SIZES),
    splits=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_any_call_equals_the_float64_reference(
    ratio: int, lengths: list[int], page_size: int, splits: int, seed: int
) -> None:
    call = arguments(ratio, lengths, page_size, splits, seed)
    names = [name for name in ("compressor", "index_compressor") if name in call]
    before = {n: dataclasses.replace(call[n], state=call[n].state.clone(), cache=call[n].cache.clone()) for n in names}
    for name in names:
        # A clone of a 4-D cache view has no page stride.
        if call[name].cache.ndim == 4:
            strides = call[name].cache.stride()
            raw = torch.as_strided(call[name].cache, (call[name].cache.shape[0], strides[0]), (strides[0], 1)).clone()
            before[name] = dataclasses.replace(before[name], cache=raw.as_strided(call[name].cache.shape, strides))
    store_attention_inputs(**call)
    key = reference.window_key(call["kv"], call["norm_weight"], call["rope"], call["positions"])
    held = reference.read(call["window"], call["window_slots"])
    assert close(held, reference.quantise(key), 1e-2) and close(held, key, 5e-2)
    for name in names:
        check_compressor(call[name], before[name], call)


@settings(max_examples=6, deadline=None)
@given(
    ratio=st.sampled_from([0, 4, 128]),
    lengths=st.lists(st.sampled_from([1, 4, 127, 128, 256]), min_size=1, max_size=3),
    heads=st.integers(1, 5),
    seed=st.integers(0, 2**31),
)
def test_queries_in_the_same_launch_are_those_of_prepare_queries_and_change_nothing_that_is_stored(
    ratio: int, lengths: list[int], heads: int, seed: int
) -> None:
    calls = [arguments(ratio, lengths, seed=seed) for _ in range(2)]
    generator = torch.Generator().manual_seed(seed)
    tokens = len(lengths)
    q = torch.randn(tokens, heads * 512 + 8192 * (ratio == 4), generator=generator).to(torch.bfloat16)
    indexed: dict[str, Any] = {}
    if ratio == 4:
        weights = torch.randn(2, tokens, 64, generator=generator)
        for call in calls:
            call["projected"] = torch.cat([call["projected"], weights], 2)
        indexed = {"first_column": calls[0]["projected"].shape[2] - 64}
    apart, together = calls
    shares = [{"projected": call["projected"]} if ratio == 4 else {} for call in calls]
    expected = prepare_queries(q.clone(), heads, apart["rope"], apart["positions"], **shares[0], **indexed)
    store_attention_inputs(**apart)
    queries = Queries.of(q.clone(), heads, **shares[1], **indexed)
    store_attention_inputs(**together, queries=queries)
    for found, wanted in zip((queries.view, queries.index_q, queries.index_weights), expected, strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or wanted is None or torch.equal(found.float(), wanted.float())
    for name in ("compressor", "index_compressor"):
        if name in apart:
            assert torch.equal(apart[name].state, together[name].state)
            held = [reference.read(call[name].cache, call[name].slots).nan_to_num() for call in calls]
            assert torch.equal(*held)
    assert torch.equal(*(reference.read(call["window"], call["window_slots"]) for call in calls))


def test_queries_of_other_tokens_or_another_projection_are_refused() -> None:
    call = arguments(4, [5, 6])
    q = torch.zeros(3, 512, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="queries must have 2 tokens"):
        store_attention_inputs(**call, queries=Queries.of(q, 1))
    q = torch.zeros(2, 512 + 8192, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="must be the same tensor"):
        store_attention_inputs(**call, queries=Queries.of(q, 1, projected=call["projected"].clone()))


def test_a_slot_of_minus_one_stores_nothing() -> None:
    call = arguments(0, [5, 6])
    call["window_slots"][:] = -1
    before = call["window"].clone()
    store_attention_inputs(**call)
    assert torch.equal(call["window"], before)


def test_no_tokens_store_nothing() -> None:
    store_attention_inputs(**arguments(4, []))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": torch.zeros(2, 512)}, "kv must be torch.bfloat16"),
        ({"kv": torch.zeros(2, 256, dtype=torch.bfloat16)}, "kv must have 512 columns"),
        ({"norm_weight": torch.zeros(512)}, "norm_weight must be torch.bfloat16"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, "positions must have shape"),
        ({"window": torch.zeros(2, 64, 1, 584)}, "window must be uint8"),
        ({"window": torch.zeros(2, 64, 1, 584, dtype=torch.uint8)}, "window must have 37440 bytes"),
        ({"window": torch.zeros(1, 16, 1, 584, dtype=torch.uint8)}, "window must have pages of 256, 64 or 2"),
        ({"projected": None}, "go together"),
        ({"projected": torch.zeros(1, 2, 2000)}, "compressor.first_column must be 0 to -48"),
        ({"compressor": None, "projected": None}, "index_compressor goes with a compressor of ratio 4"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        store_attention_inputs(**arguments(4, [5, 6]) | change)
