"""The best-scored compressed tokens of each row, as cache slots: the second half of the sparse-attention indexer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from sm120_kernels import serving
from sm120_kernels.aot import CompileCase
from sm120_kernels.checks import check_page_table, has_dependent_launch, require, require_device, require_rows

TOPK = 512
PAGE_TOKENS = 64
MAX_WIDTH = 262144
LIMIT = 1024
CHUNK_LIMIT = 512
GROUPS = 2048
ABSENT = tl.constexpr(-(2**31))
UNKNOWN = tl.constexpr(2**31 - 1)


@triton.jit
def _sortable(bits):
    """An fp32 bit pattern as int32 of the same order, and back; only a NaN maps to ABSENT."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(score):
    """The sortable key of an fp32 score. A NaN's too lies between the two marks, so that every row has enough keys."""
    key = _sortable(score.to(tl.int32, bitcast=True))
    return tl.minimum(tl.maximum(key, ABSENT + 1), UNKNOWN - 1)


@triton.jit
def _search(keys, low, high, near, far, wanted, slack):
    """Raise `low` until at most `wanted + slack` keys, but no fewer than `wanted`, are at or above it.

    keys is a tuple of 1-D tensors, fewer than 2**15 keys in all. At least `wanted` of them are >= low and fewer than
    `wanted` are > high. A turn costs the latency of one sum over the program, so it counts against two marks at once,
    16 bits each: first the caller's guess, then in turn a place interpolated between the two known counts, and thirds.
    Returns low, high and the number of keys >= low, UNKNOWN where low is the caller's. With slack 0, low becomes the
    wanted-th largest key, or ends earlier where exactly `wanted` keys are left.
    """
    near = tl.minimum(tl.maximum(near, low + 1), high)
    far = tl.minimum(tl.maximum(far, near), high)
    count = low * 0 + UNKNOWN
    above = low * 0
    interpolate = low == low
    while (low < high) & (count > wanted + slack):
        reached = tl.where(keys[0] >= far, 0x10001, (keys[0] >= near).to(tl.int32))
        for r in tl.static_range(1, len(keys)):
            reached += tl.where(keys[r] >= far, 0x10001, (keys[r] >= near).to(tl.int32))
        both = tl.sum(reached)
        at_near = both & 0xFFFF
        at_far = both >> 16
        count = tl.where(at_far >= wanted, at_far, tl.where(at_near >= wanted, at_near, count))
        above = tl.where(at_far >= wanted, above, tl.where(at_near >= wanted, at_far, at_near))
        high = tl.where(at_far >= wanted, high, tl.where(at_near >= wanted, far, near) - 1)
        low = tl.where(at_far >= wanted, far, tl.where(at_near >= wanted, near, low))
        span = (high - low).to(tl.uint32, bitcast=True).to(tl.float32)
        inside = (count - above).to(tl.float32)
        # Of keys spread evenly, this far from low; give or take the half of what chance allows.
        part = (count - wanted - slack // 2).to(tl.float32) / inside
        spread = 0.5 / tl.sqrt(inside)
        third = _part_of(low, high, 3)
        guess = interpolate & (count != UNKNOWN)
        near = low + tl.where(guess, _scaled(span, tl.maximum(part - spread, 0.0)), third)
        thirds = tl.where(near > high - third, high, near + third)
        far = tl.where(guess, low + _scaled(span, tl.minimum(part + spread, 0.999)), thirds)
        near = tl.minimum(tl.maximum(near, low + 1), high)
        far = tl.minimum(tl.maximum(far, near), high)
        interpolate = interpolate == 0
    return low, high, count


@triton.jit
def _part_of(low, high, parts: tl.constexpr):
    """(high - low) / parts + 1, where the difference may need 32 bits."""
    return ((high - low).to(tl.uint32, bitcast=True) // parts + 1).to(tl.int32, bitcast=True)


@triton.jit
def _scaled(span, part):
    """part * span, part in 0 to 1, as the 32 bits to add to a key."""
    return (span * part).to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _per_column(keys, mark):
    """Of each column of a tuple of 1-D tensors, how many keys are >= mark."""
    reached = (keys[0] >= mark).to(tl.int32)
    for r in tl.static_range(1, len(keys)):
        reached += (keys[r] >= mark).to(tl.int32)
    return reached


@triton.jit
def _bound(maxima, TOPK: tl.constexpr):
    """A key that at least TOPK keys reach, and the largest key, from the maxima of groups of keys.

    TOPK of the maxima are keys themselves, so the TOPK-th largest key is no smaller than the TOPK-th largest maximum.
    Of independent scores about 1.4 TOPK lie above it with 2 TOPK groups, 1.2 TOPK with 4 TOPK. Fewer than TOPK groups
    that hold a key say nothing: the bound is then the smallest key.
    """
    smallest = tl.full([maxima[0].shape[0]], 0x7FFFFFFF, tl.int32)
    largest = maxima[0]
    total = tl.zeros([maxima[0].shape[0]], tl.float32)
    filled = tl.zeros([maxima[0].shape[0]], tl.int32)
    for r in tl.static_range(len(maxima)):
        there = maxima[r] != ABSENT
        filled += there.to(tl.int32)
        smallest = tl.where(there, tl.minimum(smallest, maxima[r]), smallest)
        largest = tl.maximum(largest, maxima[r])
        total += tl.where(there, _sortable(maxima[r]).to(tl.float32, bitcast=True), 0.0)
    lowest, highest, total, count = tl.reduce((smallest, largest, total, filled), 0, _min_max_sums)
    # The median of maxima lies close below their mean, the upper quartile about an eighth of the way to the largest.
    mean = total / count
    margin = (_sortable(highest).to(tl.float32, bitcast=True) - mean) / 16
    shift = tl.where(count >= 3 * TOPK, 1.0, -2.0)
    near = _sortable((mean + shift * margin).to(tl.int32, bitcast=True))
    far = _sortable((mean + (shift + 2) * margin).to(tl.int32, bitcast=True))
    end = tl.where(count >= TOPK, highest, lowest)
    low, _, _ = _search(maxima, lowest, end, near, far, TOPK, TOPK // 8)
    return tl.where(count >= TOPK, low, ABSENT + 1), highest


@triton.jit
def _min_max_sums(low_a, high_a, sum_a, count_a, low_b, high_b, sum_b, count_b):
    return tl.minimum(low_a, low_b), tl.maximum(high_a, high_b), sum_a + sum_b, count_a + count_b


@triton.jit
def _first_of_equal(keys, low, limit):
    """Of the keys >= low, `limit` of them: all that are larger, and of the equal ones the first, column by column.

    Returns how many of each column, the equal ones before each column, and how many of the equal ones in all.
    """
    larger = _per_column(keys, low + 1)
    ties = _per_column(keys, low) - larger
    before = tl.cumsum(ties) - ties
    allowed = limit - tl.sum(larger)
    return larger + tl.minimum(tl.maximum(allowed - before, 0), ties), before, allowed


@triton.jit
def _compact(
    keys, indices, first, step, low, high, keys_out, indices_out, used, TOPK: tl.constexpr, LIMIT: tl.constexpr
):
    """Leave the keys >= low, or LIMIT of them that hold the TOPK largest, in the first of at least `used` slots.

    Without a tuple of indices, the index of keys[r] is first + r * step. ABSENT fills the slots up to `used`. Returns
    how many keys are left.
    """
    columns = _per_column(keys, low)
    count = tl.sum(columns)
    before = tl.zeros_like(columns)
    allowed = count
    if count > LIMIT:
        third = _part_of(low, high, 3)
        low, high, count = _search(keys, low, high, low + third, high - third, TOPK, LIMIT - TOPK)
        columns = _per_column(keys, low)
        if count > LIMIT:
            # More than LIMIT keys reach the TOPK-th largest: it is equal to many.
            columns, before, allowed = _first_of_equal(keys, low, LIMIT)
            count = tl.sum(columns)
    place = tl.cumsum(columns) - columns
    for r in tl.static_range(len(keys)):
        tie = keys[r] == low
        marked = (keys[r] > low) | (tie & (before < allowed))
        tl.store(keys_out + place, keys[r], mask=marked)
        if len(indices) > 0:
            tl.store(indices_out + place, indices[r], mask=marked)
        else:
            tl.store(indices_out + place, first, mask=marked)
            first += step
        place += marked.to(tl.int32)
        before += tie.to(tl.int32)
    slot = tl.arange(0, LIMIT)
    tl.store(keys_out + slot, ABSENT, mask=(slot >= count) & (slot < used))
    return count


@triton.jit
def _store_best(
    keys,
    indices,
    low,
    high,
    out_row,
    raw_row,
    table,
    TOPK: tl.constexpr,
    PAGE: tl.constexpr,
    RAW: tl.constexpr,
):
    """Write the cache slots of the TOPK largest keys, at least TOPK of which are >= low and none > high."""
    pages = ()
    for r in tl.static_range(len(keys)):
        pages = pages + (tl.load(table + indices[r] // PAGE, mask=keys[r] >= low, other=0),)
    # Of about 1.4 TOPK keys the TOPK-th is near the lower end.
    near, far = low + _part_of(low, high, 32), low + _part_of(low, high, 12)
    low, high, count = _search(keys, low, high, near, far, TOPK, 0)
    columns = _per_column(keys, low)
    before = tl.zeros_like(columns)
    allowed = low * 0 + TOPK
    if count != TOPK:
        columns, before, allowed = _first_of_equal(keys, low, TOPK)
    place = tl.cumsum(columns) - columns
    for r in tl.static_range(len(keys)):
        tie = keys[r] == low
        marked = (keys[r] > low) | (tie & (before < allowed))
        tl.store(out_row + place, pages[r] * PAGE + indices[r] % PAGE, mask=marked)
        if RAW:
            tl.store(raw_row + place, indices[r], mask=marked)
        place += marked.to(tl.int32)
        before += tie.to(tl.int32)


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
def _active_chunks(length, CHUNKS: tl.constexpr):
    """Programs that share a row: all of them from two lines each."""
    return tl.minimum(tl.cdiv(length, 64), CHUNKS)


@triton.jit
def _load_scores(scores, length, chunk, active, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Keys of one of `active` chunks of a row, a tuple of one a thread; ABSENT past the length.

    Chunks interleave by lines of 32 scores: tokens with high scores lie together, but so every chunk has its part.
    """
    keys = ()
    index, step = _first_index(chunk, active, COLUMNS)
    for r in tl.static_range(BLOCK // COLUMNS):
        there = (index + r * step < length) & (chunk < active)
        score = tl.load(scores + index + r * step, mask=there, other=0.0)
        keys = keys + (tl.where(there, _key(score), ABSENT),)
    return keys


@triton.jit
def _first_index(chunk, active, COLUMNS: tl.constexpr):
    """Index in the row of the first key of each column of a chunk, and how far apart a column's keys are."""
    column = tl.arange(0, COLUMNS)
    return (column // 32 * active + chunk) * 32 + column % 32, COLUMNS * active


@triton.jit
def _fold(keys, PARTS: tl.constexpr):
    """Column maxima of a tuple of 1-D tensors, PARTS groups a column, as a tuple."""
    maxima = ()
    for p in tl.static_range(PARTS):
        part = keys[p]
        for r in tl.static_range(1, len(keys) // PARTS):
            part = tl.maximum(part, keys[p + r * PARTS])
        maxima = maxima + (part,)
    return maxima


@triton.jit
def _maxima_kernel(
    scores_ptr,
    lengths_ptr,
    maxima_ptr,
    columns_ptr,
    rows,
    width,
    scores_stride,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    BATCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program leaves the maxima of GROUPS groups of one chunk of one row; for BATCH, of its columns too."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) % rows).to(tl.int64)
    chunk = tl.program_id(0) // rows
    length = tl.minimum(tl.load(lengths_ptr + row), width)
    active = _active_chunks(length, CHUNKS)
    if (length > TOPK) & (chunk < active):
        keys = _load_scores(scores_ptr + row * scores_stride, length, chunk, active, BLOCK, COLUMNS)
        maxima = _fold(keys, 1)[0]
        if BATCH > 0:
            tl.store(columns_ptr + (row * CHUNKS + chunk) * COLUMNS + tl.arange(0, COLUMNS), maxima)
        if GROUPS < COLUMNS:
            # So folded, the groups of a short row hold one score each.
            maxima = tl.max(tl.reshape(maxima, [COLUMNS // GROUPS, GROUPS]), axis=0)
        tl.store(maxima_ptr + (row * CHUNKS + chunk) * GROUPS + tl.arange(0, GROUPS), maxima)


@triton.jit
def _load_columns(
    scores, list_ptr, count, length, chunk, active, ROWS: tl.constexpr, EACH: tl.constexpr, COLUMNS: tl.constexpr
):
    """Keys and indices of the `count` columns of a chunk that list_ptr lists, tuples of ROWS rows of one a thread.

    EACH: keys of a column.
    """
    keys = ()
    indices = ()
    for r in tl.static_range(ROWS):
        place = r * COLUMNS + tl.arange(0, COLUMNS)
        entry = place // EACH
        column = tl.load(list_ptr + entry, mask=entry < count, other=0, cache_modifier=".cg")
        line = place % EACH * (COLUMNS // 32) + column // 32
        index = (line * active + chunk) * 32 + column % 32
        there = (entry < count) & (index < length)
        score = tl.load(scores + index, mask=there, other=0.0)
        keys = keys + (tl.where(there, _key(score), ABSENT),)
        indices = indices + (index,)
    return keys, indices


@triton.jit
def _candidates_kernel(
    scores_ptr,
    lengths_ptr,
    maxima_ptr,
    columns_ptr,
    keys_ptr,
    indices_ptr,
    counts_ptr,
    bounds_ptr,
    rows,
    width,
    scores_stride,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    SLOTS: tl.constexpr,
    BATCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program leaves the scores of one chunk of one row that reach the row's bound, at most LIMIT of them.

    Their keys and indices fill the first of the chunk's LIMIT slots, ABSENT follows up to SLOTS. The first chunk also
    leaves the bound and the row's largest key. Where at most BATCH of the chunk's columns reach the bound, it reads no
    others.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row = (tl.program_id(0) % rows).to(tl.int64)
    chunk = tl.program_id(0) // rows
    length = tl.minimum(tl.load(lengths_ptr + row), width)
    active = _active_chunks(length, CHUNKS)
    scores = scores_ptr + row * scores_stride
    if BATCH == 0:
        keys = _load_scores(scores, length, chunk, active, BLOCK, COLUMNS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if (length > TOPK) & (chunk < active):
        slots = row * CHUNKS + chunk
        maxima = ()
        for r in tl.static_range(CHUNKS * GROUPS // COLUMNS):
            group = r * COLUMNS + tl.arange(0, COLUMNS)
            group_ptr = maxima_ptr + row * CHUNKS * GROUPS + group
            maxima = maxima + (tl.load(group_ptr, mask=group < active * GROUPS, other=ABSENT),)
        if BATCH > 0:
            column = tl.arange(0, COLUMNS)
            largest = tl.load(columns_ptr + slots * COLUMNS + column)
        low, high = _bound(maxima, TOPK)
        if chunk == 0:
            tl.store(bounds_ptr + 2 * row, low)
            tl.store(bounds_ptr + 2 * row + 1, high)
        keys_out = keys_ptr + slots * LIMIT
        indices_out = indices_ptr + slots * LIMIT
        if BATCH > 0:
            reaches = (largest >= low).to(tl.int32)
            reaching = tl.sum(reaches)
            if reaching <= BATCH:
                # The slots of the results hold the list until then.
                tl.store(indices_out + tl.cumsum(reaches) - reaches, column, mask=reaches > 0)
                tl.debug_barrier()
                EACH: tl.constexpr = BLOCK // COLUMNS
                few_keys, indices = _load_columns(
                    scores, indices_out, reaching, length, chunk, active, BATCH * EACH // COLUMNS, EACH, COLUMNS
                )
                tl.debug_barrier()
                count = _compact(few_keys, indices, 0, 0, low, high, keys_out, indices_out, SLOTS, TOPK, LIMIT)
            else:
                all_keys = _load_scores(scores, length, chunk, active, BLOCK, COLUMNS)
                first, step = _first_index(chunk, active, COLUMNS)
                count = _compact(all_keys, (), first, step, low, high, keys_out, indices_out, SLOTS, TOPK, LIMIT)
        else:
            first, step = _first_index(chunk, active, COLUMNS)
            count = _compact(keys, (), first, step, low, high, keys_out, indices_out, SLOTS, TOPK, LIMIT)
        tl.store(counts_ptr + slots, count)


@triton.jit
def _load_candidates(
    keys_ptr, indices_ptr, active, SLOTS: tl.constexpr, LIMIT: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr
):
    """The first SLOTS slots of each chunk: keys and indices, tuples of one a thread."""
    keys = ()
    indices = ()
    for r in tl.static_range(CHUNKS * SLOTS // COLUMNS):
        place = r * COLUMNS + tl.arange(0, COLUMNS)
        slot = place // SLOTS * LIMIT + place % SLOTS
        keys = keys + (tl.load(keys_ptr + slot, mask=place < active * SLOTS, other=ABSENT),)
        indices = indices + (tl.load(indices_ptr + slot, mask=place < active * SLOTS, other=0),)
    return keys, indices


@triton.jit
def _absent_past(keys, counts_ptr, active, LIMIT: tl.constexpr, COLUMNS: tl.constexpr):
    """Keys of all LIMIT slots of each chunk, ABSENT in those that were not written."""
    written = ()
    for r in tl.static_range(len(keys)):
        place = r * COLUMNS + tl.arange(0, COLUMNS)
        count = tl.load(counts_ptr + place // LIMIT, mask=place < active * LIMIT, other=0)
        written = written + (tl.where(place % LIMIT < count, keys[r], ABSENT),)
    return written


@triton.jit
def _merge_kernel(
    lengths_ptr,
    table_ptr,
    out_ptr,
    raw_ptr,
    keys_ptr,
    indices_ptr,
    counts_ptr,
    bounds_ptr,
    width,
    rows_per_request,
    table_stride,
    TOPK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    PAGE: tl.constexpr,
    RAW: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program writes one row of the result from the candidates of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + row), width)
    table = table_ptr + row // rows_per_request * table_stride
    out_row = out_ptr + row * TOPK
    raw_row = raw_ptr + row * TOPK
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if length <= TOPK:
        _store_all(out_row, raw_row, table, length, TOPK, PAGE, RAW)
    else:
        active = _active_chunks(length, CHUNKS)
        keys_ptr += row * CHUNKS * LIMIT
        indices_ptr += row * CHUNKS * LIMIT
        counts_ptr += row * CHUNKS
        keys, indices = _load_candidates(keys_ptr, indices_ptr, active, SLOTS, LIMIT, COLUMNS, CHUNKS)
        low = tl.load(bounds_ptr + 2 * row)
        high = tl.load(bounds_ptr + 2 * row + 1)
        most = 0
        if SLOTS < LIMIT:
            chunk = tl.arange(0, CHUNKS)
            most = tl.max(tl.load(counts_ptr + chunk, mask=chunk < active, other=0))
        if most <= SLOTS:
            _store_best(keys, indices, low, high, out_row, raw_row, table, TOPK, PAGE, RAW)
        else:
            slots, all_indices = _load_candidates(keys_ptr, indices_ptr, active, LIMIT, LIMIT, COLUMNS, CHUNKS)
            all_keys = _absent_past(slots, counts_ptr, active, LIMIT, COLUMNS)
            _store_best(all_keys, all_indices, low, high, out_row, raw_row, table, TOPK, PAGE, RAW)


@triton.jit
def _select_kernel(
    scores_ptr,
    lengths_ptr,
    table_ptr,
    out_ptr,
    raw_ptr,
    keys_ptr,
    indices_ptr,
    width,
    rows_per_request,
    scores_stride,
    table_stride,
    TOPK: tl.constexpr,
    BLOCK: tl.constexpr,
    LIMIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    COMPACT: tl.constexpr,
    PAGE: tl.constexpr,
    RAW: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program writes one row of the result from its scores, with COMPACT by way of LIMIT slots of its own."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths_ptr + row), width)
    table = table_ptr + row // rows_per_request * table_stride
    out_row = out_ptr + row * TOPK
    raw_row = raw_ptr + row * TOPK
    if length <= TOPK:
        _store_all(out_row, raw_row, table, length, TOPK, PAGE, RAW)
    else:
        keys = _load_scores(scores_ptr + row * scores_stride, length, 0, 1, BLOCK, COLUMNS)
        low, high = _bound(_fold(keys, GROUPS // COLUMNS), TOPK)
        if COMPACT:
            keys_ptr += row * LIMIT
            indices_ptr += row * LIMIT
            first, step = _first_index(0, 1, COLUMNS)
            _compact(keys, (), first, step, low, high, keys_ptr, indices_ptr, LIMIT, TOPK, LIMIT)
            tl.debug_barrier()
            kept = ()
            places = ()
            for r in tl.static_range(LIMIT // COLUMNS):
                slot = r * COLUMNS + tl.arange(0, COLUMNS)
                kept = kept + (tl.load(keys_ptr + slot, cache_modifier=".cg"),)
                place = tl.load(indices_ptr + slot, mask=kept[r] != ABSENT, other=0, cache_modifier=".cg")
                places = places + (place,)
            _store_best(kept, places, low, high, out_row, raw_row, table, TOPK, PAGE, RAW)
        else:
            indices = ()
            for r in tl.static_range(BLOCK // COLUMNS):
                indices = indices + (r * COLUMNS + tl.arange(0, COLUMNS),)
            _store_best(keys, indices, low, high, out_row, raw_row, table, TOPK, PAGE, RAW)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Launch parameters of one call; nothing in them depends on the lengths.

    Attributes:
        block: scores a program holds in registers.
        chunks: programs a row, a power of two; above 1 three launches share the work.
        warps: warps a program.
        merge_warps: warps of a program of the last launch.
    """

    block: int
    chunks: int
    warps: int
    merge_warps: int = 0

    @property
    def groups(self) -> int:
        """Groups of scores whose maxima bound the answer: of the row for one chunk, else of each chunk."""
        if self.chunks == 1:
            return min(max(1024, 32 * self.warps), self.block)
        return min(32 * self.warps, GROUPS // self.chunks)

    @property
    def slots(self) -> int:
        """Candidates of each chunk that the merge takes in at first."""
        return min(CHUNK_LIMIT, GROUPS // self.chunks)

    @property
    def compact(self) -> bool:
        """Whether a program first cuts its whole row down, so that it counts fewer keys."""
        return self.chunks == 1 and self.block > 4096

    @property
    def batch(self) -> int:
        """Columns of a chunk that may reach the bound for it to read only those; 0 to read all of a small chunk."""
        return 1024 // self.chunks if self.chunks > 1 and self.block > 8192 else 0


def plan(width: int) -> Plan:
    """Choose launch parameters for rows of up to `width` scores."""
    if width <= 8192:
        block = max(1024, triton.next_power_of_2(width))
        return Plan(block, 1, max(4, block // 1024))
    block = 8192 if width <= 65536 else 16384
    return Plan(block, triton.next_power_of_2(triton.cdiv(width, block)), 16, 8)


def _constants(chosen: Plan, kernel: Any, raw: bool, pdl: bool) -> dict[str, Any]:
    """Constexprs of one of the kernels."""
    merging = kernel is _merge_kernel
    values = {
        "TOPK": TOPK,
        "BLOCK": chosen.block,
        "CHUNKS": chosen.chunks,
        "LIMIT": LIMIT if chosen.chunks == 1 else CHUNK_LIMIT,
        "COLUMNS": 32 * (chosen.merge_warps if merging else chosen.warps),
        "GROUPS": chosen.groups,
        "SLOTS": chosen.slots,
        "COMPACT": chosen.compact,
        "BATCH": chosen.batch,
        "PAGE": PAGE_TOKENS,
        "RAW": raw,
        "PDL": pdl,
    }
    return {name: value for name, value in values.items() if name in kernel.arg_names}


def _options(chosen: Plan, kernel: Any, pdl: bool) -> dict[str, Any]:
    """Further options of one of the kernels' launches."""
    options: dict[str, Any] = {"launch_pdl": True} if pdl and kernel is not _maxima_kernel else {}
    if kernel in (_maxima_kernel, _candidates_kernel):
        # So that a multiprocessor (65,536 registers) holds two programs: some versions of Triton would take more.
        options["maxnreg"] = 65536 // (2 * 32 * chosen.warps)
    return options


@dataclasses.dataclass(frozen=True)
class Workspace:
    """Scratch of a call; holds nothing between calls, so one serves all layers and graph replays of a stream.

    Attributes:
        slots: int32.
    """

    slots: torch.Tensor

    @staticmethod
    def allocate(rows: int, width: int, device: torch.device | str) -> Workspace:
        """A workspace for calls of up to `rows` rows and `width` scores: at most 110 KiB a row."""
        return Workspace(torch.empty(sum(_sizes(plan(width), rows)), dtype=torch.int32, device=device))


def _sizes(chosen: Plan, rows: int) -> list[int]:
    """Slots for candidates' keys and indices; with several chunks also counts, maxima, columns' maxima and bounds."""
    if chosen.chunks == 1:
        per_row = [LIMIT, LIMIT] if chosen.compact else [0, 0]
    else:
        each = [CHUNK_LIMIT, CHUNK_LIMIT, 1, chosen.groups, 32 * chosen.warps]
        per_row = [size * chosen.chunks for size in each] + [2]
    return [-(-rows * size // 4) * 4 for size in per_row]


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

    One launch for width up to 8192: a program a row. Beyond, three, the first two with up to 16 programs a row.

    Args:
        scores: float32 [rows, width], rows contiguous; width up to 262144. Columns at or past the length are not
            used. NaN counts as more than inf, with a sign as less
            than -inf.
        lengths: [rows] int32; more than width or the page table's tokens counts as that limit.
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
    requests = page_table.shape[0] if page_table.ndim else 0
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
    sizes = _sizes(chosen, rows)
    if workspace is None:
        workspace = Workspace.allocate(rows, width, scores.device)
    require_device(scores.device, workspace=workspace.slots)
    if workspace.slots.numel() < sum(sizes):
        raise ValueError(
            f"the workspace has {workspace.slots.numel()} slots, {rows} rows of {width} scores need {sum(sizes)}"
        )

    seen = min(width, page_table.shape[1] * PAGE_TOKENS)
    raw = out if raw_out is None else raw_out
    pdl = has_dependent_launch(scores.device)

    def launch(kernel: Any, grid: int, *arguments: Any) -> None:
        warps = chosen.merge_warps if kernel is _merge_kernel else chosen.warps
        constants = _constants(chosen, kernel, raw_out is not None, pdl)
        kernel[(grid,)](*arguments, **constants, num_warps=warps, **_options(chosen, kernel, pdl))

    shared = (rows // requests, scores.stride(0), page_table.stride(0))
    keys, indices, *notes = workspace.slots[: sum(sizes)].split(sizes)
    if chosen.chunks == 1:
        launch(_select_kernel, rows, scores, lengths, page_table, out, raw, keys, indices, seen, *shared)
        return out
    counts, *maxima, bounds = notes
    grid = rows * chosen.chunks
    candidates = (keys, indices, counts, bounds)
    launch(_maxima_kernel, grid, scores, lengths, *maxima, rows, seen, scores.stride(0))
    launch(_candidates_kernel, grid, scores, lengths, *maxima, *candidates, rows, seen, scores.stride(0))
    launch(
        _merge_kernel, rows, lengths, page_table, out, raw, *candidates, seen, rows // requests, page_table.stride(0)
    )
    return out


def serving_calls() -> Iterator[Callable[[], object]]:
    """Every block size up to the longest context, with and without the positions themselves."""
    widths = [1024 << power for power in range((serving.CONTEXT // 4096).bit_length())]
    for rows in serving.BATCHES:
        for width in widths:
            out = torch.zeros(rows, TOPK, dtype=torch.int32)
            arguments = (
                torch.zeros(rows, width),
                torch.zeros(rows, dtype=torch.int32),
                torch.zeros(rows, width // PAGE_TOKENS, dtype=torch.int32),
                out,
            )
            for raw_out in (None, torch.zeros_like(out)):
                yield functools.partial(topk_indices, *arguments, raw_out=raw_out)


def compile_cases() -> Iterator[CompileCase]:
    """Every launch at every block size, and with raw positions."""
    pointers = ["lengths", "table", "out", "raw", "maxima", "columns", "keys", "indices", "counts", "bounds"]
    arguments = {
        "scores_ptr": "*fp32:16",
        **{f"{name}_ptr": "*i32:16" for name in pointers},
        **dict.fromkeys(("rows", "rows_per_request"), "i32"),
        **dict.fromkeys(("width", "scores_stride", "table_stride"), "i32:16"),
    }
    widths = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
    for width, raw in [(width, False) for width in widths] + [(8192, True), (262144, True)]:
        chosen = plan(width)
        kernels: dict[str, Any] = {"": _select_kernel}
        if chosen.chunks > 1:
            kernels = {", merge": _merge_kernel}
            if not raw:
                kernels = {", maxima": _maxima_kernel, ", candidates": _candidates_kernel} | kernels
        for name, kernel in kernels.items():
            yield CompileCase(
                op="topk_indices",
                shape=f"width {width}{name}" + (", raw positions" if raw else ""),
                kernel=kernel,
                arguments={name: kind for name, kind in arguments.items() if name in kernel.arg_names},
                constexprs=_constants(chosen, kernel, raw, True),
                num_warps=chosen.merge_warps if kernel is _merge_kernel else chosen.warps,
                options=_options(chosen, kernel, True),
            )
