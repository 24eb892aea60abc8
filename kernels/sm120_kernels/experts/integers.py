"""The products of integers: what x and the activations become, and what a thread does with them.

W is in lines of 128 bytes, a turn's columns of a row, whose 16-byte chunks are turned by the row, so that the same
chunk of eight rows lies in different banks. A warp has 32 rows of a product. Its right-hand sides are four tokens'
upper bytes, then their lower ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sm120_kernels.experts.ring import ask_scales
from sm120_kernels.experts.routes import members
from sm120_kernels.experts.swiglu import gate_up_rows, gated
from sm120_kernels.fragments import (
    DOUBLES,
    MAGIC,
    MAGIC_BITS,
    NEGATIVES,
    ask,
    await_groups,
    close_group,
    counted_times,
    from_two_on,
    integer_product,
    take_byte,
    take_two,
    take_word,
)

# The largest integer that x and the activations become: two int8, upper and lower.
LARGEST = tl.constexpr(127 * 256)


@triton.jit
def integer_scale(largest):
    """The scale of integers of values up to `largest`, of 22 bits as `counted_times` wants it."""
    scale = (tl.maximum(largest, 1e-20) / LARGEST).to(tl.int32, bitcast=True)
    return ((scale + 3) & -4).to(tl.float32, bitcast=True)


@triton.jit
def to_integers(value, scale):
    """value over its scale as a 16-bit integer: two int8, 256 times the first and the second."""
    # Adding MAGIC rounds.
    q = (value * (1.0 / scale) + MAGIC).to(tl.int32, bitcast=True) - MAGIC_BITS
    upper = (q + 128) >> 8
    return upper.to(tl.int8), (q - 256 * upper).to(tl.int8)


@triton.jit
def ask_lines(rows, slots, ROWS: tl.constexpr, NEXT: tl.constexpr, PAIR: tl.constexpr):
    """As ask_rows, for lines."""
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
    routes = members(same, rank, begin, ROUTES, 4, 4)
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
def integer_gate_up(
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
                ask_lines(rows + turn * 32, stages + turn * LINES, ROWS, NEXT, HIDDEN)
            _ask_integers(asked + turn * 64, wanted, stages + turn * LINES + INPUTS_AT)
        close_group()
    zero = tl.zeros((ROWS,), tl.float32)
    sums = ((zero, zero), (zero, zero), (zero, zero), (zero, zero))
    inputs = integers + (tl.maximum(_pick(twice, g, 8), 0) // top_k * 2 + g // 4) * (HIDDEN // 4) + t * 2
    words = ()
    bytes_of = ()
    for i in tl.static_range(4):
        at = gate_up_rows(tile, row + 8 * i, INTERMEDIATE, ROWS, UP_FIRST)
        words = words + (weights + at * (HIDDEN // 8) + t,)
        bytes_of = bytes_of + (scales + at * (HIDDEN // 32),)
    for turn in tl.range(0, TURNS, num_stages=1):
        await_groups(STAGES - 2)
        later = turn + STAGES - 1
        if later < TURNS:
            slots = stages + later % STAGES * LINES
            ask_lines(rows + later * 32, slots, ROWS, NEXT, HIDDEN)
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
    first = gated(_merge(sums[0], t, ROWS) * factor, _merge(sums[1], t, ROWS) * factor, limit)
    second = gated(_merge(sums[2], t, ROWS) * factor, _merge(sums[3], t, ROWS) * factor, limit)
    largest = tl.maximum(tl.abs(first), tl.abs(second)).reshape(ROWS // 64, 16, 4)
    largest = tl.broadcast_to(tl.max(largest, 1)[:, None, :], (ROWS // 64, 16, 4)).reshape(ROWS)
    scale = integer_scale(largest)
    lane = tl.arange(0, ROWS)
    group = tile * (ROWS // 64) + lane // 64
    tl.store(result_scales + route * (INTERMEDIATE // 32) + group, scale, mask=present & (lane % 64 < 4))
    place = result + route * (2 * INTERMEDIATE) + tile * (ROWS // 2) + lane // 32 * 16 + g
    for pair in tl.static_range(2):
        upper, lower = to_integers(second if pair else first, scale)
        tl.store(place + pair * 8, upper, mask=present)
        tl.store(place + pair * 8 + INTERMEDIATE, lower, mask=present)


@triton.jit
def ask_integer_down(turn, rows, scales, slots, INTERMEDIATE: tl.constexpr, ROWS: tl.constexpr):
    """Ask for a turn's lines and codes of W: 256 columns of ROWS rows, all columns of a block before the next block."""
    STEPS: tl.constexpr = INTERMEDIATE // 256
    row = turn // STEPS * ROWS
    step = turn % STEPS
    ask_lines(rows + row * (INTERMEDIATE // 8) + step * 32, slots, ROWS, INTERMEDIATE, 2 * INTERMEDIATE)
    ask_scales(scales + row * (INTERMEDIATE // 32) + step * 8, slots + ROWS * 128 + 2048, ROWS, 8, 8)


@triton.jit
def integer_down(
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
        rows, codes: pointers as ask_integer_down takes them.
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
                ask_integer_down(turn, rows, codes, base + turn * LINES, INTERMEDIATE, ROWS)
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
            ask_integer_down(later, rows, codes, slots, INTERMEDIATE, ROWS)
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
