"""FP8 linear layer of a few rows: activations quantised inside, block-scaled weights.

The weights are the rows of the product and the tokens its columns, padded to 8. Where the weight's rows do not fill the
GPU, K is cut into shares, and the program that finishes a block of rows last adds the shares up.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from sm120_kernels import serving
from sm120_kernels.aot import CompileCase
from sm120_kernels.checks import (
    has_dependent_launch,
    require,
    require_block_scale,
    require_device,
    require_rows,
    sm_count,
)
from sm120_kernels.fragments import e4m3_columns, e4m3_rows, load_activations, load_weights
from sm120_kernels.interpret import dot, to_bf16
from sm120_kernels.unpack import bf16_values, bf16_word, round_to_e4m3, scale_value

BLOCK = 128
E4M3_MAX = tl.constexpr(448.0)
SMALLEST_MAXIMUM = tl.constexpr(1e-10)
# e4m3 weights in fp16 lack it.
E4M3_FACTOR = tl.constexpr(2.0**8)
MAX_TILES = 65536
EARLY_FLAG = [False]


@triton.jit
def _scale(maximum, UE8M0: tl.constexpr):
    """The fp32 scale of 128 values of that largest magnitude, and its inverse."""
    scale = tl.maximum(maximum, SMALLEST_MAXIMUM) / E4M3_MAX
    if UE8M0:
        exponent = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        inverse = 1.0 / scale
    return scale, inverse


@triton.jit
def _load_block(pointers):
    """The 8 words from pointers on of each half of a block of 128 columns of bf16: 16 words, two columns each."""
    half: tl.constexpr = 32
    words = load_activations(pointers) + load_activations(pointers + 4)
    return words + load_activations(pointers + half) + load_activations(pointers + half + 4)


@triton.jit
def _load_weight_block(pointers):
    """The four words from pointers on of each half of a block of 128 columns of e4m3: 8 words, four columns each."""
    return load_weights(pointers) + load_weights(pointers + 16)


@triton.jit
def _values(
    inputs,
    added,
    factors,
    angles,
    turned,
    sums,
    present,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    KEEP: tl.constexpr,
):
    """What is to be quantised of each warp's block of columns: the even and the odd ones of a thread's 32.

    Args:
        inputs, added, factors: pointers [WARPS, 4, TOKENS], [WARPS, 4, TOKENS], [WARPS, 4, 1] of x, of the residual and
            of the norm's weight, as _load_block takes them.
        angles, turned: with ROPE, pointers [1, 4, TOKENS] to int32 of a thread's cosines and sines, and which of the
            blocks end a head.
        sums, present: with KEEP, pointers as inputs and a mask: x + residual goes there.

    Returns:
        Two tuples of 16 [WARPS, 4, TOKENS] fp32, and the sum of the squares without the norm's weight.
    """
    pairs = _load_block(inputs)
    if RESIDUAL:
        others = _load_block(added)
    if NORM:
        weights = _load_block(factors)
    low = ()
    high = ()
    squares = 0.0
    for i in tl.static_range(16):
        a, b = bf16_values(pairs[i])
        if RESIDUAL:
            c, d = bf16_values(others[i])
            a += c
            b += d
            if KEEP:
                tl.store(sums + (i % 8 + i // 8 * 32), bf16_word(a, b), mask=present)
        if NORM:
            squares += a * a + b * b
            c, d = bf16_values(weights[i])
            a *= c
            b *= d
        if ROPE and i >= 8:
            # Two pairs of a cosine and a sine in a load.
            if i % 2 == 0:
                two = load_activations(angles + 2 * (i - 8))
            cos = tl.where(turned, two[i % 2 * 2].to(tl.float32, bitcast=True), 1.0)
            sin = tl.where(turned, two[i % 2 * 2 + 1].to(tl.float32, bitcast=True), 0.0)
            a, b = a * cos + b * sin, b * cos - a * sin
        low = low + (a,)
        high = high + (b,)
    return low, high, squares


@triton.jit
def linear_kernel(
    x,
    residual,
    residual_out,
    norm_weight,
    positions,
    rope,
    weight,
    weight_scale,
    out,
    partial,
    partial_squares,
    arrivals,
    tokens,
    x_stride,
    residual_stride,
    eps,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    UE8M0: tl.constexpr,
    SETTLED: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """out of ROWS of weight's GROUPS * COLUMNS rows, over one of SPLITS shares of DEPTH, for TOKENS tokens.

    x, residual, residual_out, norm_weight and weight are int32: two bf16 or four e4m3. The grid is (blocks of ROWS
    rows, SPLITS, blocks of TOKENS tokens). The rows of group g multiply the DEPTH columns of x from g * DEPTH on. Each
    warp takes a block of 128 columns a turn, so that up to the final sum no warp waits for another. With ROPE the last
    64 columns of each four blocks, a head, are turned back.
    """
    BLOCKS: tl.constexpr = DEPTH // 128
    TURNS: tl.constexpr = BLOCKS // SPLITS // WARPS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    # What is absent reads what is there.
    there = tl.minimum(token, tokens - 1)[None, None, :]
    first = split * (TURNS * WARPS) + tl.arange(0, WARPS)
    block = first[:, None, None]
    thread = tl.arange(0, 4)
    weights = weight + row.to(tl.int64)[None, :, None] * (DEPTH // 4) + block * 32 + (thread * 4)[None, None, :]
    weight_scale += tile * ROWS // 128 * BLOCKS + first
    column = block * 64 + (thread * 8)[None, :, None]
    inputs = x + there * (x_stride // 2) + tile * ROWS // COLUMNS * (DEPTH // 2) + column
    added = residual + there * (residual_stride // 2) + column
    sums = residual_out + there * (DEPTH // 2) + column
    factors = norm_weight + column
    angles = rope.to(tl.pointer_type(tl.int32)) + tl.load(positions + there) * 64 + (thread * 16)[None, :, None]
    # The first rows' programs store x + residual.
    present = (token < tokens)[None, None, :] & (tile == 0)
    # The weights do not depend on the kernel before this one: the first turn's are on their way while it ends.
    words = _load_weight_block(weights)
    w_scale = scale_value(tl.load(weight_scale))
    if PDL and not SETTLED:
        tl.extra.cuda.gdc_wait()
    if PDL and (EARLY or not SETTLED):
        tl.extra.cuda.gdc_launch_dependents()

    acc = tl.zeros((WARPS, ROWS, TOKENS), tl.float32)
    squares = tl.zeros((WARPS, 4, TOKENS), tl.float32)
    for turn in tl.range(0, TURNS, num_stages=1):
        step = turn * (WARPS * 64)
        if TURNS > 1:
            following = tl.minimum(turn + 1, TURNS - 1) * WARPS
            next_words = _load_weight_block(weights + following * 32)
            next_w_scale = scale_value(tl.load(weight_scale + following))
        turned = (block + turn * WARPS) % 4 == 3
        # The values are read once more for the product: then Triton needs no exchange between threads for them, which
        # their maximum would ask for.
        low, high, more = _values(
            inputs + step,
            added + step,
            factors + step,
            angles,
            turned,
            sums + step,
            present,
            RESIDUAL,
            NORM,
            ROPE,
            RESIDUAL,
        )
        squares += more
        maximum = tl.maximum(tl.abs(low[0]), tl.abs(high[0]))
        for i in tl.static_range(1, 16):
            maximum = tl.maximum(maximum, tl.maximum(tl.abs(low[i]), tl.abs(high[i])))
        scale, inverse = _scale(tl.max(maximum, 1), UE8M0)
        inverse = tl.reshape(inverse, (WARPS, 1, TOKENS))
        low, high, _ = _values(
            inputs + step,
            added + step,
            factors + step,
            angles,
            turned,
            sums + step,
            present,
            RESIDUAL,
            NORM,
            ROPE,
            False,
        )
        rounded_low = ()
        rounded_high = ()
        for i in tl.static_range(16):
            a, b = round_to_e4m3(low[i] * inverse, high[i] * inverse)
            rounded_low = rounded_low + (a,)
            rounded_high = rounded_high + (b,)
        product = dot(e4m3_rows(words, WARPS, ROWS), e4m3_columns(rounded_low, rounded_high, WARPS, TOKENS))
        acc += product * (scale * w_scale[:, None] * E4M3_FACTOR)[:, None, :]
        if TURNS > 1:
            words = next_words
            w_scale = next_w_scale

    if WARPS > 1:
        # Faster than a sum over the first dimension, for which every warp gets every result.
        left, right = tl.split(acc.permute(1, 2, 0).reshape(ROWS, TOKENS, WARPS // 2, 2))
        acc = tl.sum(left + right, 2)
    else:
        acc = tl.sum(acc, 0)
    if NORM:
        squares = tl.sum(tl.sum(squares, 1), 0)
    if PDL and SETTLED:
        tl.extra.cuda.gdc_wait()
        if not EARLY:
            tl.extra.cuda.gdc_launch_dependents()
    result = token[None, :] * (GROUPS * COLUMNS) + row[:, None]
    present = token < tokens
    if SPLITS > 1:
        SIZE: tl.constexpr = GROUPS * COLUMNS
        tl.store(partial + split * tokens * SIZE + result, acc, mask=present[None, :])
        if NORM:
            tl.store(partial_squares + (tile * SPLITS + split) * tokens + token, squares, mask=present)
        # All of this program's stores come before the count; the last program to count sees every program's.
        tl.debug_barrier()
        arrival = arrivals + tl.program_id(2) * tl.num_programs(0) + tile
        if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") != SPLITS - 1:
            return
        tl.store(arrival, 0)
        acc = tl.zeros((ROWS, TOKENS), tl.float32)
        if NORM:
            squares = tl.zeros((TOKENS,), tl.float32)
        for s in tl.static_range(SPLITS):
            acc += tl.load(partial + s * tokens * SIZE + result, mask=present[None, :], other=0.0, cache_modifier=".cg")
            if NORM:
                squares += tl.load(
                    partial_squares + (tile * SPLITS + s) * tokens + token,
                    mask=present,
                    other=0.0,
                    cache_modifier=".cg",
                )
    if NORM:
        acc *= (1.0 / tl.sqrt(squares / DEPTH + eps))[None, :]
    tl.store(out + result, to_bf16(acc), mask=present[None, :])


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call is cut.

    Attributes:
        rows: weight rows a program takes, at most 128.
        splits: shares of K.
        tokens: tokens a program takes.
        warps: of a program; each takes a block of 128 columns a turn.
    """

    rows: int
    splits: int
    tokens: int
    warps: int


@functools.lru_cache(maxsize=4096)
def plan(tokens: int, rows: int, depth: int, sms: int) -> Plan:
    """Choose the blocks from the shapes; the choices are those of a sweep on an H200 (benchmarks/log.md).

    Args:
        tokens: of the call.
        rows, depth: of the weight, all groups together.
        sms: streaming multiprocessors.
    """
    blocks = depth // BLOCK
    padded = 8 if tokens <= 8 else 16
    splits = 1
    while rows // 64 * splits < 0.9 * sms and blocks % (2 * splits) == 0 and blocks // (2 * splits) >= 4:
        splits *= 2
    return Plan(64, splits, padded, math.gcd(8, blocks // splits))


def fp8_block_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    ue8m0: bool = False,
    settled: bool = False,
    out: torch.Tensor | None = None,
    chosen: Plan | None = None,
) -> torch.Tensor:
    """y = Q(x) W^T with W in FP8, 128 x 128 values a scale, and Q the FP8 rounding of each row's 128-column groups.

    One launch. Where K is shared out, the programs count each other in a buffer of the stream the call is made on: call
    once before a graph is captured, and do not replay graphs captured on one stream at the same time. Sums are grouped
    by the plan, which depends on the number of rows; with the same `chosen` a row has the same bits in every batch.

    Q(v) = s e4m3(v / s) with s = max(|v|) / 448 over the group, raised to a power of two with ue8m0.
    With residual, x + residual takes the place of x; with norm_weight, its RMSNorm does: Q then rounds x norm_weight,
    and the row's factor 1 / sqrt(mean(x^2) + eps) multiplies the fp32 sum.

    Args:
        x: [rows, K] bfloat16, K a multiple of 128; rows contiguous, may lie apart by a multiple of 8.
        weight: [N, K] float8_e4m3fn, contiguous, N a multiple of 128.
        weight_scale: [N / 128, K / 128], contiguous; float32, or float8_e8m0fnu or uint8 (2 ** (byte - 127)).
        residual: [rows, K] bfloat16, as x.
        residual_out: [rows, K] bfloat16, contiguous; gets x + residual; only with residual.
        norm_weight: [K] bfloat16.
        eps: of the RMSNorm.
        ue8m0: activation scales are powers of two.
        settled: x is older than what the kernel right before this one writes (`checks.has_dependent_launch`); not with
            residual_out.
        out: [rows, N] bfloat16, contiguous; allocated when None.
        chosen: cut the call this way, not as `plan` says.

    Returns:
        y, bfloat16 [rows, N].

    Raises:
        ValueError: a wrong dtype, shape, stride or device.

    Source of the quantisation: SGLang 0.5.23, `sglang_per_token_group_quant_fp8` (floor of 1e-10 for the maximum).
    """
    columns, depth = weight.shape if weight.ndim == 2 else (0, 0)
    if not columns or columns % BLOCK or not depth or depth % BLOCK:
        raise ValueError(f"weight must be [N, K], both multiples of {BLOCK}, got {list(weight.shape)}")
    tokens = x.shape[0]
    _require_activations(x, "x", tokens, depth)
    require(weight, "weight", torch.float8_e4m3fn, (columns, depth))
    require_block_scale(weight_scale, "weight_scale", (columns // BLOCK, depth // BLOCK))
    if residual is not None:
        _require_activations(residual, "residual", tokens, depth)
        if residual_out is None:
            residual_out = torch.empty((tokens, depth), dtype=torch.bfloat16, device=x.device)
        require(residual_out, "residual_out", torch.bfloat16, (tokens, depth))
    elif residual_out is not None:
        raise ValueError("residual_out without residual")
    if settled and residual is not None:
        raise ValueError("settled with residual, whose sum is stored early")
    if norm_weight is not None:
        require(norm_weight, "norm_weight", torch.bfloat16, (depth,))
    if out is None:
        out = torch.empty((tokens, columns), dtype=torch.bfloat16, device=x.device)
    require(out, "out", torch.bfloat16, (tokens, columns))
    require_device(
        x.device,
        residual=residual,
        residual_out=residual_out,
        norm_weight=norm_weight,
        weight=weight,
        weight_scale=weight_scale,
        out=out,
    )
    launch(
        chosen
        or plan(tokens, columns, depth, sm_count(x.device)),
        x,
        weight,
        weight_scale,
        out,
        groups=1,
        ue8m0=ue8m0,
        residual=residual,
        residual_out=residual_out,
        norm_weight=norm_weight,
        eps=eps,
        settled=settled,
    )
    return out


def _require_activations(x: torch.Tensor, name: str, rows: int, columns: int) -> None:
    require_rows(x, name, torch.bfloat16, rows)
    if x.shape[1] != columns:
        raise ValueError(f"{name} must have {columns} columns, as the weight, got {x.shape[1]}")
    if rows > 1 and x.stride(0) % 8:
        raise ValueError(f"{name}'s rows must lie apart by a multiple of 8, got strides {x.stride()}")


def launch(
    cut: Plan,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    *,
    groups: int,
    ue8m0: bool,
    residual: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    positions: torch.Tensor | None = None,
    rope: torch.Tensor | None = None,
    settled: bool = False,
) -> None:
    """The kernel on checked arguments: x [tokens, groups * K], weight of groups * N rows of K columns."""
    tokens, depth = x.shape[0], weight.shape[-1]
    rows = weight.numel() // depth
    if tokens == 0:
        return
    grid = (rows // cut.rows, cut.splits, triton.cdiv(tokens, cut.tokens))
    partial, squares, arrivals = out, out, out
    if cut.splits > 1:
        partial = torch.empty((cut.splits, tokens, rows), dtype=torch.float32, device=x.device)
        squares = torch.empty((grid[0] * cut.splits, tokens), dtype=torch.float32, device=x.device)
        arrivals = _arrivals(x.device, torch.cuda.current_stream().cuda_stream if x.is_cuda else 0)
        if grid[0] * grid[2] > MAX_TILES:
            raise ValueError(f"at most {MAX_TILES} blocks can share K, got {grid[0]} x {grid[2]}")
    pdl = has_dependent_launch(x.device)
    stride, x = x.stride(0), x.view(torch.int32)
    linear_kernel[grid](
        x,
        x if residual is None else residual.view(torch.int32),
        x if residual_out is None else residual_out.view(torch.int32),
        x if norm_weight is None else norm_weight.view(torch.int32),
        x if positions is None else positions,
        x if rope is None else rope,
        weight.view(torch.int32),
        weight_scale.view(torch.uint8) if weight_scale.dtype == torch.float8_e8m0fnu else weight_scale,
        out,
        partial,
        squares,
        arrivals,
        tokens,
        stride,
        0 if residual is None else residual.stride(0),
        eps,
        COLUMNS=rows // groups,
        GROUPS=groups,
        DEPTH=depth,
        SPLITS=cut.splits,
        ROWS=cut.rows,
        TOKENS=cut.tokens,
        WARPS=cut.warps,
        RESIDUAL=residual is not None,
        NORM=norm_weight is not None,
        ROPE=rope is not None,
        UE8M0=ue8m0,
        SETTLED=settled,
        EARLY=EARLY_FLAG[0],
        PDL=pdl,
        num_warps=cut.warps,
        **({"launch_pdl": True} if pdl else {}),
    )


@functools.cache
def _arrivals(device: torch.device, stream: int) -> torch.Tensor:
    """Counters of finished shares, all zero between calls; one set a stream, on which calls follow each other."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def serving_calls() -> Iterator[Callable[[], object]]:
    """A layer's linears and the shared expert's, each on whole rows."""
    for ranks in serving.RANKS:
        intermediate = serving.INTERMEDIATE // ranks
        for columns, depth in (
            (1536, serving.HIDDEN),
            (serving.HEADS // ranks * 512, 1024),
            (64 * 128, 1024),
            (serving.HIDDEN, serving.OUTPUT_GROUPS // ranks * 1024),
            (2 * intermediate, serving.HIDDEN),
            (serving.HIDDEN, intermediate),
        ):
            weight = torch.zeros(columns, depth, dtype=torch.float8_e4m3fn)
            scale = torch.zeros(columns // BLOCK, depth // BLOCK)
            for tokens in serving.BATCHES:
                x = torch.zeros(tokens, depth, dtype=torch.bfloat16)
                yield functools.partial(fp8_block_linear, x, weight, scale)


def compile_cases() -> Iterator[CompileCase]:
    """A layer's linears on a 188-SM sm_120 GPU, the prologues on one of them."""
    shapes = ((1536, 4096), (8192, 1024), (16384, 1024), (4096, 2048), (1024, 4096), (4096, 512))
    seen = set()
    for columns, depth in shapes:
        for tokens in (1, 16, 64):
            for name, flags in PROLOGUES.items():
                cut = plan(tokens, columns, depth, 188)
                if name == "plain" or (columns, depth) == (8192, 1024):
                    key = (cut, depth if flags["NORM"] else 0, name)
                    if key in seen:
                        continue
                    seen.add(key)
                    yield linear_case(
                        "fp8_block_linear", f"{columns} x {depth}, {name}, {tokens} tokens", cut, columns, depth, flags
                    )


PROLOGUES: dict[str, dict[str, Any]] = {
    "plain": {"NORM": False, "RESIDUAL": False, "UE8M0": False},
    "residual, norm, UE8M0": {"NORM": True, "RESIDUAL": True, "UE8M0": True},
}


def linear_case(
    op: str, shape: str, cut: Plan, columns: int, depth: int, flags: dict[str, Any], groups: int = 1
) -> CompileCase:
    """A launch of linear_kernel."""
    rope = op == "inv_rope_wo_a"
    return CompileCase(
        op=op,
        shape=shape,
        kernel=linear_kernel,
        arguments={
            **dict.fromkeys(("x", "residual", "residual_out", "norm_weight", "weight"), "*i32:16"),
            "out": "*bf16:16",
            **dict.fromkeys(("partial", "partial_squares"), "*fp32:16" if cut.splits > 1 else "*bf16:16"),
            "arrivals": "*i32:16" if cut.splits > 1 else "*bf16:16",
            "positions": "*i64:16" if rope else "*i32:16",
            "rope": "*fp32:16" if rope else "*i32:16",
            "weight_scale": "*u8:16" if flags["UE8M0"] else "*fp32:16",
            **dict.fromkeys(("x_stride", "residual_stride"), "i32:16"),
            "tokens": "i32",
            "eps": "fp32",
        },
        constexprs={
            "COLUMNS": columns,
            "GROUPS": groups,
            "DEPTH": depth,
            "SPLITS": cut.splits,
            "ROWS": cut.rows,
            "TOKENS": cut.tokens,
            "WARPS": cut.warps,
            "ROPE": rope,
            "SETTLED": False, "EARLY": False,
            "PDL": True,
            **flags,
        },
        num_warps=cut.warps,
        uses_mma=True,
        options={"launch_pdl": True},
    )
