"""Sparse MLA decode: attention of each query row over the cache tokens that an index list names.

The sliding-window cache and the compressed cache (C4 or C128) are read where they lie, in one pass. A program takes 16
or 32 heads of one row and a share of its tokens: it reads each token once, turns it into bf16 once, and uses that tile
as key and as value for all its heads on the tensor cores. A second launch puts the shares together.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from sm120_kernels import kv_layout, serving
from sm120_kernels.aot import LIMITS, CompileCase
from sm120_kernels.checks import has_dependent_launch, require, require_device, require_rows, sm_count
from sm120_kernels.interpret import INTERPRETED, dot, side_by_side, to_bf16

HEAD_DIM = tl.constexpr(kv_layout.HEAD_DIM)
NOPE_DIM = tl.constexpr(kv_layout.NOPE_DIM)
DATA_BYTES = tl.constexpr(kv_layout.DATA_BYTES)
SCALE_BYTES = tl.constexpr(kv_layout.SCALE_BYTES)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
MAX_HEADS = 128
MAX_SPLITS = 32


@triton.jit
def _token_slots(
    tile, end, window_tiles, window_length, extra_length, window_indices, extra_indices, TOKENS: tl.constexpr
):
    """Cache slots of a tile's tokens; -1 past the end of the share or of the list, or where the list has -1."""
    in_window = tile < window_tiles
    position = (tile - tl.where(in_window, 0, window_tiles)) * TOKENS + tl.arange(0, TOKENS)
    length = tl.where(in_window, window_length, extra_length)
    length = tl.where(tile < end, length, 0)
    indices = tl.where(in_window, window_indices, extra_indices)
    return tl.load(indices + position, mask=position < length, other=-1)


@triton.jit
def _group(row, present, GROUP: tl.constexpr):
    """64 e4m3 values of each token, as bytes."""
    return tl.load(row[:, None] + (GROUP * 64 + tl.arange(0, 64))[None, :], mask=present[:, None], other=0)


@triton.jit
def _token_bytes(in_window, slot, window_cache, extra_cache, window_shift, extra_shift, window_page, extra_page):
    """What the cache holds for each token: its eight scale bytes, seven groups of nope bytes, and rope in bf16."""
    cache = tl.where(in_window, window_cache, extra_cache)
    shift = tl.where(in_window, window_shift, extra_shift)
    page_bytes = tl.where(in_window, window_page, extra_page)
    present = slot >= 0
    slot = tl.maximum(slot, 0)
    page = (slot >> shift).to(tl.int64) * page_bytes
    in_page = slot & ((1 << shift) - 1)
    row = tl.multiple_of(cache + page + in_page * DATA_BYTES, 64)
    scale_row = cache + page + (DATA_BYTES << shift) + in_page * SCALE_BYTES
    scales = tl.load(scale_row.to(tl.pointer_type(tl.int64)), mask=present, other=0)
    rope_row = (row + NOPE_DIM).to(tl.pointer_type(tl.bfloat16))
    rope = tl.load(rope_row[:, None] + tl.arange(0, 64)[None, :], mask=present[:, None], other=0.0)
    return (
        scales,
        _group(row, present, 0),
        _group(row, present, 1),
        _group(row, present, 2),
        _group(row, present, 3),
        _group(row, present, 4),
        _group(row, present, 5),
        _group(row, present, 6),
        rope,
    )


@triton.jit
def _dequantise(group, scales, GROUP: tl.constexpr):
    """One group in bf16. Exact: e4m3 has 4 significant bits and UE8M0 is a power of two (byte 0 counts as 0)."""
    values = group.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    exponent = ((scales >> (8 * GROUP)) & 255).to(tl.int32)
    if INTERPRETED:
        return (values * (exponent << 23).to(tl.float32, bitcast=True)[:, None]).to(tl.bfloat16)
    # A bf16 product has half the instructions of an fp32 one.
    return values.to(tl.bfloat16) * (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]


@triton.jit
def _keys(scales, g0, g1, g2, g3, g4, g5, g6, rope, TOKENS: tl.constexpr):
    """The tokens in bf16, [TOKENS, 512]."""
    k0 = side_by_side(_dequantise(g0, scales, 0), _dequantise(g1, scales, 1), TOKENS, 64)
    k1 = side_by_side(_dequantise(g2, scales, 2), _dequantise(g3, scales, 3), TOKENS, 64)
    k2 = side_by_side(_dequantise(g4, scales, 4), _dequantise(g5, scales, 5), TOKENS, 64)
    k3 = side_by_side(_dequantise(g6, scales, 6), rope, TOKENS, 64)
    return side_by_side(side_by_side(k0, k1, TOKENS, 128), side_by_side(k2, k3, TOKENS, 128), TOKENS, 256)


@triton.jit(do_not_specialize=["splits", "window_shift", "extra_shift"])
def _sparse_mla_decode_kernel(
    q,
    window_cache,
    extra_cache,
    window_indices,
    extra_indices,
    window_lengths,
    extra_lengths,
    sink,
    out,
    lse,
    partial,
    partial_lse,
    scale_log2,
    heads,
    window_width,
    extra_width,
    window_shift,
    extra_shift,
    window_page,
    extra_page,
    q_row_stride,
    q_head_stride,
    window_stride,
    extra_stride,
    splits,
    DIRECT: tl.constexpr,
    HAS_WINDOW_LENGTHS: tl.constexpr,
    HAS_EXTRA_LENGTHS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of HEADS heads of one row over one of `splits` shares of its tokens.

    The grid is (blocks of HEADS heads, splits, rows). DIRECT, for one share, writes the result; otherwise the share's
    own softmax average goes to partial and its log-sum-exp, base 2, to partial_lse.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    head_mask = head < heads

    window_length = window_width
    if HAS_WINDOW_LENGTHS:
        window_length = tl.minimum(tl.load(window_lengths + row), window_width)
    extra_length = extra_width
    if HAS_EXTRA_LENGTHS:
        extra_length = tl.minimum(tl.load(extra_lengths + row), extra_width)
    window_tiles = tl.cdiv(tl.maximum(window_length, 0), TOKENS)
    tiles = window_tiles + tl.cdiv(tl.maximum(extra_length, 0), TOKENS)
    share = tl.cdiv(tiles, splits)
    start = split * share
    end = tl.minimum(start + share, tiles)
    window_indices += row * window_stride
    extra_indices += row * extra_stride

    # The next tile's bytes are on their way while this one is used. Handing the bf16 tile from turn to turn also keeps
    # Triton (3.6, 3.8) from laying out the dots for 8-bit operands, which would store the tile twice.
    slot = _token_slots(start, end, window_tiles, window_length, extra_length, window_indices, extra_indices, TOKENS)
    present = slot >= 0
    scales, g0, g1, g2, g3, g4, g5, g6, rope = _token_bytes(
        start < window_tiles, slot, window_cache, extra_cache, window_shift, extra_shift, window_page, extra_page
    )
    slot = _token_slots(
        start + 1, end, window_tiles, window_length, extra_length, window_indices, extra_indices, TOKENS
    )

    column = tl.arange(0, HEAD_DIM)[None, :]
    query = tl.load(q + row * q_row_stride + head[:, None] * q_head_stride + column, mask=head_mask[:, None], other=0.0)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    weights = tl.zeros([HEADS, TOKENS], tl.float32)
    values = tl.zeros([HEADS, HEAD_DIM], tl.float32)
    keys = _keys(scales, g0, g1, g2, g3, g4, g5, g6, rope, TOKENS)
    for tile in tl.range(start, end, num_stages=1):
        current = present
        present = slot >= 0
        scales, g0, g1, g2, g3, g4, g5, g6, rope = _token_bytes(
            tile + 1 < window_tiles, slot, window_cache, extra_cache, window_shift, extra_shift, window_page, extra_page
        )
        slot = _token_slots(
            tile + 2, end, window_tiles, window_length, extra_length, window_indices, extra_indices, TOKENS
        )
        scores = dot(query, tl.trans(keys))
        scores = tl.where(current[None, :], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        reference = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - reference)[:, None]
        top = new_top
        p = tl.exp2(scores - reference[:, None])
        weights = weights * rescale + p
        values = dot(to_bf16(p), keys, values * rescale)
        keys = _keys(scales, g0, g1, g2, g3, g4, g5, g6, rope, TOKENS)

    total = tl.sum(weights, 1)
    average = total
    if DIRECT:
        if HAS_SINK:
            average += tl.exp2(tl.load(sink + head, mask=head_mask, other=0.0) * LOG2E - top)
        result = out + (row * heads + head)[:, None] * HEAD_DIM + column
        tl.store(lse + row * heads + head, (top + tl.log2(total)) * LN2, mask=head_mask)
        written = head_mask[:, None]
    else:
        place = (row * splits + split) * heads + head
        result = partial + place[:, None] * HEAD_DIM + column
        tl.store(partial_lse + place, top + tl.log2(total), mask=head_mask)
        written = (head_mask & (end > start))[:, None]
    factor = tl.where(total > 0, 1.0 / average, 0.0)[:, None]
    _store(result, values * factor, written)


@triton.jit
def _store(pointers, values, mask):
    if pointers.dtype.element_ty == tl.bfloat16:
        values = to_bf16(values)
    tl.store(pointers, values, mask=mask)


@triton.jit
def _combine_kernel(
    partial,
    partial_lse,
    sink,
    out,
    lse,
    heads,
    SPLITS: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Puts the shares of one row and head together. The grid is (heads, blocks of COLUMNS columns, rows).

    PADDED is SPLITS rounded up to a power of two. With 128 columns a warp, no sum over the shares leaves a thread.
    """
    head = tl.program_id(0)
    row = tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    share = tl.arange(0, PADDED)
    place = (row * SPLITS + share) * heads + head
    sink_log2 = float("-inf")
    if HAS_SINK:
        sink_log2 = tl.load(sink + head) * LOG2E
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    share_lse = tl.load(partial_lse + place, mask=share < SPLITS, other=float("-inf"))
    values = tl.load(partial + place[:, None] * HEAD_DIM + column[None, :], mask=(share < SPLITS)[:, None], other=0.0)
    top = tl.max(share_lse, 0)
    reference = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(share_lse - reference)
    total = tl.sum(weight, 0)
    # An empty share wrote no values.
    values = tl.where((share_lse == float("-inf"))[:, None], 0.0, values) * weight[:, None]
    factor = tl.where(total > 0, 1.0 / (total + tl.exp2(sink_log2 - reference)), 0.0)
    _store(out + (row * heads + head) * HEAD_DIM + column, tl.sum(values, 0) * factor, column < HEAD_DIM)
    if tl.program_id(1) == 0:
        tl.store(lse + row * heads + head, (top + tl.log2(total)) * LN2)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call is cut: programs of `heads` heads that read `tokens` tokens a turn, `splits` shares a row."""

    heads: int
    tokens: int
    warps: int
    programs_per_sm: int
    splits: int


NARROW = Plan(heads=16, tokens=32, warps=4, programs_per_sm=2, splits=1)
WIDE = Plan(heads=32, tokens=64, warps=8, programs_per_sm=1, splits=1)
WIDE_SHARED_BYTES = 102_400  # sm_120 has 101,376
# Costs, in units of one narrow tile's time on an SM of its own, fitted to a sweep on an H200 (benchmarks/log.md):
# a tile by how many programs share the SM, a program's start and end, a second launch, and its cost a MiB of shares.
NARROW_TILE = {1: 1.0, 2: 1.6}
WIDE_TILE = {1: 2.37}
PROGRAM = 1.2
COMBINE = 0.33
COMBINE_MIB = 0.19


@functools.lru_cache(maxsize=4096)
def plan(batch: int, heads: int, width: int, extra_width: int, sms: int, shared_bytes: int) -> Plan:
    """Choose the block and the number of shares, without looking at the data.

    Args:
        batch, heads: of the queries.
        width, extra_width: columns of the two index lists.
        sms: streaming multiprocessors.
        shared_bytes: shared memory a block may use.
    """

    def cost(cut: Plan) -> float:
        programs = batch * triton.cdiv(heads, cut.heads) * cut.splits
        share = triton.cdiv(_tiles(cut, width, extra_width), cut.splits)
        tile = NARROW_TILE if cut.heads == NARROW.heads else WIDE_TILE
        full_waves, rest = divmod(programs, sms * cut.programs_per_sm)
        time = full_waves * (PROGRAM + share * tile[cut.programs_per_sm])
        if rest:
            time += PROGRAM + share * tile[triton.cdiv(rest, sms)]
        if cut.splits > 1:
            time += COMBINE + COMBINE_MIB * batch * heads * cut.splits * 4 * kv_layout.HEAD_DIM / 2**20
        return time

    blocks = [NARROW]
    if heads > NARROW.heads and shared_bytes >= WIDE_SHARED_BYTES:
        blocks.append(WIDE)
    return min(
        (
            dataclasses.replace(block, splits=splits)
            for block in blocks
            for splits in range(1, max(1, min(MAX_SPLITS, _tiles(block, width, extra_width))) + 1)
        ),
        key=cost,
    )


def _tiles(cut: Plan, width: int, extra_width: int) -> int:
    """Most tiles a row can have."""
    return triton.cdiv(width, cut.tokens) + triton.cdiv(extra_width, cut.tokens)


def combine_columns(batch: int, heads: int) -> int:
    """Columns a program of the second launch takes: few while there are programs to spare, all 512 beyond."""
    return 128 if batch * heads <= 512 else kv_layout.HEAD_DIM


def sparse_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    check: bool = False,
    chosen: Plan | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each query row over the tokens that its index lists name; a token is both key and value.

    With x the listed tokens: lse = log sum exp(scale q.x), out = sum exp(scale q.x - log(exp(lse) + exp(sink))) x.
    The lists are read up to the row's length; entries of -1 are skipped; an index may occur several times and counts
    each time. A row without tokens gives out = 0 and lse = -inf.

    Two launches, or one where `plan` finds no use in splitting a row. All sizes come from the shapes: the call can be
    captured in a CUDA graph and replayed with other lengths and indices. The number of shares of a row depends on the
    batch, so a row's fp32 sums may be grouped otherwise in another batch (a last bit of the bf16 result); with the
    same `chosen` a row's result is the same bit for bit in every batch.

    Args:
        q: [batch, heads, 512] bfloat16: 448 nope, then 64 rope; last dimension contiguous, other strides multiples of
            8; 1 to 128 heads.
        cache: the sliding-window cache, uint8 or float8_e4m3fn [pages, page_size, 1, 584], page_size 256, 64 or 2:
            SGLang's view of pages of `kv_layout.page_bytes(page_size)` bytes, of which only the first stride is used.
        indices: [batch, width] int32, rows contiguous: token slots, page * page_size + place in the page, or -1.
        lengths: [batch] int32: leading entries of each row's list that count; None for all.
        extra_cache, extra_indices, extra_lengths: the same for the compressed cache (C4 or C128).
        sink: [heads] float32, added to the softmax's denominator.
        scale: of the scores; 512 ** -0.5 when None.
        out: [batch, heads, 512] bfloat16, contiguous; allocated when None.
        lse: [batch, heads] float32, contiguous, natural logarithm, without the sink; allocated when None.
        check: also verify that every index that counts lies in its cache. For debugging: it waits for the GPU and adds
            about six small launches a cache, so it cannot be used under graph capture.
        chosen: cut the call this way, not as `plan` says.

    Returns:
        out and lse.

    Raises:
        ValueError: a wrong dtype, shape, stride, page size, head count or device; with check, an index out of range.

    Source of the semantics: SGLang 0.5.23, `flash_mla_with_kvcache_sm120` (its lse differs between its backends; this
    one is FlashMLA's, but for -inf where FlashMLA has +inf).
    """
    if q.ndim != 3 or q.shape[2] != kv_layout.HEAD_DIM or q.dtype != torch.bfloat16:
        raise ValueError(
            f"q must be bfloat16 [batch, heads, {kv_layout.HEAD_DIM}], got {q.dtype} with shape {list(q.shape)}"
        )
    batch, heads, _ = q.shape
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"q must have 1 to {MAX_HEADS} heads, got {heads}")
    if q.stride(2) != 1 or q.stride(0) % 8 or q.stride(1) % 8:
        raise ValueError(f"q must have last stride 1 and other strides that are multiples of 8, got {q.stride()}")
    if (extra_cache is None) != (extra_indices is None):
        raise ValueError("extra_cache and extra_indices go together: give both or neither")
    if extra_lengths is not None and extra_indices is None:
        raise ValueError("extra_lengths without extra_indices")
    _require_cache(cache, indices, lengths, batch, "")
    if extra_cache is not None and extra_indices is not None:
        _require_cache(extra_cache, extra_indices, extra_lengths, batch, "extra_")
    if sink is not None:
        require(sink, "sink", torch.float32, (heads,))
    if out is None:
        out = torch.empty((batch, heads, kv_layout.HEAD_DIM), dtype=torch.bfloat16, device=q.device)
    if lse is None:
        lse = torch.empty((batch, heads), dtype=torch.float32, device=q.device)
    require(out, "out", torch.bfloat16, (batch, heads, kv_layout.HEAD_DIM))
    require(lse, "lse", torch.float32, (batch, heads))
    require_device(
        q.device,
        cache=cache,
        indices=indices,
        lengths=lengths,
        extra_cache=extra_cache,
        extra_indices=extra_indices,
        extra_lengths=extra_lengths,
        sink=sink,
        out=out,
        lse=lse,
    )
    if batch == 0:
        return out, lse
    if check:
        _check_indices(cache, indices, lengths, "")
        if extra_cache is not None and extra_indices is not None:
            _check_indices(extra_cache, extra_indices, extra_lengths, "extra_")

    width = indices.shape[1]
    extra_width = 0 if extra_indices is None else extra_indices.shape[1]
    cut = chosen or plan(batch, heads, width, extra_width, sm_count(q.device), _shared_bytes(q.device))
    if cut.splits == 1:
        partial, partial_lse = out, lse
    else:
        partial = q.new_empty((batch, cut.splits, heads, kv_layout.HEAD_DIM), dtype=torch.float32)
        partial_lse = q.new_empty((batch, cut.splits, heads), dtype=torch.float32)
    # Without an extra cache its arguments only need the right type.
    second, second_indices = (cache, indices) if extra_cache is None else (extra_cache, extra_indices)
    assert second_indices is not None
    pdl = has_dependent_launch(q.device)
    _sparse_mla_decode_kernel[(triton.cdiv(heads, cut.heads), cut.splits, batch)](
        q,
        _bytes(cache),
        _bytes(second),
        indices,
        second_indices,
        lengths if lengths is not None else indices,
        extra_lengths if extra_lengths is not None else indices,
        sink if sink is not None else lse,
        out,
        lse,
        partial,
        partial_lse,
        (kv_layout.HEAD_DIM**-0.5 if scale is None else scale) * LOG2E.value,
        heads,
        width,
        extra_width,
        cache.shape[1].bit_length() - 1,
        second.shape[1].bit_length() - 1,
        cache.stride(0),
        second.stride(0),
        q.stride(0),
        q.stride(1),
        indices.stride(0),
        second_indices.stride(0),
        cut.splits,
        DIRECT=cut.splits == 1,
        HAS_WINDOW_LENGTHS=lengths is not None,
        HAS_EXTRA_LENGTHS=extra_lengths is not None,
        HAS_SINK=sink is not None,
        HEADS=cut.heads,
        TOKENS=cut.tokens,
        PDL=pdl,
        num_warps=cut.warps,
        num_stages=1,
        **({"launch_pdl": True} if pdl else {}),
    )
    if cut.splits > 1:
        columns = combine_columns(batch, heads)
        _combine_kernel[(heads, kv_layout.HEAD_DIM // columns, batch)](
            partial,
            partial_lse,
            sink if sink is not None else lse,
            out,
            lse,
            heads,
            SPLITS=cut.splits,
            PADDED=triton.next_power_of_2(cut.splits),
            COLUMNS=columns,
            HAS_SINK=sink is not None,
            PDL=pdl,
            num_warps=columns // 128,
            **({"launch_pdl": True} if pdl else {}),
        )
    return out, lse


def _require_cache(
    cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None, batch: int, prefix: str
) -> None:
    if cache.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ValueError(f"{prefix}cache must be uint8 or float8_e4m3fn, got {cache.dtype}")
    if cache.ndim != 4 or cache.shape[2:] != (1, kv_layout.TOKEN_BYTES):
        raise ValueError(
            f"{prefix}cache must have shape [pages, page_size, 1, {kv_layout.TOKEN_BYTES}], got {list(cache.shape)}"
        )
    page_size = cache.shape[1]
    if page_size not in kv_layout.PAGE_SIZES:
        raise ValueError(f"{prefix}cache must have pages of 256, 64 or 2 tokens, got {page_size}")
    if cache.shape[0] > 1 and cache.stride(0) != kv_layout.page_bytes(page_size):
        raise ValueError(
            f"{prefix}cache with pages of {page_size} tokens must have {kv_layout.page_bytes(page_size)} bytes from "
            f"page to page, got {cache.stride(0)}"
        )
    if cache.data_ptr() % 16:
        raise ValueError(f"{prefix}cache must start at a multiple of 16 bytes")
    require_rows(indices, f"{prefix}indices", torch.int32, batch)
    if lengths is not None:
        require(lengths, f"{prefix}lengths", torch.int32, (batch,))


def _check_indices(cache: torch.Tensor, indices: torch.Tensor, lengths: torch.Tensor | None, prefix: str) -> None:
    slots = cache.shape[0] * cache.shape[1]
    wrong = (indices < -1) | (indices >= slots)
    if lengths is not None:
        wrong &= torch.arange(indices.shape[1], device=indices.device) < lengths[:, None]
    places = torch.nonzero(wrong)
    if len(places):
        row, column = places[0].tolist()
        raise ValueError(
            f"{prefix}indices[{row}, {column}] is {int(indices[row, column])}, must be -1 or 0 to {slots - 1}"
        )


def _bytes(cache: torch.Tensor) -> torch.Tensor:
    """The cache from its first byte; the kernel counts in bytes, past what the 584-byte view shows."""
    return cache.view(torch.uint8)


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return LIMITS[120].shared_per_block
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def serving_calls() -> Iterator[Callable[[], object]]:
    """Both layouts of the window's pages, alone, with C4 and with C128 tokens of the longest context."""

    def cache(page: int) -> torch.Tensor:
        stride = kv_layout.page_bytes(page)
        row = kv_layout.TOKEN_BYTES
        return torch.zeros(2 * stride, dtype=torch.uint8).as_strided((2, page, 1, row), (stride, row, row, 1))

    def indices(batch: int, width: int) -> torch.Tensor:
        return torch.zeros(batch, width, dtype=torch.int32)

    for ranks in serving.RANKS:
        heads = serving.HEADS // ranks
        sink = torch.zeros(heads)
        for batch in serving.BATCHES:
            query = torch.zeros(batch, heads, kv_layout.HEAD_DIM, dtype=torch.bfloat16)
            lengths = torch.zeros(batch, dtype=torch.int32)
            for page in (64, 256):
                window = functools.partial(
                    sparse_mla_decode, query, cache(page), indices(batch, serving.WINDOW), lengths, sink=sink
                )
                yield window
                for width, extra_page in ((512, 64), (serving.CONTEXT // 128, 2)):
                    yield functools.partial(
                        window,
                        extra_cache=cache(extra_page),
                        extra_indices=indices(batch, width),
                        extra_lengths=lengths,
                    )


def compile_cases() -> Iterator[CompileCase]:
    """The launches of a 188-SM sm_120 GPU: 16 heads (a TP4 rank) and 64, with and without a compressed cache."""
    limits = LIMITS[120]
    pointers = {
        "*bf16:16": "q out",
        "*u8:16": "window_cache extra_cache",
        "*i32:16": "window_indices extra_indices window_lengths extra_lengths",
        "*fp32:16": "sink lse partial_lse",
    }
    integers = {
        "i32": "window_shift extra_shift splits",
        "i32:16": "heads window_width window_page extra_page q_row_stride q_head_stride window_stride extra_stride",
        "fp32": "scale_log2",
    }
    types = {name: kind for kind, names in (pointers | integers).items() for name in names.split()}
    shapes = [(batch, heads, extra) for heads in (16, 64) for extra in (512, 0) for batch in (1, 16, 64)]
    combines = set()
    seen = set()
    for batch, heads, extra in shapes:
        cut = plan(batch, heads, 128, extra, 188, limits.shared_per_block)
        direct = cut.splits == 1
        key = (cut.heads, cut.tokens, direct, extra > 0)
        if not direct:
            combines.add((cut.splits, combine_columns(batch, heads)))
        if key in seen:
            continue
        seen.add(key)
        yield CompileCase(
            op="sparse_mla_decode",
            shape=f"{cut.heads} heads x {cut.tokens} tokens, {'one share' if direct else 'shares'}, "
            f"{'two caches' if extra else 'one cache'}",
            kernel=_sparse_mla_decode_kernel,
            arguments=types
            | {"partial": "*bf16:16" if direct else "*fp32:16", "extra_width": "i32:16" if extra else "i32"},
            constexprs={
                "DIRECT": direct,
                "HAS_WINDOW_LENGTHS": True,
                "HAS_EXTRA_LENGTHS": extra > 0,
                "HAS_SINK": True,
                "HEADS": cut.heads,
                "TOKENS": cut.tokens,
                "PDL": True,
            },
            num_warps=cut.warps,
            uses_mma=True,
            options={"launch_pdl": True},
        )
    for splits, columns in sorted(combines):
        yield CompileCase(
            op="sparse_mla_decode",
            shape=f"combine {splits} shares, {columns} columns",
            kernel=_combine_kernel,
            arguments={
                "partial": "*fp32:16",
                "partial_lse": "*fp32:16",
                "sink": "*fp32:16",
                "out": "*bf16:16",
                "lse": "*fp32:16",
                "heads": "i32:16",
            },
            constexprs={
                "SPLITS": splits,
                "PADDED": triton.next_power_of_2(splits),
                "COLUMNS": columns,
                "HAS_SINK": True,
                "PDL": True,
            },
            num_warps=columns // 128,
            options={"launch_pdl": True},
        )
