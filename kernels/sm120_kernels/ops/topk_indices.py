"""The best-scored compressed tokens of each row, as cache slots: the second half of the sparse-attention indexer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from sm120_kernels.aot import CompileCase
from sm120_kernels.checks import check_page_table, require, require_device, require_rows

TOPK = 512
PAGE_TOKENS = 64
MAX_WIDTH = 262144
LIMIT = 1024
GROUPS = 1024
ABSENT = tl.constexpr(-(2**31))


@triton.jit
def _sortable(bits):
    """An fp32 bit pattern as int32 of the same order, and back; only a NaN maps to ABSENT."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _search(keys, count, low, high, near, far, wanted, slack):
    """Raise `low` while at least `wanted` keys stay at or above it, until at most `wanted + slack` do.

    keys is a tuple of 1-D tensors, fewer than 2**15 keys in all. `count` of them are >= low, at least `wanted` of them
    if the search is to begin, and fewer than `wanted` are > high. A turn costs the latency of one sum over the program,
    so it counts against two marks at once, 16 bits each: first the caller's guess, then the thirds of what is left.
    Returns low and high; slack 0 ends at the wanted-th largest key, or earlier where exactly `wanted` keys are left.
    """
    near = tl.minimum(tl.maximum(near, low + 1), high)
    far = tl.minimum(tl.maximum(far, near), high)
    while (low < high) & (count > wanted + slack):
        reached = tl.where(keys[0] >= far, 0x10001, (keys[0] >= near).to(tl.int32))
        for r in tl.static_range(1, len(keys)):
            reached += tl.where(keys[r] >= far, 0x10001, (keys[r] >= near).to(tl.int32))
        both = tl.sum(reached)
        at_near = both & 0xFFFF
        at_far = both >> 16
        count = tl.where(at_far >= wanted, at_far, tl.where(at_near >= wanted, at_near, count))
        high = tl.where(at_far >= wanted, high, tl.where(at_near >= wanted, far, near) - 1)
        low = tl.where(at_far >= wanted, far, tl.where(at_near >= wanted, near, low))
        third = _part_of(low, high, 3)
        near = low + third
        far = tl.where(near > high - third, high, near + third)
    return low, high


@triton.jit
def _part_of(low, high, parts: tl.constexpr):
    """(high - low) / parts + 1, where the difference may need 32 bits."""
    return ((high - low).to(tl.uint32, bitcast=True) // parts + 1).to(tl.int32, bitcast=True)


@triton.jit
def _per_column(keys, mark):
    """Of each column of a tuple of 1-D tensors, how many keys are >= mark."""
    reached = (keys[0] >= mark).to(tl.int32)
    for r in tl.static_range(1, len(keys)):
        reached += (keys[r] >= mark).to(tl.int32)
    return reached


@triton.jit
def _bound(keys, TOPK: tl.constexpr, GROUPS: tl.constexpr):
    """A key that at least TOPK keys reach, and the largest key.

    The maxima of GROUPS groups of keys bound the answer from below: TOPK of them are keys themselves, so the TOPK-th
    largest key is no smaller than the TOPK-th largest maximum. Of independent scores about 1.4 TOPK lie above it.
    """
    PARTS: tl.constexpr = GROUPS // keys[0].shape[0]
    PER: tl.constexpr = len(keys) // PARTS
    maxima = ()
    for p in tl.static_range(PARTS):
        part = keys[p]
        for r in tl.static_range(1, PER):
            part = tl.maximum(part, keys[p + r * PARTS])
        maxima = maxima + (part,)
    smallest = tl.full([keys[0].shape[0]], 0x7FFFFFFF, tl.int32)
    largest = maxima[0]
    total = tl.zeros([keys[0].shape[0]], tl.float32)
    filled = tl.zeros([keys[0].shape[0]], tl.int32)
    for p in tl.static_range(PARTS):
        there = maxima[p] != ABSENT
        filled += there.to(tl.int32)
        smallest = tl.where(there, tl.minimum(smallest, maxima[p]), smallest)
        largest = tl.maximum(largest, maxima[p])
        total += tl.where(there, _sortable(maxima[p]).to(tl.float32, bitcast=True), 0.0)
    lowest, highest, total, count = tl.reduce((smallest, largest, total, filled), 0, _min_max_sums)
    # TOPK is half of GROUPS, and the median of the maxima lies close below their mean.
    mean = total / GROUPS
    margin = (_sortable(highest).to(tl.float32, bitcast=True) - mean) / 16
    near = _sortable((mean - 2 * margin).to(tl.int32, bitcast=True))
    far = _sortable(mean.to(tl.int32, bitcast=True))
    low, _ = _search(maxima, count, lowest, highest, near, far, TOPK, TOPK // 8)
    return low, highest


@triton.jit
def _min_max_sums(low_a, high_a, sum_a, count_a, low_b, high_b, sum_b, count_b):
    return tl.minimum(low_a, low_b), tl.maximum(high_a, high_b), sum_a + sum_b, count_a + count_b


@triton.jit
def _finish(
    keys_ptr,
    indices_ptr,
    candidates_ptr,
    out_row,
    raw_row,
    table,
    low,
    high,
    count,
    TOPK: tl.constexpr,
    LIMIT: tl.constexpr,
    GATHER: tl.constexpr,
    PAGE: tl.constexpr,
    RAW: tl.constexpr,
):
    """Write the cache slots of exactly TOPK of LIMIT keys; of equal ones at the border, the first.

    With GATHER an index is the place of a candidate, whose own index candidates_ptr holds.
    """
    slots = tl.arange(0, LIMIT)
    keys = tl.load(keys_ptr + slots, cache_modifier=".cg")
    indices = tl.load(indices_ptr + slots, mask=keys != ABSENT, other=0, cache_modifier=".cg")
    if GATHER:
        indices = tl.load(candidates_ptr + indices, mask=keys != ABSENT, other=0)
    page = tl.load(table + indices // PAGE)
    # Of about 1.4 TOPK candidates the TOPK-th is near the lower end.
    low, _ = _search((keys,), count, low, high, low + _part_of(low, high, 32), low + _part_of(low, high, 12), TOPK, 0)
    marked = keys >= low
    if tl.sum(marked.to(tl.int32)) > TOPK:
        larger = keys > low
        ties = (keys == low).to(tl.int32)
        marked = larger | ((ties > 0) & (tl.cumsum(ties) <= TOPK - tl.sum(larger.to(tl.int32))))
    places = tl.cumsum(marked.to(tl.int32)) - 1
    tl.store(out_row + places, page * PAGE + indices % PAGE, mask=marked)
    if RAW:
        tl.store(raw_row + places, indices, mask=marked)


@triton.jit
def _store_all(out_row, raw_row, table, length, TOPK: tl.constexpr, PAGE: tl.constexpr, RAW: tl.constexpr):
    """A row of at most TOPK tokens: every token in order, then -1."""
    indices = tl.arange(0, TOPK)
    inside = indices < length
    page = tl.load(table + indices // PAGE, mask=inside, other=0)
    tl.store(out_row + indices, tl.where(inside, page * PAGE + indices % PAGE, -1))
    if RAW:
        tl.store(raw_row + indices, tl.where(inside, indices, -1))


@triton.jit
def _prune(keys, low, high, first, keys_out, indices_out, TOPK: tl.constexpr, LIMIT: tl.constexpr):
    """Leave at most LIMIT of the keys >= low, the TOPK largest among them, with their indices in LIMIT slots.

    The index of keys[r][c] is first + r * columns + c. Unused slots hold ABSENT. Returns low and high, drawn together
    if that was needed, and how many keys are left.
    """
    COLUMNS: tl.constexpr = keys[0].shape[0]
    columns = _per_column(keys, low)
    count = tl.sum(columns)
    ties_before = tl.zeros_like(columns)
    ties_allowed = LIMIT
    if count > LIMIT:
        third = _part_of(low, high, 3)
        low, high = _search(keys, count, low, high, low + third, high - third, TOPK, LIMIT - TOPK)
        columns = _per_column(keys, low)
        count = tl.sum(columns)
        if count > LIMIT:
            # More than LIMIT keys reach the TOPK-th largest: it is equal to many. Keep the first of those.
            larger = _per_column(keys, low + 1)
            ties = columns - larger
            ties_before = tl.cumsum(ties) - ties
            ties_allowed = LIMIT - tl.sum(larger)
            columns = larger + tl.minimum(tl.maximum(ties_allowed - ties_before, 0), ties)
            count = tl.minimum(count, LIMIT)
    place = tl.cumsum(columns) - columns
    for r in tl.static_range(len(keys)):
        index = r * COLUMNS + tl.arange(0, COLUMNS)
        tie = keys[r] == low
        marked = (keys[r] > low) | (tie & (ties_before < ties_allowed))
        tl.store(keys_out + place, keys[r], mask=marked)
        tl.store(indices_out + place, first + index, mask=marked)
        place += marked.to(tl.int32)
        ties_before += tie.to(tl.int32)
    slots = tl.arange(0, LIMIT)
    tl.store(keys_out + slots, ABSENT, mask=slots >= count)
    return low, high, count


@triton.jit
def _load_scores(scores_ptr, first, length, width, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Keys of BLOCK scores from `first`, a tuple of rows with one key a thread; ABSENT past the length."""
    keys = ()
    for r in tl.static_range(BLOCK // COLUMNS):
        index = first + r * COLUMNS + tl.arange(0, COLUMNS)
        score = tl.load(scores_ptr + index, mask=index < width, other=0.0)
        keys = keys + (tl.where(index < length, _sortable(score.to(tl.int32, bitcast=True)), ABSENT),)
    return keys


@triton.jit
def _prune_kernel(
    scores_ptr,
    lengths_ptr,
    keys_ptr,
    indices_ptr,
    rows,
    width,
    scores_stride,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """A program leaves the candidates of one chunk of one row. Chunks come first: short rows end the grid early."""
    row = (tl.program_id(0) % rows).to(tl.int64)
    chunk = tl.program_id(0) // rows
    length = tl.minimum(tl.load(lengths_ptr + row), width)
    if (length > TOPK) & (chunk * BLOCK < length):
        keys = _load_scores(scores_ptr + row * scores_stride, chunk * BLOCK, length, width, BLOCK, COLUMNS)
        low, high = _bound(keys, TOPK, GROUPS)
        slots = (row * CHUNKS + chunk) * LIMIT
        _prune(keys, low, high, chunk * BLOCK, keys_ptr + slots, indices_ptr + slots, TOPK, LIMIT)


@triton.jit
def _load_keys(keys_ptr, used, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS rows of keys, of which the first `used` are there."""
    keys = ()
    for r in tl.static_range(ROWS):
        places = r * COLUMNS + tl.arange(0, COLUMNS)
        keys = keys + (tl.load(keys_ptr + places, mask=places < used * COLUMNS, other=ABSENT),)
    return keys


@triton.jit
def _select_kernel(
    scores_ptr,
    lengths_ptr,
    table_ptr,
    out_ptr,
    raw_ptr,
    keys_ptr,
    indices_ptr,
    final_keys_ptr,
    final_indices_ptr,
    width,
    rows_per_request,
    scores_stride,
    table_stride,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    RAW: tl.constexpr,
):
    """A program writes one row of the result, from its scores (CHUNKS == 1) or from the candidates of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + row), width)
    table = table_ptr + row // rows_per_request * table_stride
    out_row = out_ptr + row * TOPK
    raw_row = raw_ptr + row * TOPK
    if length <= TOPK:
        _store_all(out_row, raw_row, table, length, TOPK, PAGE, RAW)
    else:
        final_keys = final_keys_ptr + row * LIMIT
        final_indices = final_indices_ptr + row * LIMIT
        candidates = row * CHUNKS * LIMIT
        if CHUNKS == 1:
            keys = _load_scores(scores_ptr + row * scores_stride, 0, length, width, BLOCK, COLUMNS)
        else:
            used = tl.cdiv(length, BLOCK) * (LIMIT // COLUMNS)
            keys = _load_keys(keys_ptr + candidates, used, CHUNKS * LIMIT // COLUMNS, COLUMNS)
        low, high = _bound(keys, TOPK, GROUPS)
        low, high, count = _prune(keys, low, high, 0, final_keys, final_indices, TOPK, LIMIT)
        tl.debug_barrier()
        _finish(
            final_keys,
            final_indices,
            indices_ptr + candidates,
            out_row,
            raw_row,
            table,
            low,
            high,
            count,
            TOPK,
            LIMIT,
            CHUNKS > 1,
            PAGE,
            RAW,
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Launch parameters of one call; nothing in them depends on the lengths.

    Attributes:
        block: scores a program holds in registers.
        chunks: programs a row, a power of two; above 1 another launch merges their candidates.
        warps: warps a program.
        merge_warps: warps of a program of the last launch.
    """

    block: int
    chunks: int
    warps: int
    merge_warps: int = 0


def plan(width: int) -> Plan:
    """Choose launch parameters for rows of up to `width` scores."""
    if width <= 8192:
        block = max(1024, triton.next_power_of_2(width))
        return Plan(block, 1, max(4, block // 512))
    chunks = triton.next_power_of_2(triton.cdiv(width, 8192))
    return Plan(8192, chunks, 16, max(4, min(32, 2 * chunks)))


def prune_constants(chosen: Plan) -> dict[str, Any]:
    """Constexprs of the launch that goes over the chunks."""
    return {
        "TOPK": TOPK,
        "BLOCK": chosen.block,
        "CHUNKS": chosen.chunks,
        "LIMIT": LIMIT,
        "COLUMNS": 32 * chosen.warps,
        "GROUPS": GROUPS,
    }


def select_constants(chosen: Plan, raw: bool) -> dict[str, Any]:
    """Constexprs of the launch that goes over the rows."""
    return {
        "TOPK": TOPK,
        "BLOCK": chosen.block,
        "CHUNKS": chosen.chunks,
        "LIMIT": LIMIT,
        "COLUMNS": 32 * (chosen.merge_warps or chosen.warps),
        "GROUPS": GROUPS,
        "PAGE": PAGE_TOKENS,
        "RAW": raw,
    }


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Scratch of a call; holds nothing between calls, so one serves all layers and graph replays of a stream.

    Attributes:
        keys, indices: [slots] int32 each.
    """

    keys: torch.Tensor
    indices: torch.Tensor

    @staticmethod
    def allocate(rows: int, width: int, device: torch.device | str) -> Workspace:
        """A workspace for calls of up to `rows` rows and `width` scores: 8 KiB a row and 8 KiB a chunk."""
        slots = rows * _slots_per_row(plan(width))
        return Workspace(*(torch.empty(slots, dtype=torch.int32, device=device) for _ in range(2)))


def _slots_per_row(chosen: Plan) -> int:
    """The final candidates' slots, then each chunk's."""
    return LIMIT * (1 if chosen.chunks == 1 else 1 + chosen.chunks)


def topk_indices(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    raw_out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    check: bool = False,
) -> torch.Tensor:
    """Cache slots of the best-scored tokens of each row.

    A row of at most 512 tokens takes all of them, in order, without reading a score (so the logits op may skip it).
    A longer row takes the set of its 512 largest scores exactly. Which of several equal scores at the border is
    taken, and the order in a row, follow from the row's own scores and length alone: the same in every run and batch.
    Slot of token t: page_table[request, t // 64] * 64 + t % 64. Unused places hold -1.

    One launch for width up to 8192: a program a row. Beyond, two, with a program a chunk of a row before.

    Args:
        scores: float32 [rows, width], rows contiguous; width up to 262144. Columns at or past the length are not
            used. NaN is not supported.
        lengths: [rows] int32; more than width counts as width.
        page_table: [requests, pages] int32, rows contiguous; rows a multiple of requests, the rows of one request
            following each other.
        out: int32 [rows, 512], contiguous; allocated when None.
        raw_out: the same shape: receives the token positions themselves, -1 where unused.
        workspace: for at least rows and width; allocated when None.
        check: also verify lengths and page ids. For debugging: it waits for the GPU and copies lengths and page
            table to the CPU, so it cannot be used under graph capture.

    Returns:
        out.

    Raises:
        ValueError: a wrong dtype, shape, stride or device, too wide a row, too small a workspace; with check, an index
            out of range.

    The semantics are those of SGLang 0.5.23's `topk_transform_paged` with page_size 64.
    """
    rows, width = scores.shape if scores.ndim == 2 else (0, 0)
    require_rows(scores, "scores", torch.float32, rows)
    require(lengths, "lengths", torch.int32, (rows,))
    requests = page_table.shape[0]
    require_rows(page_table, "page_table", torch.int32, requests)
    if rows and (requests == 0 or rows % requests):
        raise ValueError(f"scores has {rows} rows, not a multiple of the page table's {requests}")
    if width > MAX_WIDTH:
        raise ValueError(f"scores may have up to {MAX_WIDTH} columns, got {width}")
    if out is None:
        out = torch.empty((rows, TOPK), dtype=torch.int32, device=scores.device)
    require(out, "out", torch.int32, (rows, TOPK))
    if raw_out is not None:
        require(raw_out, "raw_out", torch.int32, (rows, TOPK))
    require_device(scores.device, lengths=lengths, page_table=page_table, out=out, raw_out=raw_out)
    if rows == 0:
        return out
    if check:
        check_page_table(lengths, page_table, width, PAGE_TOKENS, 0)
    chosen = plan(width)
    if workspace is None:
        workspace = Workspace.allocate(rows, width, scores.device)
    require_device(scores.device, workspace=workspace.keys)
    if workspace.keys.numel() < rows * _slots_per_row(chosen):
        raise ValueError(
            f"the workspace has {workspace.keys.numel()} slots, {rows} rows of {width} scores need "
            f"{rows * _slots_per_row(chosen)}"
        )

    seen = min(width, page_table.shape[1] * PAGE_TOKENS)
    keys, indices = workspace.keys, workspace.indices
    chunk_keys, chunk_indices = keys[rows * LIMIT :], indices[rows * LIMIT :]
    if chosen.chunks > 1:
        _prune_kernel[(rows * chosen.chunks,)](
            scores,
            lengths,
            chunk_keys,
            chunk_indices,
            rows,
            seen,
            scores.stride(0),
            **prune_constants(chosen),
            num_warps=chosen.warps,
        )
    _select_kernel[(rows,)](
        scores,
        lengths,
        page_table,
        out,
        out if raw_out is None else raw_out,
        chunk_keys if chosen.chunks > 1 else keys,
        chunk_indices if chosen.chunks > 1 else indices,
        keys,
        indices,
        seen,
        rows // requests,
        scores.stride(0),
        page_table.stride(0),
        **select_constants(chosen, raw_out is not None),
        num_warps=chosen.merge_warps or chosen.warps,
    )
    return out


def compile_cases() -> Iterator[CompileCase]:
    """Both launches at every block size, and with raw positions."""
    arguments = {
        "scores_ptr": "*fp32:16",
        **dict.fromkeys(("lengths_ptr", "table_ptr", "out_ptr", "raw_ptr", "keys_ptr", "indices_ptr"), "*i32:16"),
        **dict.fromkeys(("final_keys_ptr", "final_indices_ptr"), "*i32:16"),
        **dict.fromkeys(("rows", "rows_per_request"), "i32"),
        **dict.fromkeys(("width", "scores_stride", "table_stride"), "i32:16"),
    }

    def case(kernel: Any, shape: str, constexprs: dict[str, Any], warps: int) -> CompileCase:
        used = {name: kind for name, kind in arguments.items() if name in kernel.arg_names}
        return CompileCase("topk_indices", shape, kernel, used, constexprs, warps)

    for width, raw in (
        (1024, False),
        (2048, False),
        (4096, False),
        (8192, False),
        (8192, True),
        (65536, False),
        (262144, False),
    ):
        chosen = plan(width)
        label = f"width {width}" + (", raw positions" if raw else "")
        if chosen.chunks > 1:
            yield case(_prune_kernel, f"{label}, chunks", prune_constants(chosen), chosen.warps)
        yield case(_select_kernel, label, select_constants(chosen, raw), chosen.merge_warps or chosen.warps)
