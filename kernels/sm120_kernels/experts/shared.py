"""The shared expert, a dense FP8 one that every token has: products in bf16."""

from __future__ import annotations

import triton
import triton.language as tl

from sm120_kernels.experts.ring import ask_rows, ask_tokens
from sm120_kernels.experts.swiglu import swiglu
from sm120_kernels.fragments import await_groups, close_group, e4m3_operand, e4m3_tokens, take
from sm120_kernels.interpret import dot, to_bf16
from sm120_kernels.unpack import scale_value

# e4m3 in bf16 lacks a factor 2 ** 120: half of it goes into the scales and half into the sum, so that neither leaves
# bf16's range.
DENSE_FACTOR = tl.constexpr(2.0**60)


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
    ask_rows(rows + turn * 32, slots, ROWS, 2, NEXT, PAIR)
    ask_tokens(inputs + turn * 64, present, slots + 2 * (ROWS * 64 + 64), TOKENS, 2, 2)


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
        rows, NEXT, PAIR: as in ask_rows.
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
def shared_gate_up(
    x,
    shared_w13,
    shared_scale,
    result,
    program,
    row,
    eight,
    base,
    routes,
    tokens,
    limit,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    SHARED_TOKENS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """Gate, up and what they give, bf16, of a program's SHARED_ROWS rows for all tokens.

    Args:
        shared_w13, x: int32, four e4m3 and two bf16 each.
        result: bf16 pointer, where the tokens' activations follow those of all routes.
        row: [SHARED_ROWS] of the program, in the order of gate_up_rows.
        eight: [8] the numbers 0 to 7.
        base: of a ring of BYTES bytes.
    """
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
        value = swiglu(acc, limit, SHARED_ROWS, SHARED_TOKENS)
        token = begin + tl.arange(0, SHARED_TOKENS)
        place = (routes + token)[None, :] * INTERMEDIATE + column[:, None]
        tl.store(result + place, to_bf16(value), mask=(token < tokens)[None, :])


@triton.jit
def shared_down(
    activations,
    shared_w2,
    shared_scale,
    products,
    program,
    first_row,
    eight,
    base,
    routes,
    tokens,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BLOCKS: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
    SHARED_TOKENS: tl.constexpr,
    BYTES: tl.constexpr,
):
    """A program's BLOCKS blocks of SHARED_ROWS rows of down for all tokens.

    Args:
        activations, shared_w2: int32, two bf16 and four e4m3 each.
        products: fp32 pointer, where the tokens' products follow those of all routes.
        first_row: [SHARED_ROWS] of the first block.
        eight: [8] the numbers 0 to 7.
        base: of a ring of BYTES bytes.
    """
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
