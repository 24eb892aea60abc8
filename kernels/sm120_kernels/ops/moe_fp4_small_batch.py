"""The FP4 experts and the shared expert for a small batch: work proportional to the experts that are hit.

There is no sorting launch. A program belongs to one (token, place) pair, a route, and a block of weight rows; it looks
through all routes for its expert's, and ends at once unless its own is the first of them. The weights are the rows of
the products and the tokens, padded to 8, their columns. FP4 waits in a ring in shared memory and goes from there into
the registers of the tensor core's first operand (`fragments`), where it becomes bf16 or int8: what limits these
products is the instructions a weight takes, and the memory beside them. As integers it takes a fifth fewer: one look-up
gives four values, and the scale of 32 columns multiplies their sum; so x and the activations must be integers too.

The products are in `experts`, a module for each way to compute them; here are the launches, their plan and the op.
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
from sm120_kernels.experts.bf16 import SUM_FACTOR, ask_bf16_down, bf16_down, bf16_gate_up
from sm120_kernels.experts.fp8_activations import FP8_SUM_FACTOR, fp8_down, fp8_gate_up
from sm120_kernels.experts.integers import (
    ask_integer_down,
    ask_lines,
    integer_down,
    integer_gate_up,
    integer_scale,
    to_integers,
)
from sm120_kernels.experts.ring import ask_scales
from sm120_kernels.experts.routes import first_route, input_pointers, members
from sm120_kernels.experts.shared import shared_down, shared_gate_up
from sm120_kernels.experts.swiglu import gate_up_rows, swiglu
from sm120_kernels.fragments import ring
from sm120_kernels.interpret import prefetch_l2, to_bf16

SWIGLU_LIMIT = 10.0
MAX_TOKENS = 64
MAX_TOP_K = 8
BLOCK = 128


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
    scale = integer_scale(tl.max(tl.abs(value)))
    upper, lower = to_integers(value, scale)
    place = integers + token * (2 * HIDDEN) + column
    tl.store(place, upper, mask=column < HIDDEN)
    tl.store(place + HIDDEN, lower, mask=column < HIDDEN)
    tl.store(scales + token, scale)


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
    row = gate_up_rows(program, tl.arange(0, SHARED_ROWS), INTERMEDIATE, SHARED_ROWS, False)
    eight = tl.arange(0, 8)
    result = activations.to(tl.pointer_type(tl.bfloat16))
    if program < shared_programs:
        if PDL:
            # The shared expert's weights do not depend on the launches before.
            for block in range(HIDDEN // 128):
                prefetch_l2(shared_w13 + row * (HIDDEN // 4) + block * 32)
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        shared_gate_up(
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
            HIDDEN,
            INTERMEDIATE,
            SHARED_ROWS,
            SHARED_TOKENS,
            BYTES,
        )
        if INTEGERS and PDL:
            _arrive(arrived + routes)
        return
    tile = (program - shared_programs) % TILES
    route = (program - shared_programs) // TILES
    if PDL and not INTEGERS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # With integers the launch before is the one that makes them, and the ids were complete before it began.
    expert, first, same, rank = first_route(ids, route, routes, ROUTES)
    row = gate_up_rows(tile, tl.arange(0, ROWS), INTERMEDIATE, ROWS, UP_FIRST)
    scales = w13_scale + expert * (2 * INTERMEDIATE * (HIDDEN // GROUP)) + row * (HIDDEN // GROUP)
    column = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
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
            ask_scales(scales, codes, ROWS, SCALES, STRIDE)
            for turn in tl.static_range(min(STAGES - 1, HIDDEN // 256)):
                ask_lines(rows + turn * 32, stages + turn * LINES, ROWS, NEXT, HIDDEN)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
    if not first:
        return
    if INTEGERS:
        for begin in range(0, tl.sum(same.to(tl.int32)), 4):
            integer_gate_up(
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
    factor = FP8_SUM_FACTOR if FP8 else SUM_FACTOR
    if GROUP == 16:
        factor *= tl.load(w13_global + expert)
    for begin in range(0, tl.sum(same.to(tl.int32)), TOKENS):
        member = members(same, rank, begin, ROUTES, TOKENS, COLUMNS)
        present = member >= 0
        inputs = input_pointers(x, tl.where(present, member // top_k, -1), HIDDEN, DEPTH, FP8)
        if FP8:
            acc = fp8_gate_up(weights, scales, inputs, present, HIDDEN, ROWS, COLUMNS, TOKENS, DEPTH, STAGES)
        else:
            acc = bf16_gate_up(
                weights,
                scales,
                inputs,
                rows,
                x,
                members(same, rank, begin, ROUTES, TOKENS, TOKENS),
                top_k,
                base,
                stages,
                GROUP,
                HIDDEN,
                ROWS,
                COLUMNS,
                TOKENS,
                PARTS,
                STAGES,
                STRIDE,
                STAGE,
                INPUTS_AT,
                NEXT,
            )
        value = swiglu(acc * factor, limit, ROWS, COLUMNS)
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
        shared_down(
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
            HIDDEN,
            INTERMEDIATE,
            BLOCKS,
            SHARED_ROWS,
            SHARED_TOKENS,
            BYTES,
        )
        if BESIDE:
            tl.extra.cuda.gdc_wait()
        return
    tile = (program - shared_programs) % TILES
    route = (program - shared_programs) // TILES
    # The ids were complete before the programs of gate and up went on, whose activations are what must be waited for.
    expert, first, same, rank = first_route(ids, route, routes, ROUTES)
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
                    ask_integer_down(turn, rows, scales, base + turn * LINES, INTERMEDIATE, ROWS)
            else:
                for turn in tl.static_range(min(STAGES - 1, TURNS)):
                    ask_bf16_down(
                        turn, rows, scales, base + turn * STAGE, GROUP, INTERMEDIATE, ROWS, PARTS, SCALES, SCALES_AT
                    )
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
            integer_down(
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
        member = members(same, rank, begin, ROUTES, TOKENS, COLUMNS)
        present = member >= 0
        weight = tl.load(topk_weights + member, mask=present, other=0.0) * factor
        inputs = input_pointers(activations, member, INTERMEDIATE, DEPTH, FP8)
        if FP8:
            fp8_down(
                w2,
                w2_scale,
                inputs,
                products,
                member,
                weight,
                row,
                HIDDEN,
                INTERMEDIATE,
                ROWS,
                BLOCKS,
                TOKENS,
                DEPTH,
                STAGES,
            )
        else:
            bf16_down(
                activations,
                weights,
                scales,
                inputs,
                products,
                member,
                members(same, rank, begin, ROUTES, TOKENS, TOKENS),
                weight,
                row,
                rows,
                begin,
                base,
                GROUP,
                HIDDEN,
                INTERMEDIATE,
                ROWS,
                COLUMNS,
                BLOCKS,
                TOKENS,
                PARTS,
                STAGES,
                STAGE,
                SCALES,
                SCALES_AT,
                INPUTS_AT,
            )
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
