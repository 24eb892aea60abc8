"""The products with x and the activations rounded to e4m3, which Triton itself pipelines."""

from __future__ import annotations

import triton
import triton.language as tl

from sm120_kernels.interpret import to_e4m3
from sm120_kernels.unpack import e2m1_to_e4m3

E4M3_MAX = tl.constexpr(448.0)
# E2M1 in e4m3 lacks a factor 2 ** 6.
FP8_SUM_FACTOR = tl.constexpr(2.0**6)


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


@triton.jit
def fp8_gate_up(
    weights,
    scales,
    inputs,
    present,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gate and up of ROWS rows for TOKENS routes, short of a factor FP8_SUM_FACTOR; arguments as in _scaled_product."""
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
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
    return acc


@triton.jit
def fp8_down(
    w2,
    w2_scale,
    inputs,
    products,
    member,
    weight,
    row,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BLOCKS blocks of ROWS rows of down for TOKENS routes, times their weights.

    Args:
        w2, w2_scale: of the expert.
        inputs: as in _scaled_product.
        member: [TOKENS] the routes, -1 where there is none.
        weight: [TOKENS] FP8_SUM_FACTOR times the routes' weights.
        row: [ROWS] of the first block.
    """
    present = member >= 0
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
