"""The mHC boundary in Triton's interpreter against the float64 reference, and its cuts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm120_kernels.ops.mhc_post_pre_norm import HIDDEN, Boundary, Plan, mhc_post_pre_norm, plan
from sm120_kernels.reference import mhc_post_pre_norm as reference

WIDE = Plan(16, 128, 2)
CUTS = [Plan(16, 64, 2), Plan(32, 32, 4), WIDE]


def arguments(tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return reference.random_arguments(tokens, torch.Generator().manual_seed(seed))


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm())


def poisoned(tokens: int) -> Boundary:
    return Boundary(*(value.fill_(torch.nan) for value in Boundary.empty(tokens, "cpu")))


@settings(max_examples=4, deadline=None)
@given(
    tokens=st.sampled_from([1, 2, 17]),
    cut=st.sampled_from(CUTS),
    iterations=st.sampled_from([1, 3]),
    seed=st.integers(0, 2**31),
)
def test_any_call_equals_the_float64_reference(tokens: int, cut: Plan, iterations: int, seed: int) -> None:
    given_arguments = arguments(tokens, seed)
    out = mhc_post_pre_norm(**given_arguments, iterations=iterations, out=poisoned(tokens), chosen=cut)
    expected = reference.mhc_post_pre_norm(**given_arguments, iterations=iterations)
    assert error(out.residual, expected.residual) <= 3e-3
    assert error(out.x, expected.x) <= 5e-3
    assert error(out.post, expected.post) <= 5e-3
    assert error(out.comb, expected.comb) <= 5e-3


def test_twenty_iterations_leave_columns_and_rows_that_sum_to_one() -> None:
    comb = mhc_post_pre_norm(**arguments(2), chosen=WIDE).comb
    assert (comb.sum(-2) - 1).abs().max() < 1e-4
    assert (comb.sum(-1) - 1).abs().max() < 1e-2


def test_results_may_overwrite_the_arguments() -> None:
    given_arguments = arguments(3)
    expected = mhc_post_pre_norm(**given_arguments, iterations=1, chosen=WIDE)
    own = Boundary(*(given_arguments[name] for name in ("residual", "post", "comb")), torch.empty_like(expected.x))
    mhc_post_pre_norm(**given_arguments, iterations=1, out=own, chosen=WIDE)
    assert all(torch.equal(mine, other) for mine, other in zip(own, expected, strict=True))


def test_a_token_gives_the_same_bits_in_every_batch_with_the_same_cut() -> None:
    given_arguments = arguments(17)
    batch = mhc_post_pre_norm(**given_arguments, iterations=1, chosen=WIDE)
    one = {n: v[16:] if n in ("y", "residual", "post", "comb") else v for n, v in given_arguments.items()}
    alone = mhc_post_pre_norm(**one, iterations=1, chosen=WIDE)
    assert all(torch.equal(mine[16:], other) for mine, other in zip(batch, alone, strict=True))


def test_no_tokens_give_empty_results() -> None:
    assert mhc_post_pre_norm(**arguments(0)).x.shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": torch.zeros(2, HIDDEN)}, "y must be torch.bfloat16"),
        ({"residual": torch.zeros(2, 3, HIDDEN, dtype=torch.bfloat16)}, "residual must have shape"),
        ({"post": torch.zeros(4, 2).T}, "post must be contiguous"),
        ({"comb": torch.zeros(2, 16)}, "comb must have shape"),
        ({"fn": torch.zeros(24, 4 * HIDDEN)}, "fn must be torch.bfloat16"),
        ({"scale": torch.zeros(2)}, "scale must have shape"),
        ({"base": torch.zeros(23)}, "base must have shape"),
        ({"norm_weight": torch.zeros(HIDDEN)}, "norm_weight must be torch.bfloat16"),
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"out": Boundary.empty(3, "cpu")}, "out.residual must have shape"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mhc_post_pre_norm(**arguments(2) | change)


@given(tokens=st.integers(1, 5000), sms=st.sampled_from([1, 132, 188]))
def test_a_plan_covers_every_column_once(tokens: int, sms: int) -> None:
    cut = plan(tokens, sms)
    assert cut.shares * cut.steps * cut.columns == HIDDEN
    assert cut.shares & (cut.shares - 1) == 0
