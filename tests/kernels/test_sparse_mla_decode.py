"""Sparse MLA decode in Triton's interpreter against the float64 reference."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sm120_kernels import kv_layout
from sm120_kernels.ops.sparse_mla_decode import NARROW, WIDE, Plan, plan, sparse_mla_decode
from sm120_kernels.reference import sparse_mla_decode as reference


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the reference's norm; absolute where that is zero; NaN never passes."""
    return float((value.double() - expected).norm() / (expected.norm() or 1.0))


def index_list(rows: int, width: int, slots: int, absent: float, generator: torch.Generator) -> torch.Tensor:
    """Random slots, a share of them -1; the first and last slot of a page and of the cache are likely among them."""
    indices = torch.randint(0, slots, (rows, width), generator=generator, dtype=torch.int32)
    edge = torch.rand(rows, width, generator=generator)
    indices[edge < 0.1] = 0
    indices[edge > 0.9] = slots - 1
    indices[torch.rand(rows, width, generator=generator) < absent] = -1
    return indices


@st.composite
def calls(draw: st.DrawFn) -> dict:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    batch, heads = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 8, 16, 20]))
    call: dict = {
        "q": torch.randn(batch, heads, kv_layout.HEAD_DIM, generator=generator).to(torch.bfloat16),
        "scale": draw(st.sampled_from([None, 0.1])),
        "sink": torch.randn(heads, generator=generator) * 3 if draw(st.booleans()) else None,
        "chosen": replace(draw(st.sampled_from([NARROW, WIDE])), splits=draw(st.integers(1, 5))),
    }
    for prefix in ("", "extra_"):
        if prefix and draw(st.booleans()):
            continue
        page_size = draw(st.sampled_from(kv_layout.PAGE_SIZES))
        slots = page_size * draw(st.integers(1, 3))
        width = draw(st.integers(0 if prefix else 1, 100))
        cache = reference.random_cache(slots, page_size, generator)
        call[f"{prefix}cache"] = cache.view(torch.float8_e4m3fn) if draw(st.booleans()) else cache
        call[f"{prefix}indices"] = index_list(batch, width, slots, draw(st.sampled_from([0.0, 0.2, 1.0])), generator)
        if draw(st.booleans()):
            lengths = draw(st.lists(st.integers(0, width + 3), min_size=batch, max_size=batch))
            call[f"{prefix}lengths"] = torch.tensor(lengths, dtype=torch.int32)
    return call


@settings(max_examples=20, deadline=None)
@given(calls())
def test_any_call_equals_the_float64_reference(call: dict) -> None:
    batch, heads, dim = call["q"].shape
    poisoned = torch.full((batch, heads, dim), torch.nan, dtype=torch.bfloat16)
    out, lse = sparse_mla_decode(**call, out=poisoned, lse=torch.full((batch, heads), torch.nan), check=True)
    expected, expected_lse = reference.sparse_mla_decode(**{k: v for k, v in call.items() if k != "chosen"})
    assert error(out, expected) <= 1e-2
    empty = torch.isinf(expected_lse)
    assert torch.equal(lse[empty], expected_lse[empty].float())
    assert error(lse[~empty], expected_lse[~empty]) <= 1e-4
    assert not out[empty].any()


def example(batch: int = 3, heads: int = 16, width: int = 70) -> dict:
    generator = torch.Generator().manual_seed(1)
    return {
        "q": torch.randn(batch, heads, kv_layout.HEAD_DIM, generator=generator).to(torch.bfloat16),
        "cache": reference.random_cache(256, 64, generator),
        "indices": index_list(batch, width, 256, 0.1, generator),
    }


def test_a_row_gives_the_same_bits_alone_and_in_a_batch_cut_the_same_way() -> None:
    call = example()
    cut = replace(NARROW, splits=3)
    together, lse = sparse_mla_decode(**call, chosen=cut)
    for row in range(3):
        alone = call | {name: call[name][row : row + 1] for name in ("q", "indices")}
        out, row_lse = sparse_mla_decode(**alone, chosen=cut)
        assert torch.equal(out[0], together[row])
        assert torch.equal(row_lse[0], lse[row])


def test_the_number_of_shares_changes_only_the_last_bits() -> None:
    call = example()
    one, _ = sparse_mla_decode(**call, chosen=NARROW)
    many, _ = sparse_mla_decode(**call, chosen=replace(NARROW, splits=3))
    assert error(many, one.double()) <= 4e-3


def test_an_empty_batch_gives_empty_results() -> None:
    out, lse = sparse_mla_decode(**example(batch=0))
    assert out.shape == (0, 16, kv_layout.HEAD_DIM)
    assert lse.shape == (0, 16)


def test_queries_may_be_rows_of_a_wider_tensor() -> None:
    call = example()
    wide = torch.zeros(3, 20, kv_layout.HEAD_DIM + 64, dtype=torch.bfloat16)
    wide[:, :16, : kv_layout.HEAD_DIM] = call["q"]
    out, _ = sparse_mla_decode(**call, chosen=NARROW)
    strided, _ = sparse_mla_decode(**call | {"q": wide[:, :16, : kv_layout.HEAD_DIM]}, chosen=NARROW)
    assert torch.equal(out, strided)


GENERATOR = torch.Generator().manual_seed(2)
CACHE = reference.random_cache(128, 64, GENERATOR)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(3, 16, 512)}, "q must be bfloat16"),
        ({"q": torch.zeros(3, 16, 576, dtype=torch.bfloat16)}, "q must be bfloat16"),
        ({"q": torch.zeros(3, 129, 512, dtype=torch.bfloat16)}, "1 to 128 heads, got 129"),
        ({"q": torch.zeros(3, 0, 512, dtype=torch.bfloat16)}, "1 to 128 heads, got 0"),
        ({"q": torch.zeros(3, 512, 16, dtype=torch.bfloat16).mT}, "last stride 1"),
        ({"q": torch.zeros(3, 16, 516, dtype=torch.bfloat16)[:, :, :512]}, "multiples of 8"),
        ({"cache": CACHE.to(torch.float32)}, "cache must be uint8"),
        ({"cache": CACHE.contiguous()}, "37440 bytes from page to page, got 37376"),
        ({"cache": CACHE.squeeze(2)}, r"\[pages, page_size, 1, 584\]"),
        ({"cache": CACHE[:, :32]}, "256, 64 or 2 tokens, got 32"),
        (
            {"cache": CACHE.flatten()[1:].new_zeros(40000)[1:37441].as_strided((1, 64, 1, 584), (37440, 584, 584, 1))},
            "16 bytes",
        ),
        ({"indices": torch.zeros(3, 70, dtype=torch.int64)}, "indices must be torch.int32"),
        ({"indices": torch.zeros(2, 70, dtype=torch.int32)}, "indices must have 3 rows"),
        ({"indices": torch.zeros(70, 3, dtype=torch.int32).T}, "rows must be contiguous"),
        ({"lengths": torch.zeros(3)}, "lengths must be torch.int32"),
        ({"lengths": torch.zeros(4, dtype=torch.int32)}, r"lengths must have shape \[3\]"),
        ({"extra_cache": CACHE}, "go together"),
        ({"extra_lengths": torch.zeros(3, dtype=torch.int32)}, "extra_lengths without extra_indices"),
        (
            {"extra_cache": CACHE[:, :32], "extra_indices": torch.zeros(3, 1, dtype=torch.int32)},
            "extra_cache must have",
        ),
        ({"sink": torch.zeros(8)}, r"sink must have shape \[16\]"),
        ({"out": torch.zeros(3, 16, 512)}, "out must be torch.bfloat16"),
        ({"lse": torch.zeros(3, 8)}, "lse must have shape"),
        ({"sink": torch.zeros(16, device="meta")}, "sink is on meta"),
        ({"indices": torch.full((3, 70), 256, dtype=torch.int32), "check": True}, r"indices\[0, 0\] is 256, must be"),
        ({"indices": torch.full((3, 70), -2, dtype=torch.int32), "check": True}, "is -2, must be -1 or 0 to 255"),
    ],
)
def test_bad_input_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sparse_mla_decode(**example() | change)


def test_an_index_past_the_length_is_not_checked() -> None:
    call = example() | {"lengths": torch.tensor([70, 3, 0], dtype=torch.int32)}
    call["indices"][1, 3:] = 10**6
    call["indices"][2] = -7
    out, _ = sparse_mla_decode(**call, check=True)
    assert torch.isfinite(out).all()


@given(
    st.integers(1, 300),
    st.integers(1, 128),
    st.integers(0, 512),
    st.integers(0, 8192),
    st.sampled_from([84, 132, 188]),
    st.sampled_from([101_376, 232_448]),
)
def test_a_plan_fits_the_gpu_and_gives_no_program_nothing_to_do(
    batch: int, heads: int, width: int, extra_width: int, sms: int, shared: int
) -> None:
    cut = plan(batch, heads, width, extra_width, sms, shared)
    tiles = -(-width // cut.tokens) + -(-extra_width // cut.tokens)
    assert 1 <= cut.splits <= max(1, tiles)
    assert cut.heads == 16 or heads > 16
    assert cut.tokens == 32 or shared > 101_376


@pytest.mark.parametrize(
    "heads, batch, block, splits",
    [
        (16, 1, NARROW, 20),
        (16, 8, NARROW, 10),
        (16, 16, NARROW, 7),
        (16, 64, NARROW, 4),
        (64, 1, NARROW, 20),
        (64, 16, WIDE, 4),
        (64, 32, WIDE, 2),
        (64, 64, WIDE, 1),
    ],
)
def test_the_plan_is_the_fastest_of_the_sweep_it_was_fitted_to(
    heads: int, batch: int, block: Plan, splits: int
) -> None:
    assert plan(batch, heads, 128, 512, 132, 232_448) == replace(block, splits=splits)


def test_a_gpu_full_of_rows_does_not_split_them() -> None:
    assert plan(1000, 16, 128, 512, 188, 101_376).splits == 1
