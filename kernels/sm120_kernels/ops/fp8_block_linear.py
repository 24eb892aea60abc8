"""FP8 linear layer of a few rows: activations quantised inside, block-scaled weights.

The weights are the rows of the product and the tokens its columns, padded to 16. K is cut into shares of four blocks of
columns, and the program that finishes a block of rows last adds the shares up.
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
    capability,
    has_dependent_launch,
    require,
    require_block_scale,
    require_device,
    require_rows,
    sm_count,
)
from sm120_kernels.interpret import INTERPRETED, to_bf16, to_e4m3
from sm120_kernels.unpack import scale_value

BLOCK = 128
E4M3_MAX = tl.constexpr(448.0)
SMALLEST_MAXIMUM = tl.constexpr(1e-10)
MAX_TILES = 65536
WARPS = 8
# Of up to 16 tokens, where a whole step was faster so: (rows, depth) of the weight, and the rows of a block and shares.
SWEPT_IN_A_STEP = {(1536, 4096): (128, 8), (8192, 1024): (128, 4), (16384, 1024): (128, 4)}
# With the RMSNorm of up to 16 tokens, on Hopper: for two programs a multiprocessor.
NORM_REGISTERS = 128


@triton.jit
def _maxima_of_2(a, b, c, d):
    return tl.maximum(a, c), tl.maximum(b, d)


@triton.jit
def _maxima_of_4(a, b, c, d, e, f, g, h):
    return tl.maximum(a, e), tl.maximum(b, f), tl.maximum(c, g), tl.maximum(d, h)


@triton.jit
def _maxima(values, COUNT: tl.constexpr):
    """The largest magnitude of each row of COUNT tensors, all at once, so that none waits for another."""
    magnitudes = ()
    for i in tl.static_range(COUNT):
        magnitudes = magnitudes + (tl.abs(values[i]),)
    if COUNT == 1 or INTERPRETED:
        maxima = ()
        for i in tl.static_range(COUNT):
            maxima = maxima + (tl.max(magnitudes[i], 1),)
    elif COUNT == 2:
        maxima = tl.reduce(magnitudes, 1, _maxima_of_2)
    else:
        maxima = tl.reduce(magnitudes[:4], 1, _maxima_of_4)
        if COUNT == 8:
            maxima = maxima + tl.reduce(magnitudes[4:], 1, _maxima_of_4)
    return maxima


@triton.jit
def _scale(maximum, UE8M0: tl.constexpr):
    """The fp32 scale of values of that largest magnitude, and its inverse."""
    scale = tl.maximum(maximum, SMALLEST_MAXIMUM) / E4M3_MAX
    if UE8M0:
        exponent = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        inverse = 1.0 / scale
    return scale, inverse


@triton.jit
def _load_blocks(pointers, COUNT: tl.constexpr, wanted):
    """COUNT blocks of 128 columns from the pointers [rows, 128] on; zeros unless wanted."""
    found = ()
    for block in tl.static_range(COUNT):
        found = found + (tl.load(pointers + block * 128, mask=wanted, other=0.0),)
    return found


@triton.jit
def _turn_back(value, cos, sin, TOKENS: tl.constexpr):
    """value [TOKENS, 128] with each pair of columns (a, b), read as a + bi, times cos - i sin."""
    a, b = tl.split(value.reshape(TOKENS, 64, 2))
    return tl.join(a * cos + b * sin, b * cos - a * sin).reshape(TOKENS, 128)


@triton.jit(do_not_specialize=["turns"])
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
    turns,
    eps,
    COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    NORM: tl.constexpr,
    ROPE: tl.constexpr,
    UE8M0: tl.constexpr,
    SETTLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """out of ROWS of weight's GROUPS * COLUMNS rows, over one of SPLITS shares of DEPTH, for TOKENS tokens.

    The grid is (blocks of ROWS rows, SPLITS, blocks of TOKENS tokens). The rows of group g multiply the DEPTH columns
    of x from g * DEPTH on. All blocks of 128 columns of a share are quantised side by side; with ROPE four are a head,
    whose last 64 columns are turned back. `turns` is 1.
    """
    BLOCKS: tl.constexpr = DEPTH // 128 // SPLITS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    present = token < tokens
    # What is absent reads what is there.
    there = tl.minimum(token, tokens - 1)
    k = tl.arange(0, 128)
    first = split * (BLOCKS * 128) + k
    inputs = x + there[:, None] * x_stride + (tile * ROWS // COLUMNS * DEPTH + first)[None, :]
    # Weights, table and positions do not depend on the kernel before this one, so they are on their way while it ends.
    w = _load_blocks(weight + row.to(tl.int64)[:, None] * DEPTH + first[None, :], BLOCKS, True)
    w_scale = ()
    for block in tl.static_range(BLOCKS):
        place = weight_scale + tile * ROWS // 128 * (DEPTH // 128) + split * BLOCKS + block
        w_scale = w_scale + (scale_value(tl.load(place)),)
    if ROPE:
        pair = tl.arange(0, 64) - 32
        angle = rope + tl.load(positions + there)[:, None] * 64 + 2 * pair[None, :]
        turning = (pair >= 0)[None, :]
        cos = tl.load(angle, mask=turning, other=1.0)
        sin = tl.load(angle + 1, mask=turning, other=0.0)
    if PDL and not SETTLED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    loaded = _load_blocks(inputs, BLOCKS, True)

    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    squares = tl.zeros((TOKENS,), tl.float32)
    # One turn, which only the caller knows, and to which the input is carried: without the loop the assembler would
    # load each block right before its use.
    for turn in tl.range(0, turns, num_stages=1):
        following = _load_blocks(inputs, BLOCKS, turn + 1 < turns)
        values = ()
        for block in tl.static_range(BLOCKS):
            value = loaded[block].to(tl.float32)
            if RESIDUAL:
                added = residual + there[:, None] * residual_stride + first[None, :]
                value += tl.load(added + block * 128).to(tl.float32)
                if tile == 0:
                    sums = residual_out + token[:, None] * DEPTH + first[None, :]
                    tl.store(sums + block * 128, to_bf16(value), mask=present[:, None])
            if NORM:
                squares += tl.sum(value * value, 1)
                value *= tl.load(norm_weight + first + block * 128).to(tl.float32)[None, :]
            if ROPE and block % 4 == 3:
                value = _turn_back(value, cos, sin, TOKENS)
            values = values + (value,)
        maxima = _maxima(values, BLOCKS)
        quantised = ()
        scales = ()
        for block in tl.static_range(BLOCKS):
            scale, inverse = _scale(maxima[block], UE8M0)
            quantised = quantised + (tl.trans(to_e4m3(values[block] * inverse[:, None])),)
            scales = scales + ((scale * w_scale[block])[None, :],)
        for block in tl.static_range(BLOCKS):
            acc += tl.dot(w[block], quantised[block]) * scales[block]
        loaded = following

    if PDL and SETTLED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    result = token[None, :] * (GROUPS * COLUMNS) + row[:, None]
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
        splits: shares of K, of 1, 2, 4 or 8 blocks of 128 columns each.
        tokens: tokens a program takes.
    """

    rows: int
    splits: int
    tokens: int


@functools.lru_cache(maxsize=4096)
def plan(tokens: int, rows: int, depth: int, sms: int, inputs: int = 1) -> Plan:
    """Choose the blocks from the shapes; the choices are those of sweeps on an H200 (benchmarks/log.md).

    Args:
        tokens: of the call.
        rows, depth: of the weight, all groups together.
        sms: streaming multiprocessors.
        inputs: activation tensors that are read: x, and the residual.
    """
    if tokens <= 16 and (rows, depth) in SWEPT_IN_A_STEP:
        return Plan(*SWEPT_IN_A_STEP[rows, depth], 16)
    blocks = depth // BLOCK
    splits = blocks // math.gcd(4, blocks)
    padded = 16 if tokens <= 16 or inputs > 1 else 32
    return Plan(64 if padded == 16 and rows // 64 * splits <= 2 * sms else 128, splits, padded)


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
            residual.
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
        chosen or plan(tokens, columns, depth, sm_count(x.device), 1 if residual is None else 2),
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
    capped = norm_weight is not None and cut.tokens == 16 and capability(x.device)[0] == 9
    registers = NORM_REGISTERS if capped else None
    linear_kernel[grid](
        x,
        x if residual is None else residual,
        out if residual_out is None else residual_out,
        x if norm_weight is None else norm_weight,
        x if positions is None else positions,
        x if rope is None else rope,
        weight,
        weight_scale.view(torch.uint8) if weight_scale.dtype == torch.float8_e8m0fnu else weight_scale,
        out,
        partial,
        squares,
        arrivals,
        tokens,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        1,
        eps,
        COLUMNS=rows // groups,
        GROUPS=groups,
        DEPTH=depth,
        SPLITS=cut.splits,
        ROWS=cut.rows,
        TOKENS=cut.tokens,
        RESIDUAL=residual is not None,
        NORM=norm_weight is not None,
        ROPE=rope is not None,
        UE8M0=ue8m0,
        SETTLED=settled,
        PDL=pdl,
        num_warps=WARPS,
        maxnreg=registers,
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
                cut = plan(tokens, columns, depth, 188, 2 if flags["RESIDUAL"] else 1)
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
            **dict.fromkeys(("x", "residual", "residual_out", "norm_weight", "out"), "*bf16:16"),
            **dict.fromkeys(("partial", "partial_squares"), "*fp32:16" if cut.splits > 1 else "*bf16:16"),
            "arrivals": "*i32:16" if cut.splits > 1 else "*bf16:16",
            "positions": "*i64:16" if rope else "*bf16:16",
            "rope": "*fp32:16" if rope else "*bf16:16",
            "weight": "*fp8e4nv:16",
            "weight_scale": "*u8:16" if flags["UE8M0"] else "*fp32:16",
            **dict.fromkeys(("x_stride", "residual_stride"), "i32:16"),
            **dict.fromkeys(("tokens", "turns"), "i32"),
            "eps": "fp32",
        },
        constexprs={
            "COLUMNS": columns,
            "GROUPS": groups,
            "DEPTH": depth,
            "SPLITS": cut.splits,
            "ROWS": cut.rows,
            "TOKENS": cut.tokens,
            "ROPE": rope,
            "SETTLED": False,
            "PDL": True,
            **flags,
        },
        num_warps=WARPS,
        uses_mma=True,
        options={"launch_pdl": True},
    )
