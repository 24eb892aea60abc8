"""The FP4 experts and the shared expert for a small batch: work proportional to the experts that are hit.

There is no sorting launch. A program belongs to one (token, place) pair, a route, and a block of weight rows; it looks
through all routes for its expert's, and ends at once unless its own is the first of them. The weights are the rows of
the products and the tokens, padded to 8, their columns. FP4 waits in a ring in shared memory and goes from there into
the registers of the tensor core's first operand (`fragments`), where it becomes bf16 or int8: what limits these
products is the instructions a weight takes, and the memory beside them. As integers it takes a fifth fewer: one look-up
gives four values, and the scale of 32 columns multiplies their sum; so x and the activations must be integers too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from sm120_kernels import serving
from sm120_kernels.aot import CompileCase
from sm120_kernels.checks import capability, has_dependent_launch, require, require_block_scale, require_device
from sm120_kernels.fragments import (
    DOUBLES,
    MAGIC,
    MAGIC_BITS,
    NEGATIVES,
    ask,
    await_groups,
    close_group,
    counted_times,
    e2m1_operand,
    e2m1_tokens,
    e4m3_operand,
    e4m3_tokens,
    from_two_on,
    integer_product,
    ring,
    take,
    take_byte,
    take_two,
    take_word,
)
from sm120_kernels.interpret import dot, prefetch_l2, to_bf16, to_e4m3
from sm120_kernels.unpack import e2m1_to_e4m3, scale_value, two_e4m3, two_powers

SWIGLU_LIMIT = 10.0
MAX_TOKENS = 64
MAX_TOP_K = 8
BLOCK = 128
E4M3_MAX = tl.constexpr(448.0)
# E2M1 in bf16 lacks a factor 2 ** 126: half of it goes into the scales and half into the sum, so that neither leaves
# bf16's range. E2M1 in e4m3 lacks 2 ** 6, e4m3 in bf16 2 ** 120, likewise in two halves.
SCALE_SHIFT = tl.constexpr(64)
SCALE_FACTOR = tl.constexpr(2.0**64)
SUM_FACTOR = tl.constexpr(2.0**62)
FP8_SUM_FACTOR = tl.constexpr(2.0**6)
DENSE_FACTOR = tl.constexpr(2.0**60)
# The largest integer that x and the activations become: two int8, upper and lower.
LARGEST = tl.constexpr(127 * 256)


@triton.jit
def _first_route(ids_ptr, route, routes, ROUTES: tl.constexpr):
    """The expert of a route, whether no earlier route has it, and for all routes: which have it, and their rank."""
    place = tl.arange(0, ROUTES)
    ids = tl.load(ids_ptr + place, mask=place < routes, other=-1)
    expert = tl.load(ids_ptr + route)
    same = (ids == expert) & (expert >= 0)
    first = tl.min(tl.where(same, place, ROUTES)) == route
    return expert.to(tl.int64), first, same, tl.cumsum(same.to(tl.int32)) - 1


@triton.jit
def _members(same, rank, begin, ROUTES: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """[COLUMNS]: the routes of rank begin to begin + TOKENS - 1 of an expert; -1 where there is none."""
    column = tl.arange(0, COLUMNS)
    hit = same[None, :] & (rank[None, :] == (begin + column)[:, None]) & (column < TOKENS)[:, None]
    return tl.max(tl.where(hit, tl.arange(0, ROUTES)[None, :], -1), 1)


@triton.jit
def _gate_up_rows(tile, r, intermediate, ROWS: tl.constexpr, UP_FIRST: tl.constexpr):
    """Rows r of a block, in w13: eight gate rows, then the eight up rows that go with them, and so on.

    So one thread of the product holds a gate and its up. With UP_FIRST w13 has all up rows before the gate rows.
    """
    return tile * (ROWS // 2) + r // 16 * 8 + r % 8 + ((r // 8 + UP_FIRST) % 2) * intermediate


@triton.jit
def _swiglu(gate_up, limit, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """[ROWS / 2, TOKENS] activations of a block in the row order of _gate_up_rows."""
    pairs = gate_up.reshape(ROWS // 16, 2, 8, TOKENS).permute(0, 2, 3, 1)
    gate, up = tl.split(pairs)
    return _gated(gate, up, limit).reshape(ROWS // 2, TOKENS)


@triton.jit
def _gated(gate, up, limit):
    """silu(gate) up, both clamped."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _quantise(x):
    """e4m3 of x [TOKENS, GROUPS, 32] fp32, and the power of two for each 32 values as its exponent byte."""
    amax = tl.maximum(tl.max(tl.abs(x), 2), 1e-10)
    bits = (amax / E4M3_MAX).to(tl.int32, bitcast=True)
    exponent = (bits + 0x7FFFFF) >> 23
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return to_e4m3(x * inverse[:, :, None]), exponent.to(tl.uint8)


@triton.jit
def _scaled_product(
    acc,
    weights,
    scales,
    inputs,
    present,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """acc + W x over DEPTH columns with x rounded to e4m3, short of a factor FP8_SUM_FACTOR.

    Args:
        acc: [ROWS, TOKENS] fp32.
        weights, scales: pointers [ROWS, DEPTH / 2] to bytes and [ROWS, DEPTH / 32] to scales.
        inputs: pointers to x [TOKENS, DEPTH].
        present: [TOKENS] bool.
    """
    packed = tl.load(weights)
    scale = tl.load(scales)
    x = tl.load(inputs, mask=present[:, None], other=0.0).to(tl.float32)
    values, x_scale = _quantise(x.reshape(TOKENS, DEPTH // 32, 32))
    values = values.reshape(TOKENS, DEPTH)
    # Of mixed formats Triton 3.8 knows no product on sm_120; e4m3 times e4m3 it does in the tensor cores.
    return tl.dot_scaled(e2m1_to_e4m3(packed), scale, "e4m3", tl.trans(values), x_scale, "e4m3", acc)


# In the ring, 64 bytes of each row of W are a part, with the columns of x that go with them. Between parts is a gap, so
# that two parts of a row lie in different banks.


@triton.jit
def _ask_rows(rows, slots, ROWS: tl.constexpr, PARTS: tl.constexpr, NEXT: tl.constexpr, PAIR: tl.constexpr):
    """Ask for PARTS parts of each of ROWS rows: neighbouring threads for one row.

    Eight rows at a time, whose pointers differ from the first eight's by a constant, so that they take no registers.

    Args:
        rows: int32 pointers [8] to the first eight rows.
        NEXT, PAIR: words from them to the second eight, and to the third.
    """
    chunk = tl.arange(0, 4 * PARTS)[None, :]
    place = chunk // 4 * (ROWS * 64 + 64) + (tl.arange(0, 8)[:, None] * 4 + chunk % 4) * 16
    pointers = rows[:, None] + chunk * 4
    for i in tl.static_range(ROWS // 8):
        ask(pointers + (i // 2 * PAIR + i % 2 * NEXT), slots + place + i * 512, 16)


@triton.jit
def _ask_scales(scales, slots, ROWS: tl.constexpr, BYTES: tl.constexpr, STRIDE: tl.constexpr):
    """Ask for BYTES bytes from each of `scales` on, uint8 pointers [ROWS]; STRIDE bytes apart in the ring."""
    SIZE: tl.constexpr = min(BYTES, 16)
    chunk = tl.arange(0, BYTES // SIZE)[None, :] * SIZE
    ask(scales[:, None] + chunk, slots + tl.arange(0, ROWS)[:, None] * STRIDE + chunk, SIZE)


@triton.jit
def _ask_tokens(inputs, present, slots, TOKENS: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr):
    """Ask for PARTS parts of x from `inputs` on, int32 pointers [TOKENS]: CHUNKS times 16 bytes a thread and part.

    What is not present is not read: many programs would ask for the same bytes at once.
    """
    chunk = tl.arange(0, 4 * CHUNKS * PARTS)[None, :]
    place = (chunk // (4 * CHUNKS) * CHUNKS + chunk % CHUNKS) * (TOKENS * 64 + 32)
    place += (tl.arange(0, TOKENS)[:, None] * 4 + chunk // CHUNKS % 4) * 16
    ask(inputs[:, None] + chunk * 4, slots + place, 16, present[:, None])


@triton.jit
def _ring_product(
    acc,
    weights,
    scales,
    inputs,
    weight_slots,
    scale_slots,
    input_slots,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    STRIDE: tl.constexpr,
):
    """acc + W x over PARTS parts that are in the ring, short of a factor SUM_FACTOR.

    Args:
        acc: [ROWS, COLUMNS] fp32; a column beyond TOKENS gets what another one gets.
        weights, scales, inputs: what was asked for: pointers [ROWS], [ROWS] and [COLUMNS].
        weight_slots, scale_slots, input_slots: where it is in the ring.
        STRIDE: bytes from the scales of a row to those of the next.
    """
    thread = tl.arange(0, 4)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :] % TOKENS
    for part in tl.static_range(PARTS):
        words = take(
            weights[:, None] + part * 16 + thread[None, :] * 4,
            weight_slots + part * (ROWS * 64 + 64) + (row * 4 + thread[None, :]) * 16,
        )
        offset = (part * 4 + thread[None, :]) * (32 // GROUP)
        code = take_byte(scales[:, None] + offset, scale_slots + row * STRIDE + offset)
        if GROUP == 32:
            first = two_powers(code + SCALE_SHIFT)
            second = first
        else:
            first = two_e4m3(code, SCALE_FACTOR)
            code = take_byte(scales[:, None] + offset + 1, scale_slots + row * STRIDE + offset + 1)
            second = two_e4m3(code, SCALE_FACTOR)
        for i in tl.static_range(4):
            p, q, r, s = take(
                inputs[None, :] + (part * 4 + thread[:, None]) * 16 + i * 4,
                input_slots + (part * 4 + i) * (TOKENS * 64 + 32) + (column * 4 + thread[:, None]) * 16,
            )
            factor = first if i < 2 else second
            acc = dot(e2m1_operand(words[i], factor, ROWS), e2m1_tokens(p, q, r, s, COLUMNS), acc)
    return acc


@triton.jit
def _ask_fp8(
    turn,
    slots,
    rows,
    inputs,
    present,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    NEXT: tl.constexpr,
    PAIR: tl.constexpr,
):
    """Ask for 128 columns of a dense FP8 W and of x."""
    _ask_rows(rows + turn * 32, slots, ROWS, 2, NEXT, PAIR)
    _ask_tokens(inputs + turn * 64, present, slots + 2 * (ROWS * 64 + 64), TOKENS, 2, 2)


@triton.jit
def _fp8_tile(
    base,
    rows,
    weights,
    scales,
    inputs,
    begin,
    tokens,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    NEXT: tl.constexpr,
    PAIR: tl.constexpr,
    BYTES: tl.constexpr,
):
    """ROWS rows of a dense FP8 W of DEPTH columns times tokens begin to begin + TOKENS - 1.

    Args:
        base: of a ring of BYTES bytes.
        rows, NEXT, PAIR: as in _ask_rows.
        weights: pointers [ROWS] to int32 of e4m3, four columns each.
        scales: pointers [ROWS] to each row's first scale.
        inputs: x [*, DEPTH] as int32, two columns each.
    """
    INPUTS_AT: tl.constexpr = 2 * (ROWS * 64 + 64)
    STAGE: tl.constexpr = INPUTS_AT + 4 * (TOKENS * 64 + 32)
    STAGES: tl.constexpr = BYTES // STAGE
    TURNS: tl.constexpr = DEPTH // 128
    thread = tl.arange(0, 4)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, TOKENS)[None, :]
    token = begin + tl.arange(0, TOKENS)
    present = token < tokens
    inputs = inputs + tl.minimum(token, tokens - 1) * (DEPTH // 2)
    # No slot is still read in which something is asked for.
    tl.debug_barrier()
    for turn in tl.static_range(STAGES - 1):
        if turn < TURNS:
            _ask_fp8(turn, base + turn * STAGE, rows, inputs, present, ROWS, TOKENS, NEXT, PAIR)
        close_group()
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    for turn in tl.range(0, TURNS, num_stages=1):
        scale = scale_value(tl.load(scales + turn)) * DENSE_FACTOR
        await_groups(STAGES - 2)
        later = turn + STAGES - 1
        if later < TURNS:
            _ask_fp8(later, base + later % STAGES * STAGE, rows, inputs, present, ROWS, TOKENS, NEXT, PAIR)
        close_group()
        slots = base + turn % STAGES * STAGE
        value = tl.zeros((ROWS, TOKENS), tl.float32)
        for part in tl.static_range(2):
            words = take(
                weights[:, None] + turn * 32 + part * 16 + thread[None, :] * 4,
                slots + part * (ROWS * 64 + 64) + (row * 4 + thread[None, :]) * 16,
            )
            for i in tl.static_range(2):
                p, q, r, s = take(
                    inputs[None, :] + turn * 64 + (part * 4 + thread[:, None]) * 8 + i * 4,
                    slots + INPUTS_AT + (part * 2 + i) * (TOKENS * 64 + 32) + (column * 4 + thread[:, None]) * 16,
                )
                w = e4m3_operand(words[2 * i], words[2 * i + 1], ROWS)
                value = dot(w, e4m3_tokens(p, q, r, s, TOKENS), value)
        acc += value * scale[:, None]
    return acc * DENSE_FACTOR


@triton.jit
def _integer_scale(largest):
    """The scale of integers of values up to `largest`, of 22 bits as `counted_times` wants it."""
    scale = (tl.maximum(largest, 1e-20) / LARGEST).to(tl.int32, bitcast=True)
    return ((scale + 3) & -4).to(tl.float32, bitcast=True)


@triton.jit
def _to_integers(value, scale):
    """value over its scale as a 16-bit integer: two int8, 256 times the first and the second."""
    # Adding MAGIC rounds.
    q = (value * (1.0 / scale) + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    upper = (q + 128) >> 8
    return upper.to(tl.int8), (q - 256 * upper).to(tl.int8)


@triton.jit
def _quantise_kernel(
    x,
    integers,
    scales,
    HIDDEN: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token's x as integers [2, HIDDEN] int8, and its scale."""
    token = tl.program_id(0)
    column = tl.arange(0, PADDED)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(x + token * HIDDEN + column, mask=column < HIDDEN, other=0.0).to(tl.float32)
    scale = _integer_scale(tl.max(tl.abs(value)))
    upper, lower = _to_integers(value, scale)
    place = integers + token * (2 * HIDDEN) + column
    tl.store(place, upper, mask=column < HIDDEN)
    tl.store(place + HIDDEN, lower, mask=column < HIDDEN)
    tl.store(scales + token, scale)


# As integers W is in lines of 128 bytes, a turn's columns of a row, whose 16-byte chunks are turned by the row, so that
# the same chunk of eight rows lies in different banks.


@triton.jit
def _ask_lines(rows, slots, ROWS: tl.constexpr, NEXT: tl.constexpr, PAIR: tl.constexpr):
    """As _ask_rows, for lines."""
    row = tl.arange(0, 8)[:, None]
    chunk = tl.arange(0, 8)[None, :]
    place = row * 128 + (chunk ^ row) * 16
    pointers = rows[:, None] + chunk * 4
    for i in tl.static_range(ROWS // 8):
        ask(pointers + (i // 2 * PAIR + i % 2 * NEXT), slots + place + i * 1024, 16)


@triton.jit
def _ask_integers(inputs, present, slots):
    """Ask for 256 columns of eight rows of int8 from `inputs` on, int32 pointers [8]: 32 of all rows, then 32 more."""
    chunk = tl.arange(0, 16)[None, :]
    place = chunk // 2 * 256 + tl.arange(0, 8)[:, None] * 32 + chunk % 2 * 16
    ask(inputs[:, None] + chunk * 4, slots + place, 16, present[:, None])


# A warp has 32 rows of a product of integers. Its right-hand sides are four tokens' upper bytes, then their lower ones.


@triton.jit
def _lanes(tokens, LANES: tl.constexpr):
    """For each thread: its first row (the others are 8, 16 and 24 on), and g, t and tables of `integer_product`."""
    lane = tl.arange(0, LANES)
    g = lane % 32 // 4
    # Zero, which the assembler cannot know: it would copy a constant before each use.
    nothing = lane * tokens >> 16
    return lane // 32 * 32 + g, g, lane % 4, nothing + DOUBLES, nothing + NEGATIVES


@triton.jit
def _sides(same, rank, begin, ROUTES: tl.constexpr):
    """The routes of rank begin to begin + 3 of an expert, and the eight right-hand sides' routes; -1 for none."""
    routes = _members(same, rank, begin, ROUTES, 4, 4)
    return routes, tl.join(routes, routes).permute(1, 0).reshape(8)


@triton.jit
def _pick(values, index, SIZE: tl.constexpr):
    """values[index] of [SIZE] values from -1 on."""
    return tl.max(tl.where(tl.arange(0, SIZE)[None, :] == index[:, None], values[None, :], -1), 1)


@triton.jit
def _own(t):
    """Which of the four tokens a thread has after `_merge`."""
    return t % 2 * 2 + t // 2


@triton.jit
def _merge(sums, t, LANES: tl.constexpr):
    """256 times the upper bytes' sum and the lower ones', of the thread's own token.

    Threads 0 and 1 of four have the upper bytes' sums of two tokens each, 2 and 3 the lower ones': they exchange one.
    """
    mine = tl.where(t < 2, sums[0], sums[1])
    other = from_two_on(tl.where(t < 2, sums[1], sums[0]), LANES)
    return tl.where(t < 2, mine, other) * 256.0 + tl.where(t < 2, other, mine)


@triton.jit
def _further(pointers, offset):
    """Each of a tuple of pointers, `offset` further on."""
    found = ()
    for i in tl.static_range(len(pointers)):
        found = found + (pointers[i] + offset,)
    return found


@triton.jit
def _line_product(
    sums,
    weights,
    scales,
    inputs,
    weight_slots,
    scale_slots,
    input_slots,
    doubles,
    negatives,
    LANES: tl.constexpr,
    STRIDE: tl.constexpr,
    factors=None,
    factor_slots=None,
):
    """sums + W x over the 256 columns of a turn that is in the ring: of each of a thread's four rows two sums.

    Args:
        weights, scales: what was asked for: of each of the four rows, pointers [LANES] to its words and its codes.
        inputs: likewise, pointers [LANES] to the integers.
        weight_slots, scale_slots, input_slots: where it is in the ring.
        STRIDE: bytes from the codes of a row to those of the next.
        factors, factor_slots: scales of x for each 32 columns: pointers to those of the two right-hand sides, and where
            both are in the ring, 16 bytes from group to group. None: x has none here.
    """
    for group in tl.static_range(8):
        pointers = inputs + group * 8
        left, right = take_two(pointers, pointers + 1, input_slots + group * 256)
        if factors is not None:
            first, second = take_two(factors[0] + group, factors[1] + group, factor_slots + group * 16)
            first = first.to(tl.float32, bitcast=True)
            second = second.to(tl.float32, bitcast=True)
        found = ()
        # The chunks of a line are turned by its row.
        slots = weight_slots ^ (group * 16)
        for i in tl.static_range(4):
            if i % 2 == 0:
                counted = integer_product(
                    take_word(weights[i] + group * 4, slots + i * 1024),
                    take_word(weights[i + 1] + group * 4, slots + (i + 1) * 1024),
                    left,
                    right,
                    doubles,
                    negatives,
                    LANES,
                )
            code = take_byte(scales[i] + group, scale_slots + group + i * (8 * STRIDE))
            factor = (code << 23).to(tl.float32, bitcast=True)
            if factors is not None:
                a = counted_times(counted[i % 2 * 2], first)
                b = counted_times(counted[i % 2 * 2 + 1], second)
            else:
                a = counted[i % 2 * 2] - MAGIC
                b = counted[i % 2 * 2 + 1] - MAGIC
            found = found + ((sums[i][0] + a * factor, sums[i][1] + b * factor),)
        sums = found
    return sums


@triton.jit
def _integer_gate_up(
    integers,
    integer_scales,
    weights,
    scales,
    result,
    result_scales,
    same,
    rank,
    begin,
    tile,
    rows,
    stages,
    codes,
    tokens,
    top_k,
    limit,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    ROUTES: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    STRIDE: tl.constexpr,
    NEXT: tl.constexpr,
    UP_FIRST: tl.constexpr,
):
    """Gate, up and what they give, as integers, of ROWS rows for an expert's routes of rank begin to begin + 3.

    The scales are asked for, and the lines of the first turns if begin is 0. Each 32 columns of the result, those of 64
    rows, have a scale.
    """
    TURNS: tl.constexpr = HIDDEN // 256
    INPUTS_AT: tl.constexpr = ROWS * 128
    row, g, t, doubles, negatives = _lanes(tokens, ROWS)
    routes, twice = _sides(same, rank, begin, ROUTES)
    wanted = twice >= 0
    asked = integers + (tl.where(wanted, twice // top_k, 0) * 2 + tl.arange(0, 8) // 4) * (HIDDEN // 4)
    if begin > 0:
        # No slot is still read in which something is asked for.
        tl.debug_barrier()
    for turn in tl.static_range(STAGES - 1):
        if turn < TURNS:
            if begin > 0:
                _ask_lines(rows + turn * 32, stages + turn * LINES, ROWS, NEXT, HIDDEN)
            _ask_integers(asked + turn * 64, wanted, stages + turn * LINES + INPUTS_AT)
        close_group()
    zero = tl.zeros((ROWS,), tl.float32)
    sums = ((zero, zero), (zero, zero), (zero, zero), (zero, zero))
    inputs = integers + (tl.maximum(_pick(twice, g, 8), 0) // top_k * 2 + g // 4) * (HIDDEN // 4) + t * 2
    words = ()
    bytes_of = ()
    for i in tl.static_range(4):
        at = _gate_up_rows(tile, row + 8 * i, INTERMEDIATE, ROWS, UP_FIRST)
        words = words + (weights + at * (HIDDEN // 8) + t,)
        bytes_of = bytes_of + (scales + at * (HIDDEN // 32),)
    for turn in tl.range(0, TURNS, num_stages=1):
        await_groups(STAGES - 2)
        later = turn + STAGES - 1
        if later < TURNS:
            slots = stages + later % STAGES * LINES
            _ask_lines(rows + later * 32, slots, ROWS, NEXT, HIDDEN)
            _ask_integers(asked + later * 64, wanted, slots + INPUTS_AT)
        close_group()
        slots = stages + turn % STAGES * LINES
        sums = _line_product(
            sums,
            _further(words, turn * 32),
            _further(bytes_of, turn * 8),
            inputs + turn * 64,
            slots + row * 128 + g * 16 + t * 4,
            codes + row * STRIDE + turn * 8,
            slots + INPUTS_AT + g * 32 + t * 8,
            doubles,
            negatives,
            ROWS,
            STRIDE,
        )
    route = _pick(routes, _own(t), 4)
    present = route >= 0
    factor = 0.5 * tl.load(integer_scales + tl.maximum(route, 0) // top_k)
    first = _gated(_merge(sums[0], t, ROWS) * factor, _merge(sums[1], t, ROWS) * factor, limit)
    second = _gated(_merge(sums[2], t, ROWS) * factor, _merge(sums[3], t, ROWS) * factor, limit)
    largest = tl.maximum(tl.abs(first), tl.abs(second)).reshape(ROWS // 64, 16, 4)
    largest = tl.broadcast_to(tl.max(largest, 1)[:, None, :], (ROWS // 64, 16, 4)).reshape(ROWS)
    scale = _integer_scale(largest)
    lane = tl.arange(0, ROWS)
    group = tile * (ROWS // 64) + lane // 64
    tl.store(result_scales + route * (INTERMEDIATE // 32) + group, scale, mask=present & (lane % 64 < 4))
    place = result + route * (2 * INTERMEDIATE) + tile * (ROWS // 2) + lane // 32 * 16 + g
    for pair in tl.static_range(2):
        upper, lower = _to_integers(second if pair else first, scale)
        tl.store(place + pair * 8, upper, mask=present)
        tl.store(place + pair * 8 + INTERMEDIATE, lower, mask=present)


@triton.jit
def _ask_down(turn, rows, scales, slots, INTERMEDIATE: tl.constexpr, ROWS: tl.constexpr):
    """Ask for a turn's lines and codes of W: 256 columns of ROWS rows, all columns of a block before the next block."""
    STEPS: tl.constexpr = INTERMEDIATE // 256
    row = turn // STEPS * ROWS
    step = turn % STEPS
    _ask_lines(rows + row * (INTERMEDIATE // 8) + step * 32, slots, ROWS, INTERMEDIATE, 2 * INTERMEDIATE)
    _ask_scales(scales + row * (INTERMEDIATE // 32) + step * 8, slots + ROWS * 128 + 2048, ROWS, 8, 8)


@triton.jit
def _integer_down(
    integers,
    integer_scales,
    topk_weights,
    weights,
    scales,
    products,
    same,
    rank,
    begin,
    rows,
    codes,
    base,
    tokens,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    ROUTES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
):
    """BLOCKS blocks of ROWS rows of down for an expert's routes of rank begin to begin + 3, times their weights.

    The lines and codes of the first turns are asked for if begin is 0.

    Args:
        weights, scales, products: of the program's first row.
        rows, codes: pointers as _ask_down takes them.
    """
    STEPS: tl.constexpr = INTERMEDIATE // 256
    TURNS: tl.constexpr = BLOCKS * STEPS
    INPUTS_AT: tl.constexpr = ROWS * 128
    CODES_AT: tl.constexpr = INPUTS_AT + 2048
    GROUPS: tl.constexpr = INTERMEDIATE // 32
    row, g, t, doubles, negatives = _lanes(tokens, ROWS)
    routes, twice = _sides(same, rank, begin, ROUTES)
    wanted = twice >= 0
    asked = integers + (tl.where(wanted, twice, 0) * 2 + tl.arange(0, 8) // 4) * (INTERMEDIATE // 4)
    if begin > 0:
        # No slot is still read in which something is asked for.
        tl.debug_barrier()
    # All scales of the activations at once, four tokens' beside each other. What is absent has the first route's.
    group = tl.minimum(tl.arange(0, triton.next_power_of_2(GROUPS)), GROUPS - 1)[:, None]
    scaled = tl.where(routes >= 0, routes, tl.max(routes, 0))[None, :]
    factor_slots = base + STAGES * LINES
    ask(integer_scales + scaled * GROUPS + group, factor_slots + group * 16 + tl.arange(0, 4)[None, :] * 4, 4)
    for turn in tl.static_range(STAGES - 1):
        if turn < TURNS:
            if begin > 0:
                _ask_down(turn, rows, codes, base + turn * LINES, INTERMEDIATE, ROWS)
            _ask_integers(asked + turn % STEPS * 64, wanted, base + turn * LINES + INPUTS_AT)
        close_group()
    inputs = integers + (tl.maximum(_pick(twice, g, 8), 0) * 2 + g // 4) * (INTERMEDIATE // 4) + t * 2
    factors = ()
    for second in tl.static_range(2):
        factors = factors + (integer_scales + tl.maximum(_pick(routes, t * 2 % 4 + second, 4), 0) * GROUPS,)
    words = ()
    bytes_of = ()
    for i in tl.static_range(4):
        words = words + (weights + (row + 8 * i) * (INTERMEDIATE // 8) + t,)
        bytes_of = bytes_of + (scales + (row + 8 * i) * GROUPS,)
    route = _pick(routes, _own(t), 4)
    present = route >= 0
    weight = 0.5 * tl.load(topk_weights + route, mask=present, other=0.0)
    result = products + route * HIDDEN + row
    zero = tl.zeros((ROWS,), tl.float32)
    sums = ((zero, zero), (zero, zero), (zero, zero), (zero, zero))
    # One loop over blocks and columns: what is asked for runs ahead from a block into the next.
    for turn in tl.range(0, TURNS, num_stages=1):
        await_groups(STAGES - 2)
        later = turn + STAGES - 1
        if later < TURNS:
            slots = base + later % STAGES * LINES
            _ask_down(later, rows, codes, slots, INTERMEDIATE, ROWS)
            _ask_integers(asked + later % STEPS * 64, wanted, slots + INPUTS_AT)
        close_group()
        slots = base + turn % STAGES * LINES
        block = turn // STEPS * ROWS
        step = turn % STEPS
        sums = _line_product(
            sums,
            _further(words, block * (INTERMEDIATE // 8) + step * 32),
            _further(bytes_of, block * GROUPS + step * 8),
            inputs + step * 64,
            slots + row * 128 + g * 16 + t * 4,
            slots + CODES_AT + row * 8,
            slots + INPUTS_AT + g * 32 + t * 8,
            doubles,
            negatives,
            ROWS,
            8,
            _further(factors, step * 8),
            factor_slots + step * 128 + t % 2 * 8,
        )
        if step == STEPS - 1:
            for i in tl.static_range(4):
                tl.store(result + block + 8 * i, _merge(sums[i], t, ROWS) * weight, mask=present)
            sums = ((zero, zero), (zero, zero), (zero, zero), (zero, zero))


@triton.jit
def _input_pointers(x, row, depth, DEPTH: tl.constexpr, FP8: tl.constexpr):
    """Pointers to rows of x [*, depth] bf16: the first of int32 pairs, or, with FP8, the first DEPTH values."""
    # What is absent reads what is there: no further lines.
    row = tl.where(row >= 0, row, tl.max(row, 0))
    if FP8:
        pointers = x.to(tl.pointer_type(tl.bfloat16)) + row[:, None] * depth + tl.arange(0, DEPTH)[None, :]
    else:
        pointers = x + row * (depth // 2)
    return pointers


@triton.jit
def _arrive(counter):
    """Count one program more whose stores are done."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def _await(counter, count):
    """Wait until `count` programs have arrived; then what they stored is there."""
    seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while seen < count:
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")


@triton.jit
def _gate_up_kernel(
    x,
    integers,
    integer_scales,
    ids,
    w13,
    w13_scale,
    w13_global,
    shared_w13,
    shared_scale,
    activations,
    activation_scales,
    arrived,
    routes,
    tokens,
    top_k,
    limit,
    shared_programs,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    ROUTES: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SHARED_TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    UP_FIRST: tl.constexpr,
    INTEGERS: tl.constexpr,
    PDL: tl.constexpr,
):
    """activations[route] of one block of gate and up rows. x and activations are int32, two bf16 each, shared_w13 and,
    without FP8, w13 int32 too; integers int32, four int8 each. With INTEGERS the activations of a route are integers in
    the same bytes, [2, INTERMEDIATE] int8, and activation_scales[route] are fp32, one for each 32.

    The first shared_programs programs belong to the shared expert, whose activations follow those of all routes.
    With integers and dependent launch arrived[route] counts the blocks that are done, arrived[routes] those of the
    shared expert.
    """
    TILES: tl.constexpr = 2 * INTERMEDIATE // ROWS
    COLUMNS: tl.constexpr = max(TOKENS, 8)
    # All scales of the rows at once, each row's a bank from the next one's; then the turns.
    SCALES: tl.constexpr = HIDDEN // GROUP
    STRIDE: tl.constexpr = SCALES + min(SCALES, 16)
    INPUTS_AT: tl.constexpr = PARTS * (ROWS * 64 + 64)
    STAGE: tl.constexpr = INPUTS_AT + 4 * PARTS * (TOKENS * 64 + 32)
    LINES: tl.constexpr = ROWS * 128 + 8 * 256
    # The shared expert has room for two turns at least. FP8 activations are pipelined by Triton.
    SHARED_BYTES: tl.constexpr = 4 * (SHARED_ROWS * 64 + 64 + 2 * (SHARED_TOKENS * 64 + 32))
    ROUTED_BYTES: tl.constexpr = 0 if FP8 else ROWS * STRIDE + STAGES * (LINES if INTEGERS else STAGE)
    BYTES: tl.constexpr = max(ROUTED_BYTES, SHARED_BYTES)
    base = ring(BYTES)
    program = tl.program_id(0)
    row = _gate_up_rows(program, tl.arange(0, SHARED_ROWS), INTERMEDIATE, SHARED_ROWS, False)
    eight = tl.arange(0, 8)
    result = activations.to(tl.pointer_type(tl.bfloat16))
    if program < shared_programs:
        if PDL:
            # The shared expert's weights do not depend on the launches before.
            for block in range(HIDDEN // 128):
                prefetch_l2(shared_w13 + row * (HIDDEN // 4) + block * 32)
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        weights = shared_w13 + row * (HIDDEN // 4)
        scales = shared_scale + row // 128 * (HIDDEN // 128)
        column = program * (SHARED_ROWS // 2) + tl.arange(0, SHARED_ROWS // 2)
        for begin in range(0, tokens, SHARED_TOKENS):
            acc = _fp8_tile(
                base,
                shared_w13 + (program * (SHARED_ROWS // 2) + eight) * (HIDDEN // 4),
                weights,
                scales,
                x,
                begin,
                tokens,
                HIDDEN,
                SHARED_ROWS,
                SHARED_TOKENS,
                INTERMEDIATE * (HIDDEN // 4),
                8 * (HIDDEN // 4),
                BYTES,
            )
            value = _swiglu(acc, limit, SHARED_ROWS, SHARED_TOKENS)
            token = begin + tl.arange(0, SHARED_TOKENS)
            place = (routes + token)[None, :] * INTERMEDIATE + column[:, None]
            tl.store(result + place, to_bf16(value), mask=(token < tokens)[None, :])
        if INTEGERS and PDL:
            _arrive(arrived + routes)
        return
    tile = (program - shared_programs) % TILES
    route = (program - shared_programs) // TILES
    if PDL and not INTEGERS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # With integers the launch before is the one that makes them, and the ids were complete before it began.
    expert, first, same, rank = _first_route(ids, route, routes, ROUTES)
    row = _gate_up_rows(tile, tl.arange(0, ROWS), INTERMEDIATE, ROWS, UP_FIRST)
    scales = w13_scale + expert * (2 * INTERMEDIATE * (HIDDEN // GROUP)) + row * (HIDDEN // GROUP)
    column = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
    factor = FP8_SUM_FACTOR if FP8 else SUM_FACTOR
    if GROUP == 16:
        factor *= tl.load(w13_global + expert)
    if FP8:
        weights = w13 + expert * (2 * INTERMEDIATE * (HIDDEN // 2)) + row[:, None] * (HIDDEN // 2)
        weights += tl.arange(0, DEPTH // 2)[None, :]
        scales = scales[:, None] + tl.arange(0, DEPTH // 32)[None, :]
    else:
        weights = w13 + expert * (2 * INTERMEDIATE * (HIDDEN // 8)) + row * (HIDDEN // 8)
        scales = scales.to(tl.pointer_type(tl.uint8))
        stages = base if INTEGERS else base + ROWS * STRIDE
        rows = w13 + expert * (2 * INTERMEDIATE * (HIDDEN // 8))
        rows += (tile * (ROWS // 2) + eight + UP_FIRST * INTERMEDIATE) * (HIDDEN // 8)
        NEXT: tl.constexpr = (1 - 2 * UP_FIRST) * INTERMEDIATE * (HIDDEN // 8)
    if INTEGERS:
        codes = base + STAGES * LINES
        if first:
            _ask_scales(scales, codes, ROWS, SCALES, STRIDE)
            for turn in tl.static_range(min(STAGES - 1, HIDDEN // 256)):
                _ask_lines(rows + turn * 32, stages + turn * LINES, ROWS, NEXT, HIDDEN)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    if not first:
        return
    if INTEGERS:
        for begin in range(0, tl.sum(same.to(tl.int32)), 4):
            _integer_gate_up(
                integers,
                integer_scales,
                w13 + expert * (2 * INTERMEDIATE * (HIDDEN // 8)),
                w13_scale + expert * (2 * INTERMEDIATE * (HIDDEN // 32)),
                activations.to(tl.pointer_type(tl.int8)),
                activation_scales,
                same,
                rank,
                begin,
                tile,
                rows,
                stages,
                codes,
                tokens,
                top_k,
                limit,
                HIDDEN,
                INTERMEDIATE,
                ROUTES,
                ROWS,
                STAGES,
                LINES,
                STRIDE,
                NEXT,
                UP_FIRST,
            )
        if PDL:
            _arrive(arrived + route)
        return
    for begin in range(0, tl.sum(same.to(tl.int32)), TOKENS):
        member = _members(same, rank, begin, ROUTES, TOKENS, COLUMNS)
        present = member >= 0
        inputs = _input_pointers(x, tl.where(present, member // top_k, -1), HIDDEN, DEPTH, FP8)
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        if FP8:
            for step in tl.range(0, HIDDEN // DEPTH, num_stages=STAGES):
                acc = _scaled_product(
                    acc,
                    weights + step * (DEPTH // 2),
                    scales + step * (DEPTH // 32),
                    inputs + step * DEPTH,
                    present,
                    TOKENS,
                    DEPTH,
                )
        else:
            TURNS: tl.constexpr = HIDDEN // (128 * PARTS)
            asked = _members(same, rank, begin, ROUTES, TOKENS, TOKENS)
            wanted = asked >= 0
            asked = x + tl.where(wanted, asked // top_k, 0) * (HIDDEN // 2)
            # No slot is still read in which something is asked for.
            tl.debug_barrier()
            _ask_scales(scales, base, ROWS, SCALES, STRIDE)
            for turn in tl.static_range(STAGES - 1):
                if turn < TURNS:
                    slots = stages + turn * STAGE
                    _ask_rows(rows + turn * (16 * PARTS), slots, ROWS, PARTS, NEXT, HIDDEN)
                    _ask_tokens(asked + turn * (64 * PARTS), wanted, slots + INPUTS_AT, TOKENS, PARTS, 4)
                close_group()
            for turn in tl.range(0, TURNS, num_stages=1):
                await_groups(STAGES - 2)
                later = turn + STAGES - 1
                if later < TURNS:
                    slots = stages + later % STAGES * STAGE
                    _ask_rows(rows + later * (16 * PARTS), slots, ROWS, PARTS, NEXT, HIDDEN)
                    _ask_tokens(asked + later * (64 * PARTS), wanted, slots + INPUTS_AT, TOKENS, PARTS, 4)
                close_group()
                slots = stages + turn % STAGES * STAGE
                acc = _ring_product(
                    acc,
                    weights + turn * (16 * PARTS),
                    scales + turn * (4 * PARTS * (32 // GROUP)),
                    inputs + turn * (64 * PARTS),
                    slots,
                    base + turn * (4 * PARTS * (32 // GROUP)),
                    slots + INPUTS_AT,
                    GROUP,
                    ROWS,
                    COLUMNS,
                    TOKENS,
                    PARTS,
                    STRIDE,
                )
        value = _swiglu(acc * factor, limit, ROWS, COLUMNS)
        place = member[None, :] * INTERMEDIATE + column[:, None]
        tl.store(result + place, to_bf16(value), mask=present[None, :])


@triton.jit
def _down_kernel(
    activations,
    activation_scales,
    ids,
    topk_weights,
    w2,
    w2_scale,
    w2_global,
    shared_w2,
    shared_scale,
    products,
    arrived,
    routes,
    tokens,
    shared_programs,
    up_programs,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    ROUTES: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    SHARED_TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    INTEGERS: tl.constexpr,
    BESIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """products[route], fp32, of BLOCKS blocks of ROWS rows of w2, times the route's weight.

    As in _gate_up_kernel, the first programs and the last products are the shared expert's.

    With BESIDE these programs work while the last ones of gate and up still run, all of which began after everything
    before them was complete. Each waits for the up_programs of its own expert (the shared one has
    2 INTERMEDIATE / SHARED_ROWS), and only at its end for the whole launch, so that later kernels may rely on that.
    """
    TILES: tl.constexpr = HIDDEN // (ROWS * BLOCKS)
    COLUMNS: tl.constexpr = max(TOKENS, 8)
    SCALES: tl.constexpr = 4 * PARTS * (32 // GROUP)
    SCALES_AT: tl.constexpr = PARTS * (ROWS * 64 + 64)
    INPUTS_AT: tl.constexpr = SCALES_AT + ROWS * SCALES
    STAGE: tl.constexpr = INPUTS_AT + 4 * PARTS * (TOKENS * 64 + 32)
    # With integers the activations' scales follow.
    LINES: tl.constexpr = ROWS * 128 + 8 * 256 + ROWS * 8
    INTEGER_BYTES: tl.constexpr = STAGES * LINES + INTERMEDIATE // 2
    SHARED_BYTES: tl.constexpr = 4 * (SHARED_ROWS * 64 + 64 + 2 * (SHARED_TOKENS * 64 + 32))
    ROUTED_BYTES: tl.constexpr = 0 if FP8 else INTEGER_BYTES if INTEGERS else STAGES * STAGE
    BYTES: tl.constexpr = max(ROUTED_BYTES, SHARED_BYTES)
    base = ring(BYTES)
    program = tl.program_id(0)
    eight = tl.arange(0, 8)
    if program < shared_programs:
        first_row = program * (BLOCKS * SHARED_ROWS) + tl.arange(0, SHARED_ROWS)
        if PDL:
            for block in range(BLOCKS):
                line = shared_w2 + (first_row + block * SHARED_ROWS) * (INTERMEDIATE // 4)
                for column in range(INTERMEDIATE // 128):
                    prefetch_l2(line + column * 32)
            if BESIDE:
                _await(arrived + routes, 2 * INTERMEDIATE // SHARED_ROWS)
            else:
                tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        inputs = activations + routes * (INTERMEDIATE // 2)
        for begin in range(0, tokens, SHARED_TOKENS):
            token = begin + tl.arange(0, SHARED_TOKENS)
            for block in tl.range(0, BLOCKS, num_stages=1):
                row = first_row + block * SHARED_ROWS
                weights = shared_w2 + row * (INTERMEDIATE // 4)
                scales = shared_scale + row // 128 * (INTERMEDIATE // 128)
                acc = _fp8_tile(
                    base,
                    shared_w2 + ((program * BLOCKS + block) * SHARED_ROWS + eight) * (INTERMEDIATE // 4),
                    weights,
                    scales,
                    inputs,
                    begin,
                    tokens,
                    INTERMEDIATE,
                    SHARED_ROWS,
                    SHARED_TOKENS,
                    8 * (INTERMEDIATE // 4),
                    16 * (INTERMEDIATE // 4),
                    BYTES,
                )
                place = (routes + token)[None, :] * HIDDEN + row[:, None]
                tl.store(products + place, acc, mask=(token < tokens)[None, :])
        if BESIDE:
            tl.extra.cuda.gdc_wait()
        return
    tile = (program - shared_programs) % TILES
    route = (program - shared_programs) // TILES
    # The ids were complete before the programs of gate and up went on, whose activations are what must be waited for.
    expert, first, same, rank = _first_route(ids, route, routes, ROUTES)
    row = tile * (BLOCKS * ROWS) + tl.arange(0, ROWS)
    if not FP8:
        STEPS: tl.constexpr = INTERMEDIATE // (128 * PARTS)
        TURNS: tl.constexpr = BLOCKS * STEPS
        weights = w2 + expert * (HIDDEN * (INTERMEDIATE // 8)) + row * (INTERMEDIATE // 8)
        rows = w2 + expert * (HIDDEN * (INTERMEDIATE // 8)) + (tile * (BLOCKS * ROWS) + eight) * (INTERMEDIATE // 8)
        scales = w2_scale + expert * (HIDDEN * (INTERMEDIATE // GROUP)) + row * (INTERMEDIATE // GROUP)
        scales = scales.to(tl.pointer_type(tl.uint8))
        if first:
            # Weights do not depend on the launch before.
            if INTEGERS:
                for turn in tl.static_range(min(STAGES - 1, BLOCKS * (INTERMEDIATE // 256))):
                    _ask_down(turn, rows, scales, base + turn * LINES, INTERMEDIATE, ROWS)
            else:
                for turn in tl.static_range(min(STAGES - 1, TURNS)):
                    words = turn // STEPS * (ROWS * (INTERMEDIATE // 8)) + turn % STEPS * (16 * PARTS)
                    codes = turn // STEPS * (ROWS * (INTERMEDIATE // GROUP)) + turn % STEPS * SCALES
                    _ask_rows(rows + words, base + turn * STAGE, ROWS, PARTS, INTERMEDIATE, 2 * INTERMEDIATE)
                    _ask_scales(scales + codes, base + turn * STAGE + SCALES_AT, ROWS, SCALES, SCALES)
    if PDL:
        if not BESIDE:
            tl.extra.cuda.gdc_wait()
        elif first:
            _await(arrived + route, up_programs)
        tl.extra.cuda.gdc_launch_dependents()
    if not first:
        if BESIDE and program == 0:
            tl.extra.cuda.gdc_wait()
        return
    if INTEGERS:
        begin_row = expert * HIDDEN + tile * (BLOCKS * ROWS)
        for begin in range(0, tl.sum(same.to(tl.int32)), 4):
            _integer_down(
                activations,
                activation_scales.to(tl.pointer_type(tl.int32)),
                topk_weights,
                w2 + begin_row * (INTERMEDIATE // 8),
                w2_scale + begin_row * (INTERMEDIATE // 32),
                products + tile * (BLOCKS * ROWS),
                same,
                rank,
                begin,
                rows,
                scales,
                base,
                tokens,
                HIDDEN,
                INTERMEDIATE,
                ROUTES,
                ROWS,
                BLOCKS,
                STAGES,
                LINES,
            )
        if BESIDE:
            tl.extra.cuda.gdc_wait()
        return
    factor = FP8_SUM_FACTOR if FP8 else SUM_FACTOR
    if GROUP == 16:
        factor *= tl.load(w2_global + expert)
    if FP8:
        w2 += expert * (HIDDEN * (INTERMEDIATE // 2))
        w2_scale += expert * (HIDDEN * (INTERMEDIATE // GROUP))
    for begin in range(0, tl.sum(same.to(tl.int32)), TOKENS):
        member = _members(same, rank, begin, ROUTES, TOKENS, COLUMNS)
        present = member >= 0
        weight = tl.load(topk_weights + member, mask=present, other=0.0) * factor
        inputs = _input_pointers(activations, member, INTERMEDIATE, DEPTH, FP8)
        if FP8:
            for block in tl.range(0, BLOCKS, num_stages=STAGES):
                block_row = row + block * ROWS
                acc = tl.zeros((ROWS, TOKENS), tl.float32)
                for step in tl.static_range(INTERMEDIATE // DEPTH):
                    half = step * (DEPTH // 2) + tl.arange(0, DEPTH // 2)
                    group = step * (DEPTH // 32) + tl.arange(0, DEPTH // 32)
                    acc = _scaled_product(
                        acc,
                        w2 + block_row[:, None] * (INTERMEDIATE // 2) + half[None, :],
                        w2_scale + block_row[:, None] * (INTERMEDIATE // 32) + group[None, :],
                        inputs + step * DEPTH,
                        present,
                        TOKENS,
                        DEPTH,
                    )
                place = member[None, :] * HIDDEN + block_row[:, None]
                tl.store(products + place, acc * weight[None, :], mask=present[None, :])
        else:
            asked = _members(same, rank, begin, ROUTES, TOKENS, TOKENS)
            wanted = asked >= 0
            asked = activations + tl.where(wanted, asked, 0) * (INTERMEDIATE // 2)
            if begin > 0:
                # No slot is still read in which something is asked for.
                tl.debug_barrier()
            for turn in tl.static_range(STAGES - 1):
                if turn < TURNS:
                    slots = base + turn * STAGE
                    if begin > 0:
                        words = turn // STEPS * (ROWS * (INTERMEDIATE // 8)) + turn % STEPS * (16 * PARTS)
                        codes = turn // STEPS * (ROWS * (INTERMEDIATE // GROUP)) + turn % STEPS * SCALES
                        _ask_rows(rows + words, slots, ROWS, PARTS, INTERMEDIATE, 2 * INTERMEDIATE)
                        _ask_scales(scales + codes, slots + SCALES_AT, ROWS, SCALES, SCALES)
                    _ask_tokens(asked + turn % STEPS * (64 * PARTS), wanted, slots + INPUTS_AT, TOKENS, PARTS, 4)
                close_group()
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
            # One loop over blocks and columns: what is asked for runs ahead from a block into the next.
            for turn in tl.range(0, TURNS, num_stages=1):
                await_groups(STAGES - 2)
                later = turn + STAGES - 1
                if later < TURNS:
                    slots = base + later % STAGES * STAGE
                    words = later // STEPS * (ROWS * (INTERMEDIATE // 8)) + later % STEPS * (16 * PARTS)
                    codes = later // STEPS * (ROWS * (INTERMEDIATE // GROUP)) + later % STEPS * SCALES
                    _ask_rows(rows + words, slots, ROWS, PARTS, INTERMEDIATE, 2 * INTERMEDIATE)
                    _ask_scales(scales + codes, slots + SCALES_AT, ROWS, SCALES, SCALES)
                    _ask_tokens(asked + later % STEPS * (64 * PARTS), wanted, slots + INPUTS_AT, TOKENS, PARTS, 4)
                close_group()
                slots = base + turn % STAGES * STAGE
                acc = _ring_product(
                    acc,
                    weights + turn // STEPS * (ROWS * (INTERMEDIATE // 8)) + turn % STEPS * (16 * PARTS),
                    scales + turn // STEPS * (ROWS * (INTERMEDIATE // GROUP)) + turn % STEPS * SCALES,
                    inputs + turn % STEPS * (64 * PARTS),
                    slots,
                    slots + SCALES_AT,
                    slots + INPUTS_AT,
                    GROUP,
                    ROWS,
                    COLUMNS,
                    TOKENS,
                    PARTS,
                    SCALES,
                )
                if turn % STEPS == STEPS - 1:
                    place = member[None, :] * HIDDEN + (row + turn // STEPS * ROWS)[:, None]
                    tl.store(products + place, acc * weight[None, :], mask=present[None, :])
                    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    if BESIDE:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _sum_kernel(
    products,
    ids,
    out,
    arrived,
    routes,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED: tl.constexpr,
    SHARED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BESIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """out[token]: the sum of its products, and of the shared expert's. The token's counters begin anew."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place = tl.arange(0, PADDED)
    route = token * TOP_K + place
    if BESIDE and tl.program_id(0) == 0:
        # The last token's are followed by the shared expert's.
        tl.store(arrived + route, 0, mask=place <= TOP_K)
    present = place < TOP_K
    present &= tl.load(ids + route, mask=present, other=-1) >= 0
    if SHARED:
        route = tl.where(place == TOP_K, routes + token, route)
        present |= place == TOP_K
    value = tl.load(
        products + route[:, None] * HIDDEN + column[None, :],
        mask=present[:, None] & (column < HIDDEN)[None, :],
        other=0.0,
    )
    tl.store(out + token * HIDDEN + column, to_bf16(tl.sum(value, 0)), mask=column < HIDDEN)


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one product is cut.

    Attributes:
        rows: weight rows of a block, `blocks` of which a program takes one after another.
        warps: of a program.
        parts: 128 columns each, that a turn of the ring takes.
        stages: turns that the ring has room for; with FP8 activations, pipeline stages.
        depth: columns a turn, with FP8 activations.
        registers: the most a thread may use on Hopper, where that was swept; None and elsewhere the compiler's choice.
    """

    rows: int
    warps: int
    blocks: int = 1
    parts: int = 2
    stages: int = 2
    depth: int = 256
    registers: int | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the two products are cut, and the tokens a routed and a shared expert's product takes at once.

    The shared expert's weights have twice the bytes of a routed one's: its programs take fewer rows. With `integers`
    the routed products are of integers, four tokens at once and 256 columns a turn, by a warp for each 32 rows. 64 rows
    of gate and up give the 32 activations that share a scale.
    """

    gate_up: Cut
    down: Cut
    tokens: int = 8
    shared_tokens: int = 16
    shared_rows: int = 32
    integers: bool = False

    def __post_init__(self) -> None:
        if self.integers and (
            self.gate_up.rows % 64 or any(cut.rows != 32 * cut.warps for cut in (self.gate_up, self.down))
        ):
            raise ValueError(f"integers need a warp for each 32 rows, and 64 rows of gate and up: {self}")


def plan(tokens: int, hidden: int, intermediate: int, fp8_activations: bool = False, nvfp4: bool = False) -> Plan:
    """Choose the blocks from the shapes; the choices are those of sweeps on an H200 (benchmarks/log.md).

    Args:
        tokens: of the call.
        hidden, intermediate: columns of x and of an expert's activations.
        fp8_activations: as the op's.
        nvfp4: of the weights.
    """
    shared = 16 if tokens > 8 else 8
    if fp8_activations:
        blocks = 8 if tokens > 8 else 4 if tokens > 2 else 1
        while hidden % (64 * blocks):
            blocks //= 2
        up = Cut(rows=64, warps=4, stages=3) if tokens > 2 else Cut(rows=32, warps=2, stages=4)
        down = Cut(rows=64, warps=4, blocks=blocks, depth=math.gcd(intermediate, 512), stages=2)
        return Plan(up, down, shared_tokens=8)
    parts = math.gcd(intermediate // 128, 4 if tokens <= 2 else 2)
    # Scales of a wide row, NVFP4's above all, leave room for fewer rows.
    rows = 64 if tokens > 2 and hidden <= 5120 else 32
    integers = rows == 64 and intermediate % 256 == 0 and not nvfp4
    stages = 3 if integers and tokens > 8 else 2 if tokens > 2 else 4
    return Plan(
        Cut(rows, rows // 32 if integers else 2, stages=stages),
        Cut(64, 2, blocks=1 if tokens <= 2 else 2 if tokens <= 8 else 4, parts=parts),
        tokens=4 if tokens <= 16 else 8,
        shared_tokens=shared,
        shared_rows=64 if tokens > 8 else 32,
        integers=integers,
    )


SUM_COLUMNS = 256
SUM_WARPS = 2
QUANTISE_WARPS = 8


def moe_fp4_small_batch(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    *,
    w13_global: torch.Tensor | None = None,
    w2_global: torch.Tensor | None = None,
    shared_w13: torch.Tensor | None = None,
    shared_w13_scale: torch.Tensor | None = None,
    shared_w2: torch.Tensor | None = None,
    shared_w2_scale: torch.Tensor | None = None,
    swiglu_limit: float = SWIGLU_LIMIT,
    fp8_activations: bool = False,
    up_first: bool = False,
    out: torch.Tensor | None = None,
    check: bool = False,
    chosen: Plan | None = None,
) -> torch.Tensor:
    """y[t] = sum over k of topk_weights[t, k] E[topk_ids[t, k]](x[t]) + S(x[t]) for up to 64 tokens.

    An expert is w2 a with a = silu(min(gate, L)) * clamp(up, -L, L), gate and up the two halves of w13 x, L the
    swiglu_limit. Routed weights are FP4, two a byte, low half first; the shared expert S, if given, is FP8 with
    128 x 128 scales. Three launches: gate and up, down, sum. Sums are fp32; a is rounded to bf16. MXFP4 of three tokens
    and more, where H is at most 5120 and I a multiple of 256, takes one launch before them, which makes integers of x:
    no value moves by more than 1 / 65024 of the token's largest, and none of the experts' a, which is integers too, by
    more than that of the largest of its 32.

    With integers and dependent launch the programs count each other in a buffer of the stream the call is made on: call
    once before a graph is captured, and do not replay graphs captured on one stream at the same time.

    Args:
        x: [tokens, H] bfloat16, contiguous; H a multiple of 256.
        topk_ids: [tokens, top_k] int32: distinct experts of each token, or -1 for none.
        topk_weights: [tokens, top_k] float32, the routed scaling factor folded in.
        w13: [experts, 2 I, H / 2] uint8, contiguous: I gate rows, then I up rows; I a multiple of 128.
        w13_scale: MXFP4: [experts, 2 I, H / 32] float8_e8m0fnu or uint8 (2 ** (byte - 127)). NVFP4: [experts, 2 I,
            H / 16] float8_e4m3fn. Contiguous.
        w2: [experts, H, I / 2] uint8, contiguous.
        w2_scale: as w13_scale: [experts, H, I / 32] or [experts, H, I / 16].
        w13_global, w2_global: NVFP4 only: [experts] float32, a factor for each expert's weights.
        shared_w13: [2 I, H] float8_e4m3fn, contiguous: gate rows, then up rows.
        shared_w13_scale: [2 I / 128, H / 128], contiguous; float32, or float8_e8m0fnu or uint8.
        shared_w2, shared_w2_scale: [H, I] and [H / 128, I / 128], as above.
        swiglu_limit: L; inf for none.
        fp8_activations: MXFP4 only: round x and a to e4m3 with a power-of-two scale for each 32 values (W4A8) and
            multiply with `tl.dot_scaled`, which sm_100 and sm_120 do in the tensor cores; elsewhere Triton emulates it.
        up_first: w13 and its scales have the I up rows before the gate rows, as FlashInfer keeps them.
        out: [tokens, H] bfloat16, contiguous; allocated when None.
        check: also verify that every id is -1 or an expert. For debugging: it waits for the GPU, so it cannot be used
            under graph capture.
        chosen: cut the products this way, not as `plan` says.

    Returns:
        y, bfloat16 [tokens, H].

    Raises:
        ValueError: a wrong dtype, shape, stride, alignment or device, scales that do not go together; with check, an id
            out of range.

    Source: SGLang 0.5.23, `cast_e2m1fn_to_e4m3fn` (FP4 packing), `silu_and_mul_masked_post_quant.cuh` (clamped SwiGLU),
    `DeepseekV2MoE` (shared expert, its clamp); the limit of 10 is the checkpoint's `swiglu_limit`.
    """
    tokens, hidden = x.shape
    top_k = topk_ids.shape[1]
    nvfp4 = _require_arguments(
        x, topk_ids, topk_weights, w13, w13_scale, w2, w2_scale, w13_global, w2_global, fp8_activations
    )
    experts, intermediate = w13.shape[0], w13.shape[1] // 2
    shared = _require_shared(shared_w13, shared_w13_scale, shared_w2, shared_w2_scale, hidden, intermediate)
    if out is None:
        out = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=x.device)
    require(out, "out", torch.bfloat16, (tokens, hidden))
    require_device(
        x.device,
        topk_ids=topk_ids,
        topk_weights=topk_weights,
        w13=w13,
        w13_scale=w13_scale,
        w2=w2,
        w2_scale=w2_scale,
        w13_global=w13_global,
        w2_global=w2_global,
        shared_w13=shared_w13,
        shared_w13_scale=shared_w13_scale,
        shared_w2=shared_w2,
        shared_w2_scale=shared_w2_scale,
        out=out,
    )
    if tokens == 0:
        return out
    if check:
        _check_ids(topk_ids, experts)
    chosen = chosen or plan(tokens, hidden, intermediate, fp8_activations, nvfp4)
    routes = tokens * top_k
    rows = routes + tokens if shared else routes
    _require_alignment(
        x=x,
        w13=w13,
        w2=w2,
        shared_w13=shared_w13,
        shared_w2=shared_w2,
    )
    activations = x.new_empty((rows, intermediate))
    products = torch.empty((rows, hidden), dtype=torch.float32, device=x.device)
    up, down = chosen.gate_up, chosen.down
    integral = chosen.integers and not nvfp4 and not fp8_activations
    arrived = _arrived(x.device, torch.cuda.current_stream().cuda_stream if x.is_cuda else 0)
    hopper = capability(x.device)[0] == 9
    pdl = has_dependent_launch(x.device)
    constants = {
        "HIDDEN": hidden,
        "INTERMEDIATE": intermediate,
        "ROUTES": max(16, triton.next_power_of_2(routes)),
        "GROUP": 16 if nvfp4 else 32,
        "FP8": fp8_activations,
        "TOKENS": chosen.tokens,
        "SHARED_TOKENS": chosen.shared_tokens,
        "SHARED_ROWS": chosen.shared_rows,
        "INTEGERS": integral,
        "PDL": pdl,
    }
    launch = {"launch_pdl": True} if pdl else {}
    # What is absent only needs the right type.
    dense13, dense13_scale = (shared_w13, shared_w13_scale) if shared else (w13, topk_weights)
    dense2, dense2_scale = (shared_w2, shared_w2_scale) if shared else (w2, topk_weights)
    assert dense13 is not None and dense2 is not None
    pairs = activations.view(torch.int32)
    integers, integer_scales, activation_scales = x, topk_weights, topk_weights
    if integral:
        activation_scales = torch.empty((routes, intermediate // 32), dtype=torch.float32, device=x.device)
        integers = torch.empty((tokens, 2, hidden), dtype=torch.int8, device=x.device)
        integer_scales = torch.empty((tokens,), dtype=torch.float32, device=x.device)
        _quantise_kernel[(tokens,)](
            x,
            integers,
            integer_scales,
            HIDDEN=hidden,
            PADDED=triton.next_power_of_2(hidden),
            PDL=pdl,
            num_warps=QUANTISE_WARPS,
            **launch,
        )
    shared_programs = shared * 2 * intermediate // chosen.shared_rows
    _gate_up_kernel[(2 * intermediate // up.rows * routes + shared_programs,)](
        x.view(torch.int32),
        integers.view(torch.int32),
        integer_scales,
        topk_ids,
        w13 if fp8_activations else w13.view(torch.int32),
        _scale_bytes(w13_scale),
        w13_global if nvfp4 else topk_weights,
        dense13.view(torch.int32),
        _scale_bytes(dense13_scale),
        pairs,
        activation_scales,
        arrived,
        routes,
        tokens,
        top_k,
        swiglu_limit,
        shared_programs,
        ROWS=up.rows,
        DEPTH=up.depth,
        STAGES=up.stages,
        PARTS=up.parts,
        num_warps=up.warps,
        num_stages=up.stages,
        maxnreg=up.registers if hopper else None,
        UP_FIRST=up_first,
        **constants,
        **launch,
    )
    shared_programs = shared * hidden // (chosen.shared_rows * down.blocks)
    _down_kernel[(hidden // (down.rows * down.blocks) * routes + shared_programs,)](
        pairs,
        activation_scales,
        topk_ids,
        topk_weights,
        w2 if fp8_activations else w2.view(torch.int32),
        _scale_bytes(w2_scale),
        w2_global if nvfp4 else topk_weights,
        dense2.view(torch.int32),
        _scale_bytes(dense2_scale),
        products,
        arrived,
        routes,
        tokens,
        shared_programs,
        2 * intermediate // up.rows,
        ROWS=down.rows,
        BLOCKS=down.blocks,
        BESIDE=integral and pdl,
        DEPTH=down.depth,
        STAGES=down.stages,
        PARTS=down.parts,
        num_warps=down.warps,
        num_stages=down.stages,
        maxnreg=down.registers if hopper else None,
        **constants,
        **launch,
    )
    columns = SUM_COLUMNS
    _sum_kernel[(triton.cdiv(hidden, columns), tokens)](
        products,
        topk_ids,
        out,
        arrived,
        routes,
        HIDDEN=hidden,
        TOP_K=top_k,
        PADDED=triton.next_power_of_2(top_k + 1),
        SHARED=bool(shared),
        COLUMNS=columns,
        BESIDE=integral and pdl,
        PDL=pdl,
        num_warps=SUM_WARPS,
        **launch,
    )
    return out


@functools.cache
def _arrived(device: torch.device, stream: int) -> torch.Tensor:
    """Counters of finished programs, all zero between calls; one set a stream, on which calls follow each other."""
    return torch.zeros(MAX_TOKENS * (MAX_TOP_K + 1), dtype=torch.int32, device=device)


def _require_arguments(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_global: torch.Tensor | None,
    w2_global: torch.Tensor | None,
    fp8_activations: bool,
) -> bool:
    """Refuse routed arguments that do not go together; True for NVFP4."""
    if x.ndim != 2 or x.shape[1] % 256 or not 0 <= x.shape[0] <= MAX_TOKENS:
        raise ValueError(f"x must be [0 to {MAX_TOKENS}, a multiple of 256], got {list(x.shape)}")
    tokens, hidden = x.shape
    require(x, "x", torch.bfloat16, (tokens, hidden))
    if topk_ids.ndim != 2 or not 1 <= topk_ids.shape[1] <= MAX_TOP_K:
        raise ValueError(f"topk_ids must be [tokens, 1 to {MAX_TOP_K}], got {list(topk_ids.shape)}")
    require(topk_ids, "topk_ids", torch.int32, (tokens, topk_ids.shape[1]))
    require(topk_weights, "topk_weights", torch.float32, (tokens, topk_ids.shape[1]))
    if w13.ndim != 3 or w13.shape[1] % (2 * BLOCK):
        raise ValueError(f"w13 must be [experts, 2 x a multiple of {BLOCK}, H / 2], got {list(w13.shape)}")
    experts, intermediate = w13.shape[0], w13.shape[1] // 2
    require(w13, "w13", torch.uint8, (experts, 2 * intermediate, hidden // 2))
    require(w2, "w2", torch.uint8, (experts, hidden, intermediate // 2))
    nvfp4 = w13_scale.dtype == torch.float8_e4m3fn
    group = 16 if nvfp4 else 32
    for name, scale, rows, columns in (
        ("w13_scale", w13_scale, 2 * intermediate, hidden),
        ("w2_scale", w2_scale, hidden, intermediate),
    ):
        dtypes = (torch.float8_e4m3fn,) if nvfp4 else (torch.uint8, torch.float8_e8m0fnu)
        if scale.dtype not in dtypes:
            raise ValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {scale.dtype}")
        require(scale, name, scale.dtype, (experts, rows, columns // group))
    for name, factor in (("w13_global", w13_global), ("w2_global", w2_global)):
        if (factor is not None) != nvfp4:
            raise ValueError(f"{name} goes with NVFP4 (float8_e4m3fn) scales, w13_scale is {w13_scale.dtype}")
        if factor is not None:
            require(factor, name, torch.float32, (experts,))
    if fp8_activations and nvfp4:
        raise ValueError("fp8_activations needs MXFP4 weights, the scales are NVFP4's")
    return nvfp4


def _require_shared(
    w13: torch.Tensor | None,
    w13_scale: torch.Tensor | None,
    w2: torch.Tensor | None,
    w2_scale: torch.Tensor | None,
    hidden: int,
    intermediate: int,
) -> int:
    """Refuse shared-expert arguments that do not go together; 1 if there is a shared expert, 0 if not."""
    given = [tensor is not None for tensor in (w13, w13_scale, w2, w2_scale)]
    if not all(given):
        if any(given):
            raise ValueError(
                "shared_w13, shared_w13_scale, shared_w2 and shared_w2_scale go together: give all or none"
            )
        return 0
    assert w13 is not None and w13_scale is not None and w2 is not None and w2_scale is not None
    require(w13, "shared_w13", torch.float8_e4m3fn, (2 * intermediate, hidden))
    require(w2, "shared_w2", torch.float8_e4m3fn, (hidden, intermediate))
    require_block_scale(w13_scale, "shared_w13_scale", (2 * intermediate // BLOCK, hidden // BLOCK))
    require_block_scale(w2_scale, "shared_w2_scale", (hidden // BLOCK, intermediate // BLOCK))
    if (w13_scale.dtype == torch.float32) != (w2_scale.dtype == torch.float32):
        raise ValueError("shared_w13_scale and shared_w2_scale must have the same type")
    return 1


def _require_alignment(**tensors: torch.Tensor | None) -> None:
    """Refuse tensors that do not begin at a multiple of 16 bytes: the kernels read 16 at once."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % 16:
            raise ValueError(
                f"{name} must begin at a multiple of 16 bytes, it begins {tensor.data_ptr() % 16} after one"
            )


def _check_ids(topk_ids: torch.Tensor, experts: int) -> None:
    wrong = torch.nonzero((topk_ids < -1) | (topk_ids >= experts))
    if len(wrong):
        token, place = wrong[0].tolist()
        raise ValueError(f"topk_ids[{token}, {place}] is {int(topk_ids[token, place])}, must be -1 to {experts - 1}")


def _scale_bytes(scale: torch.Tensor) -> torch.Tensor:
    """Scales as Triton takes them: UE8M0 as bytes, the others as they are."""
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale


def serving_calls() -> Iterator[Callable[[], object]]:
    """A rank's MXFP4 experts as FlashInfer keeps them; the shared one is a linear of its own in SGLang."""
    hidden, top_k = serving.HIDDEN, 6
    for ranks in serving.RANKS:
        intermediate = serving.INTERMEDIATE // ranks
        weights: dict[str, torch.Tensor] = {}
        for name, rows, columns in (("w13", 2 * intermediate, hidden), ("w2", hidden, intermediate)):
            weights[name] = torch.zeros(1, rows, columns // 2, dtype=torch.uint8)
            weights[f"{name}_scale"] = torch.zeros(1, rows, columns // 32, dtype=torch.uint8)
        for tokens in serving.BATCHES:
            x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
            ids = torch.full((tokens, top_k), -1, dtype=torch.int32)
            yield functools.partial(moe_fp4_small_batch, x, ids, torch.zeros(tokens, top_k), **weights, up_first=True)


def compile_cases() -> Iterator[CompileCase]:
    """The launches of a TP4 rank for 1, 16 and 64 tokens: MXFP4, NVFP4, and MXFP4 with FP8 activations."""
    hidden, intermediate, top_k = 4096, 512, 6
    common = dict.fromkeys(("routes", "tokens", "top_k", "shared_programs", "up_programs"), "i32") | {
        "arrived": "*i32:16",
        "integers": "*i32:16",
        **dict.fromkeys(("integer_scales", "activation_scales"), "*fp32:16"),
        "ids": "*i32:16",
        "topk_weights": "*fp32:16",
        "x": "*i32:16",
        "activations": "*i32:16",
        "products": "*fp32:16",
        "limit": "fp32",
        "shared_scale": "*fp32:16",
        **dict.fromkeys(("w13_global", "w2_global"), "*fp32:16"),
        **dict.fromkeys(("shared_w13", "shared_w2"), "*i32:16"),
    }
    for tokens in (1, 16, 64):
        for kind, group, fp8 in (("MXFP4", 32, False), ("NVFP4", 16, False), ("MXFP4 x MXFP8", 32, True)):
            chosen = plan(tokens, hidden, intermediate, fp8, group == 16)
            scale = dict.fromkeys(("w13_scale", "w2_scale"), "*fp8e4nv:16" if group == 16 else "*u8:16")
            packed = dict.fromkeys(("w13", "w2"), "*u8:16" if fp8 else "*i32:16")
            for name, kernel, cut in (
                ("gate and up", _gate_up_kernel, chosen.gate_up),
                ("down", _down_kernel, chosen.down),
            ):
                yield CompileCase(
                    op="moe_fp4_small_batch",
                    shape=f"{name}, {kind}, {tokens} tokens",
                    kernel=kernel,
                    arguments=common | scale | packed,
                    constexprs={
                        "HIDDEN": hidden,
                        "INTERMEDIATE": intermediate,
                        "ROUTES": max(16, triton.next_power_of_2(tokens * top_k)),
                        "GROUP": group,
                        "FP8": fp8,
                        "ROWS": cut.rows,
                        # The engine keeps MXFP4 experts as FlashInfer does.
                        **(
                            {"BLOCKS": cut.blocks, "BESIDE": chosen.integers}
                            if kernel is _down_kernel
                            else {"UP_FIRST": group == 32}
                        ),
                        "DEPTH": cut.depth,
                        "STAGES": cut.stages,
                        "TOKENS": chosen.tokens,
                        "SHARED_TOKENS": chosen.shared_tokens,
                        "PARTS": cut.parts,
                        "SHARED_ROWS": chosen.shared_rows,
                        "INTEGERS": chosen.integers,
                        "PDL": True,
                    },
                    num_warps=cut.warps,
                    num_stages=cut.stages,
                    uses_mma=True,
                    options={"launch_pdl": True},
                )
    yield CompileCase(
        op="moe_fp4_small_batch",
        shape="integers",
        kernel=_quantise_kernel,
        arguments={"x": "*bf16:16", "integers": "*i8:16", "scales": "*fp32:16"},
        constexprs={"HIDDEN": hidden, "PADDED": hidden, "PDL": True},
        num_warps=QUANTISE_WARPS,
        options={"launch_pdl": True},
    )
    yield CompileCase(
        op="moe_fp4_small_batch",
        shape="sum",
        kernel=_sum_kernel,
        arguments=common | {"out": "*bf16:16"},
        constexprs={
            "HIDDEN": hidden,
            "TOP_K": top_k,
            "PADDED": triton.next_power_of_2(top_k + 1),
            "SHARED": True,
            "COLUMNS": SUM_COLUMNS,
            "BESIDE": True,
            "PDL": True,
        },
        num_warps=SUM_WARPS,
        options={"launch_pdl": True},
    )
