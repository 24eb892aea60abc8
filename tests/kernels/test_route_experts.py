"""Routing in Triton's interpreter against the float64 reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm120_kernels.ops.route_experts import route_experts
from sm120_kernels.reference import route_experts as reference


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 5), splits=st.sampled_from([1, 4]), hashed=st.booleans(), seed=st.integers(0, 2**31))
def test_any_call_equals_the_float64_reference(tokens: int, splits: int, hashed: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    projected = torch.randn(splits, tokens, 256, generator=generator) * 4
    logits = projected.sum(0)
    if hashed:
        table = torch.randint(0, 256, (50, 6), generator=generator, dtype=torch.int32)
        given_arguments = {"table": table, "token_ids": torch.randint(0, 50, (tokens,), dtype=torch.int32)}
        bias = None
    else:
        bias, given_arguments = torch.randn(256, generator=generator), {}
    ids, weights = route_experts(projected, bias, **given_arguments)
    expected_ids, expected_weights = reference.route_experts(logits, bias, **given_arguments)
    assert torch.equal(ids.long(), expected_ids)
    assert (weights - expected_weights).abs().max() <= 1e-5
    assert (weights.sum(-1) - 1.5).abs().max() <= 1e-5


def test_equal_scores_give_the_lower_experts_first_and_huge_logits_stay_finite() -> None:
    logits = torch.tensor([0.0, 500.0, -500.0])[None, :, None].expand(1, 3, 256).contiguous()
    ids, weights = route_experts(logits, torch.zeros(256))
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert weights.isfinite().all()


def test_no_tokens_give_empty_results() -> None:
    ids, weights = route_experts(torch.zeros(2, 0, 256), torch.zeros(256))
    assert ids.shape == weights.shape == (0, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"projected": torch.zeros(2, 256)}, "projected must have 3 dimensions"),
        ({"projected": torch.zeros(1, 2, 255)}, "projected must have shape"),
        ({"bias": None}, "give either bias"),
        ({"bias": torch.zeros(255)}, "bias must have shape"),
        ({"table": torch.zeros(9, 6, dtype=torch.int32)}, "give either bias"),
        ({"bias": None, "table": torch.zeros(9, 6, dtype=torch.int32)}, "give either bias"),
        ({"ids": torch.zeros(2, 6, dtype=torch.int64)}, "ids must be torch.int32"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        route_experts(**{"projected": torch.zeros(1, 2, 256), "bias": torch.zeros(256)} | change)
