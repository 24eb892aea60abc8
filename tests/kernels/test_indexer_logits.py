"""Indexer logits in Triton's interpreter against the float64 reference, and the launch parameters."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sm120_kernels import aot
from sm120_kernels.ops.indexer_logits import MAX_BALANCED_UNITS, PAGE_BYTES, PROGRAMS_PER_SM, indexer_logits, plan
from sm120_kernels.reference import indexer_logits as reference

LENGTHS = st.one_of(st.sampled_from([0, 1, 63, 64, 65, 128, 512, 513]), st.integers(0, 700))


def arguments(requests: int, rows: int, lengths: list[int], seed: int = 0) -> dict:
    generator = torch.Generator().manual_seed(seed)
    columns = max(1, -(-max(lengths, default=0) // 64))
    pages = requests * columns + 1
    return {
        "q": torch.randn(requests, rows, 64, 128, generator=generator).to(torch.float8_e4m3fn),
        "cache": reference.random_cache(pages, generator),
        "weights": torch.randn(requests * rows, 64, generator=generator),
        "lengths": torch.tensor(lengths, dtype=torch.int32),
        "page_table": torch.randperm(pages, generator=generator)[1:].view(requests, columns).to(torch.int32),
        "width": columns * 64,
    }


@st.composite
def calls(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    requests, rows = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return requests, rows, draw(st.lists(LENGTHS, min_size=requests * rows, max_size=requests * rows))


@settings(max_examples=25, deadline=None)
@given(call=calls(), skip_length=st.sampled_from([0, 64, 512]), seed=st.integers(0, 2**31))
@example(call=(3, 1, [0, 0, 0]), skip_length=0, seed=0)
@example(call=(2, 2, [512, 513, 1, 640]), skip_length=512, seed=0)
def test_any_call_equals_the_float64_reference_and_writes_nothing_else(
    call: tuple[int, int, list[int]], skip_length: int, seed: int
) -> None:
    given_arguments = arguments(*call, seed)
    out = torch.full((len(call[2]), given_arguments["width"] + 3), torch.nan)[:, : given_arguments["width"]]
    indexer_logits(**given_arguments, out=out, skip_length=skip_length, check=True)
    expected = reference.indexer_logits(**given_arguments, skip_length=skip_length)
    written = ~expected.isnan()
    assert torch.equal(~out.isnan(), written)
    assert (out - expected)[written].norm() <= 1e-5 * expected[written].norm()


def test_more_than_512_units_are_scored_without_balancing() -> None:
    given_arguments = arguments(MAX_BALANCED_UNITS + 1, 1, [i % 70 for i in range(MAX_BALANCED_UNITS + 1)])
    expected = reference.indexer_logits(**given_arguments)
    out = torch.full_like(expected, torch.nan, dtype=torch.float32)
    indexer_logits(**given_arguments, out=out)
    assert torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-3, equal_nan=True)


def test_a_length_over_the_width_counts_as_the_width() -> None:
    given_arguments = arguments(1, 1, [100]) | {"width": 70}
    out = torch.full((1, 80), torch.nan)
    indexer_logits(**given_arguments, out=out[:, :70])
    assert (~out.isnan()).sum() == 70


def test_no_rows_and_no_pages_give_an_empty_result() -> None:
    given_arguments = arguments(1, 1, [5])
    empty = {name: given_arguments[name][:0] for name in ("q", "weights", "lengths", "page_table")}
    assert indexer_logits(**given_arguments | empty).shape == (0, 64)
    no_pages = {"page_table": given_arguments["page_table"][:, :0]}
    assert indexer_logits(**given_arguments | no_pages).shape == (1, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 1, 64, 128)}, "q must be torch.float8_e4m3fn"),
        ({"q": torch.zeros(2, 1, 32, 128).to(torch.float8_e4m3fn)}, r"q must be \[requests, rows, 64, 128\]"),
        ({"q": torch.zeros(2, 1, 64, 256).to(torch.float8_e4m3fn)[..., ::2]}, "q must be contiguous"),
        ({"cache": torch.zeros(9, 8320, dtype=torch.uint8)}, "8448 bytes"),
        ({"cache": torch.zeros(9, PAGE_BYTES, dtype=torch.int8)}, "cache must be uint8 or float8_e4m3fn"),
        ({"cache": torch.zeros(9, 2 * PAGE_BYTES, dtype=torch.uint8)[:, ::2]}, "cache must be contiguous"),
        ({"weights": torch.zeros(2, 32)}, "weights must have shape"),
        ({"weights": torch.zeros(2, 64, dtype=torch.bfloat16)}, "weights must be torch.float32"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "lengths must be torch.int32"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths must have shape"),
        ({"page_table": torch.zeros(3, 2, dtype=torch.int32)}, "page_table must have 2 rows"),
        ({"weights": torch.zeros(2, 64, device="meta")}, "weights is on meta"),
        ({"page_table": torch.zeros(2, 4, dtype=torch.int32)[:, ::2]}, "page_table's rows must be contiguous"),
        ({"width": 0}, "width must be positive"),
        ({"skip_length": -1}, "skip_length not negative"),
        ({"out": torch.zeros(2, 64)}, "out must have 128 columns"),
        ({"out": torch.zeros(2, 128, dtype=torch.float64)}, "out must be torch.float32"),
        ({"lengths": torch.tensor([129, 0], dtype=torch.int32), "check": True}, "length of row 0 is 129"),
        ({"lengths": torch.tensor([0, -1], dtype=torch.int32), "check": True}, "length of row 1 is -1"),
        ({"page_table": torch.full((2, 2), 5, dtype=torch.int32), "check": True}, "page id 5 of request 0, page 0"),
        ({"page_table": torch.tensor([[0, 0], [1, -1]], dtype=torch.int32), "check": True}, "page id -1 of request 1"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        indexer_logits(**arguments(2, 1, [128, 65]) | change)


@given(
    requests=st.integers(1, 5000),
    rows=st.integers(1, 9),
    max_pages=st.integers(1, 4096),
    sms=st.sampled_from([1, 132, 188]),
)
def test_a_plan_covers_every_row_and_fits_the_grid(requests: int, rows: int, max_pages: int, sms: int) -> None:
    for capability in [*PROGRAMS_PER_SM, (8, 0)]:
        chosen = plan(requests, rows, max_pages, sms, capability)
        assert chosen.units == requests * -(-rows // chosen.rows)
        if chosen.balanced_units:
            assert chosen.units <= chosen.balanced_units < 2 * chosen.units
            assert chosen.programs <= sms * 4
        else:
            assert chosen.programs == chosen.units * chosen.splits
            assert chosen.splits <= max_pages


@pytest.mark.parametrize("rows", [1, 2])
def test_the_programs_of_a_plan_are_all_resident_on_sm_120(rows: int) -> None:
    table = [row for row in aot.read_table() if row.op == "indexer_logits" and row.shape.startswith(f"{rows} rows")]
    assert table
    assert min(row.blocks_per_sm for row in table) >= PROGRAMS_PER_SM[12, 0][rows]
