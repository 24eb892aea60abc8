"""The products in bf16: for NVFP4, for few tokens, and for sizes that the products of integers do not take."""

from __future__ import annotations

import triton
import triton.language as tl

from sm120_kernels.experts.ring import ask_rows, ask_scales, ask_tokens
from sm120_kernels.fragments import await_groups, close_group, e2m1_operand, e2m1_tokens, take, take_byte
from sm120_kernels.interpret import dot
from sm120_kernels.unpack import two_e4m3, two_powers

# E2M1 in bf16 lacks a factor 2 ** 126: half of it goes into the scales and half into the sum, so that neither leaves
# bf16's range.
SCALE_SHIFT = tl.constexpr(64)
SCALE_FACTOR = tl.constexpr(2.0**64)
SUM_FACTOR = tl.constexpr(2.0**62)


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
def bf16_gate_up(
    weights,
    scales,
    inputs,
    rows,
    x,
    asked,
    top_k,
    base,
    stages,
    GROUP: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    STRIDE: tl.constexpr,
    STAGE: tl.constexpr,
    INPUTS_AT: tl.constexpr,
    NEXT: tl.constexpr,
):
    """Gate and up of ROWS rows for COLUMNS routes, short of a factor SUM_FACTOR.

    Args:
        weights, scales, inputs: as in _ring_product.
        rows, NEXT: as in ask_rows.
        asked: [TOKENS] the routes, -1 where there is none.
        base: of the ring, where all scales of the rows are, each row's STRIDE bytes from the next one's.
        stages: where STAGES turns of STAGE bytes follow, in which x is INPUTS_AT bytes on.
    """
    SCALES: tl.constexpr = HIDDEN // GROUP
    TURNS: tl.constexpr = HIDDEN // (128 * PARTS)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    wanted = asked >= 0
    asked = x + tl.where(wanted, asked // top_k, 0) * (HIDDEN // 2)
    # No slot is still read in which something is asked for.
    tl.debug_barrier()
    ask_scales(scales, base, ROWS, SCALES, STRIDE)
    for turn in tl.static_range(STAGES - 1):
        if turn < TURNS:
            slots = stages + turn * STAGE
            ask_rows(rows + turn * (16 * PARTS), slots, ROWS, PARTS, NEXT, HIDDEN)
            ask_tokens(asked + turn * (64 * PARTS), wanted, slots + INPUTS_AT, TOKENS, PARTS, 4)
        close_group()
    for turn in tl.range(0, TURNS, num_stages=1):
        await_groups(STAGES - 2)
        later = turn + STAGES - 1
        if later < TURNS:
            slots = stages + later % STAGES * STAGE
            ask_rows(rows + later * (16 * PARTS), slots, ROWS, PARTS, NEXT, HIDDEN)
            ask_tokens(asked + later * (64 * PARTS), wanted, slots + INPUTS_AT, TOKENS, PARTS, 4)
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
    return acc


@triton.jit
def ask_bf16_down(
    turn,
    rows,
    scales,
    slots,
    GROUP: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_AT: tl.constexpr,
):
    """Ask for a turn's PARTS parts and SCALES scales of W, all columns of a block before the next block."""
    STEPS: tl.constexpr = INTERMEDIATE // (128 * PARTS)
    words = turn // STEPS * (ROWS * (INTERMEDIATE // 8)) + turn % STEPS * (16 * PARTS)
    codes = turn // STEPS * (ROWS * (INTERMEDIATE // GROUP)) + turn % STEPS * SCALES
    ask_rows(rows + words, slots, ROWS, PARTS, INTERMEDIATE, 2 * INTERMEDIATE)
    ask_scales(scales + codes, slots + SCALES_AT, ROWS, SCALES, SCALES)


@triton.jit
def bf16_down(
    activations,
    weights,
    scales,
    inputs,
    products,
    member,
    asked,
    weight,
    row,
    rows,
    begin,
    base,
    GROUP: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    STAGE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALES_AT: tl.constexpr,
    INPUTS_AT: tl.constexpr,
):
    """BLOCKS blocks of ROWS rows of down for COLUMNS routes, times their weights.

    The parts and scales of the first turns are asked for if begin is 0.

    Args:
        weights, scales, inputs: as in _ring_product, of the first block and the first columns.
        member: [COLUMNS] the routes, -1 where there is none; asked [TOKENS] the same.
        weight: [COLUMNS] SUM_FACTOR times the routes' weights.
        row: [ROWS] of the first block.
        rows: as in ask_rows.
        base: of the ring: STAGES turns of STAGE bytes, in which scales are SCALES_AT and x INPUTS_AT bytes on.
    """
    STEPS: tl.constexpr = INTERMEDIATE // (128 * PARTS)
    TURNS: tl.constexpr = BLOCKS * STEPS
    present = member >= 0
    wanted = asked >= 0
    asked = activations + tl.where(wanted, asked, 0) * (INTERMEDIATE // 2)
    if begin > 0:
        # No slot is still read in which something is asked for.
        tl.debug_barrier()
    for turn in tl.static_range(STAGES - 1):
        if turn < TURNS:
            slots = base + turn * STAGE
            if begin > 0:
                ask_bf16_down(turn, rows, scales, slots, GROUP, INTERMEDIATE, ROWS, PARTS, SCALES, SCALES_AT)
            ask_tokens(asked + turn % STEPS * (64 * PARTS), wanted, slots + INPUTS_AT, TOKENS, PARTS, 4)
        close_group()
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    # One loop over blocks and columns: what is asked for runs ahead from a block into the next.
    for turn in tl.range(0, TURNS, num_stages=1):
        await_groups(STAGES - 2)
        later = turn + STAGES - 1
        if later < TURNS:
            slots = base + later % STAGES * STAGE
            ask_bf16_down(later, rows, scales, slots, GROUP, INTERMEDIATE, ROWS, PARTS, SCALES, SCALES_AT)
            ask_tokens(asked + later % STEPS * (64 * PARTS), wanted, slots + INPUTS_AT, TOKENS, PARTS, 4)
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
