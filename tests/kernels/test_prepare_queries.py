"""Query preparation in Triton's interpreter against the float64 reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm120_kernels.ops.prepare_queries import prepare_queries
from sm120_kernels.reference import prepare_queries as reference
from sm120_kernels.reference.inv_rope_wo_a import rope_table

HEADS = 6


def arguments(tokens: int, indexed: bool, splits: int = 2, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(tokens, HEADS * 512 + 8192 * indexed + 8, generator=generator).to(torch.bfloat16)[:, :-8]
    found: dict[str, Any] = {
        "q": q,
        "heads": HEADS,
        "rope": rope_table(100),
        "positions": torch.randint(0, 100, (tokens,), generator=generator, dtype=torch.int32),
    }
    if indexed:
        found |= {"projected": torch.randn(splits, tokens, 100, generator=generator), "first_column": 33}
    return found


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm())


@settings(max_examples=6, deadline=None)
@given(tokens=st.integers(1, 4), indexed=st.booleans(), splits=st.sampled_from([1, 2]), seed=st.integers(0, 2**31))
def test_any_call_equals_the_float64_reference(tokens: int, indexed: bool, splits: int, seed: int) -> None:
    call = arguments(tokens, indexed, splits, seed)
    weights = call["projected"].sum(0)[:, 33:97] if indexed else None
    known = (call["q"].clone(), HEADS, call["rope"], call["positions"])
    query, index_q, index_weights = prepare_queries(**call)
    expected = reference.prepare_queries(*known, head_weights=weights)
    assert error(query, expected[0]) <= 3e-3
    if indexed:
        assert index_q is not None and index_weights is not None
        assert error(index_q, expected[1]) <= 5e-3
        assert error(index_weights, expected[2]) <= 1e-4
        exact = reference.prepare_queries(*known, head_weights=weights, quantised=False)
        assert error(index_q.double() * (expected[2] / exact[2])[..., None], exact[1]) <= 5e-2


def test_the_rotation_keeps_scores_between_queries_and_keys() -> None:
    call = arguments(2, True)
    before = call["q"][:, HEADS * 512 :].double().unflatten(1, (64, 128)).norm(dim=-1)
    _, index_q, weights = prepare_queries(**call)
    assert index_q is not None and weights is not None
    scale = weights / (call["projected"].sum(0)[:, 33:97] * (128 * 64) ** -0.5)
    assert ((index_q.double() * scale[..., None]).norm(dim=-1) / before - 1).abs().max() < 0.03


def test_a_row_of_zeros_gives_zeros() -> None:
    call = arguments(1, True)
    call["q"].zero_()
    query, index_q, weights = prepare_queries(**call)
    assert index_q is not None and weights is not None
    assert not query.any() and not index_q.float().any() and weights.isfinite().all()


def test_no_tokens_give_empty_results() -> None:
    query, index_q, weights = prepare_queries(**arguments(0, True))
    assert index_q is not None and weights is not None
    assert query.shape == (0, HEADS, 512) and index_q.shape == (0, 64, 128) and weights.shape == (0, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, HEADS * 512 + 8192)}, "q must be torch.bfloat16"),
        ({"heads": 7}, "q must have 7 x 512 columns"),
        ({"rope": torch.zeros(9, 32)}, "rope must have shape"),
        ({"positions": torch.zeros(2)}, "positions must be torch.int32 or torch.int64"),
        ({"projected": None}, "give both or neither"),
        ({"first_column": 37}, "first_column must be 0 to 36"),
        ({"index_q": torch.zeros(2, 64, 128)}, "index_q must be torch.float8_e4m3fn"),
        ({"index_weights": torch.zeros(2, 63)}, "index_weights must have shape"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepare_queries(**arguments(2, True) | change)
