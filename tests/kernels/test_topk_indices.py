"""Top-512 in Triton's interpreter against a full sort, and the launch parameters."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sm120_kernels.ops.topk_indices import CHUNK_LIMIT, MAX_WIDTH, TOPK, Workspace, plan, topk_indices
from sm120_kernels.reference import topk_indices as reference

KINDS = ["distinct", "positive", "few values", "constant", "narrow", "rising", "clustered", "infinite", "one high"]


def scores_of(kind: str, rows: int, width: int, seed: int) -> torch.Tensor:
    scores = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return {
        "distinct": scores,
        "positive": scores.abs(),
        "few values": (scores * 2).round(),
        "constant": torch.full_like(scores, -3.0),
        "narrow": 1e4 + scores * 1e-2,
        "rising": scores.sort(dim=1).values,
        "clustered": scores + 10 * (torch.arange(width) // 700 % 5 == 3),
        "infinite": torch.where(scores > 1, torch.inf, torch.where(scores < -1, -torch.inf, scores)),
        "one high": torch.where(torch.arange(width) == width - 1, 1e30, scores),
    }[kind]


def call(
    scores: torch.Tensor, lengths: list[int], per_request: int = 1
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots, positions and the page table of a checked call; every column at or past a length is poisoned."""
    rows, width = scores.shape
    length = torch.tensor(lengths, dtype=torch.int32)
    poisoned = torch.where(torch.arange(width)[None, :] < length[:, None], scores, torch.nan)
    pages = -(-width // 64)
    generator = torch.Generator().manual_seed(width)
    table = torch.stack([torch.randperm(pages + 3, generator=generator)[:pages] for _ in range(rows // per_request)])
    out, raw = (torch.full((rows, TOPK), -7, dtype=torch.int32) for _ in range(2))
    workspace = Workspace.allocate(rows, width, "cpu")
    workspace.slots.fill_(2**31 - 1)
    table = table.to(torch.int32)
    topk_indices(poisoned, length, table, out, raw_out=raw, workspace=workspace, check=True)
    return out, raw, table


def verify(scores: torch.Tensor, lengths: list[int], per_request: int = 1) -> None:
    out, raw, table = call(scores, lengths, per_request)
    best = reference.topk_indices(scores, torch.tensor(lengths))
    for row, length in enumerate(lengths):
        count = min(TOPK, length)
        chosen = raw[row, :count].tolist()
        assert (raw[row, count:] == -1).all() and (out[row, count:] == -1).all()
        assert len(set(chosen)) == count and all(0 <= token < length for token in chosen)
        assert sorted(scores[row, chosen].tolist()) == sorted(scores[row, best[row]].tolist())
        assert out[row, :count].tolist() == reference.slots(chosen, table[row // per_request])


@settings(max_examples=25, deadline=None)
@given(
    width=st.one_of(st.sampled_from([512, 513, 1024, 1025, 8192]), st.integers(1, 3000)),
    fills=st.lists(st.sampled_from([0.0, 0.2, 0.55, 0.9, 1.0]), min_size=1, max_size=3),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**31),
)
@example(width=1, fills=[0.0, 1.0], kind="distinct", seed=0)
def test_the_set_of_largest_scores_is_exact(width: int, fills: list[float], kind: str, seed: int) -> None:
    verify(scores_of(kind, len(fills), width, seed), [round(fill * width) for fill in fills])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_several_chunks_are_merged_exactly(kind: str) -> None:
    verify(scores_of(kind, 6, 20000, 3), [20000, 8193, 513, 512, 16385, 17500])


@pytest.mark.parametrize("kind", ["distinct", "few values", "clustered", "constant"])
def test_rows_of_16_chunks_are_merged_exactly(kind: str) -> None:
    verify(scores_of(kind, 4, 140000, 4), [140000, 2048, 600, 70001])


def test_rows_of_one_request_share_its_page_table() -> None:
    verify(scores_of("distinct", 6, 1500, 5), [1500, 1499, 600, 513, 20, 0], per_request=3)


def test_the_result_of_a_row_does_not_depend_on_its_batch() -> None:
    scores = scores_of("few values", 3, 9000, 9)
    _, together, _ = call(scores, [9000, 9000, 9000])
    _, alone, _ = call(scores[1:2], [9000])
    assert torch.equal(together[1], alone[0])


@pytest.mark.parametrize("width", [700, 5000, 16384])
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, -1, -0x400000])
def test_nan_has_a_place_in_the_order_and_nothing_is_written_beside_the_result(width: int, bits: int) -> None:
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    number = scores_of("distinct", 1, width, 1)
    scores = torch.cat([nan.expand(1, width), torch.where(torch.arange(width) % 3 == 0, number, nan), number])
    around = torch.full((5, TOPK), -7, dtype=torch.int32)
    table = torch.arange(-(-width // 64), dtype=torch.int32).expand(3, -1).contiguous()
    topk_indices(scores, torch.full((3,), width, dtype=torch.int32), table, around[1:4])
    assert (around[0] == -7).all() and (around[4] == -7).all()
    ordered = torch.where(scores.isnan(), torch.inf if bits > 0 else -torch.inf, scores)
    for row, chosen in zip(ordered, around[1:4].long(), strict=True):
        assert len(chosen.unique()) == TOPK and ((chosen >= 0) & (chosen < width)).all()
        assert torch.equal(row[chosen].sort().values, row.topk(TOPK).values.sort().values)


def test_no_rows_give_an_empty_result() -> None:
    empty = topk_indices(torch.zeros(0, 70), torch.zeros(0, dtype=torch.int32), torch.zeros(0, 2, dtype=torch.int32))
    assert empty.shape == (0, TOPK)


def test_rows_without_scores_or_pages_hold_no_token() -> None:
    lengths = torch.full((2,), 600, dtype=torch.int32)
    for width, pages in ((0, 11), (700, 0)):
        out = topk_indices(torch.zeros(2, width), lengths, torch.zeros(2, pages, dtype=torch.int32))
        assert out.shape == (2, TOPK) and (out == -1).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.zeros(2, 700, dtype=torch.float64)}, "scores must be torch.float32"),
        ({"scores": torch.zeros(2, 1400)[:, ::2]}, "scores's rows must be contiguous"),
        ({"scores": torch.zeros(1400)}, "scores must have 0 rows and two dimensions"),
        ({"scores": torch.zeros(2, MAX_WIDTH + 64)}, "up to 262144 columns"),
        ({"lengths": torch.zeros(2, dtype=torch.int64)}, "lengths must be torch.int32"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, "lengths must have shape"),
        ({"page_table": torch.zeros(2, 11)}, "page_table must be torch.int32"),
        ({"page_table": torch.zeros((), dtype=torch.int32)}, "page_table must have 0 rows and two dimensions"),
        ({"page_table": torch.zeros(22, dtype=torch.int32)}, "page_table must have 22 rows and two dimensions"),
        ({"page_table": torch.zeros(2, 22, dtype=torch.int32)[:, ::2]}, "page_table's rows must be contiguous"),
        ({"lengths": torch.zeros(2, dtype=torch.int32, device="meta")}, "lengths is on meta"),
        ({"page_table": torch.zeros(3, 11, dtype=torch.int32)}, "not a multiple of the page table's 3"),
        ({"out": torch.zeros(2, 256, dtype=torch.int32)}, "out must have shape"),
        ({"raw_out": torch.zeros(2, TOPK, dtype=torch.int64)}, "raw_out must be torch.int32"),
        ({"scores": torch.zeros(2, 9000), "workspace": Workspace.allocate(1, 9000, "cpu")}, "the workspace has"),
        ({"lengths": torch.tensor([700, 701], dtype=torch.int32), "check": True}, "length of row 1 is 701"),
        ({"page_table": torch.full((2, 11), -1, dtype=torch.int32), "check": True}, "page id -1 of request 0"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_name(change: dict, message: str) -> None:
    arguments = {
        "scores": torch.zeros(2, 700),
        "lengths": torch.full((2,), 700, dtype=torch.int32),
        "page_table": torch.zeros(2, 11, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        topk_indices(**arguments | change)


@given(st.integers(1, MAX_WIDTH))
def test_a_plan_covers_the_width_and_keeps_every_group_apart(width: int) -> None:
    chosen = plan(width)
    columns = 32 * chosen.warps
    assert chosen.block * chosen.chunks >= width
    assert chosen.block % columns == 0 and chosen.block < 2**15
    assert chosen.groups * chosen.chunks >= 2 * TOPK
    if chosen.chunks == 1:
        assert chosen.groups % columns == 0 and chosen.block % chosen.groups == 0
    else:
        assert columns % chosen.groups == 0 and chosen.groups * chosen.chunks % columns == 0
        merged = 32 * chosen.merge_warps
        assert chosen.slots * chosen.chunks % merged == 0 and chosen.chunks * CHUNK_LIMIT % merged == 0
        assert chosen.chunks * CHUNK_LIMIT < 2**15
