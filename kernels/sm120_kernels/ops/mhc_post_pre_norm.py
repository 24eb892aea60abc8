"""The boundary between two blocks of a model with hyper-connections: four residual streams instead of one.

A program of the first launch takes a block of tokens and a share of the columns: it updates the streams with the last
block's output, writes them, and adds up its share of the 24 mixing values and of the sum of squares. In the second, one
program a token mixes the streams into the next block's normalised input, while another works out that block's own
weights (the Sinkhorn iterations), which nothing needs before the next boundary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sm120_kernels import serving
from sm120_kernels.aot import CompileCase
from sm120_kernels.checks import has_dependent_launch, require, require_device, sm_count
from sm120_kernels.interpret import dot, reciprocal, side_by_side, to_bf16

STREAMS = 4
HIDDEN = 4096
MIXES = 2 * STREAMS + STREAMS**2
# A row of partial sums: 24 mixing values, the sum of squares, padding.
ROW = tl.constexpr(32)
SQUARES = tl.constexpr(MIXES)
POST_FACTOR = tl.constexpr(2.0)
FINISH_WARPS = 4
EARLY_TOKENS = 32


@triton.jit
def _functions(fn_ptr, first, HIDDEN: tl.constexpr, MIXES: tl.constexpr, COLUMNS: tl.constexpr):
    """The mixing matrix over COLUMNS columns of each stream, [4 * COLUMNS, ROW]."""
    mix = tl.arange(0, ROW)[None, :]
    column = tl.arange(0, 4 * COLUMNS)[:, None]
    place = mix * (4 * HIDDEN) + column // COLUMNS * HIDDEN + first + column % COLUMNS
    return tl.load(fn_ptr + place, mask=mix < MIXES, other=0.0)


@triton.jit
def _streams(
    y_ptr,
    residual_ptr,
    post_ptr,
    comb_ptr,
    residual_out_ptr,
    token,
    present,
    first,
    squares,
    HIDDEN: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the new streams over COLUMNS columns. They side by side, [TOKENS, 4 * COLUMNS], and their squares."""
    column = first + tl.arange(0, COLUMNS)
    wide = token.to(tl.int64)[:, None]
    y = tl.load(y_ptr + wide * HIDDEN + column[None, :], mask=present[:, None], other=0.0).to(tl.float32)
    places = wide * (4 * HIDDEN) + column[None, :]
    streams = ()
    for j in tl.static_range(4):
        stream = tl.load(residual_ptr + places + j * HIDDEN, mask=present[:, None], other=0.0)
        streams = streams + (stream.to(tl.float32),)
    rounded = ()
    for i in tl.static_range(4):
        value = tl.load(post_ptr + token * 4 + i, mask=present, other=0.0)[:, None] * y
        for j in tl.static_range(4):
            value += tl.load(comb_ptr + token * 16 + 4 * j + i, mask=present, other=0.0)[:, None] * streams[j]
        value = to_bf16(value)
        tl.store(residual_out_ptr + places + i * HIDDEN, value, mask=present[:, None])
        rounded = rounded + (value,)
        value = value.to(tl.float32)
        squares += tl.sum(value * value, 1)
    left = side_by_side(rounded[0], rounded[1], TOKENS, COLUMNS)
    right = side_by_side(rounded[2], rounded[3], TOKENS, COLUMNS)
    return side_by_side(left, right, TOKENS, 2 * COLUMNS), squares


@triton.jit(do_not_specialize=["steps"])
def _post_kernel(
    y_ptr,
    residual_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    residual_out_ptr,
    partial_ptr,
    tokens,
    steps,
    HIDDEN: tl.constexpr,
    MIXES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Streams and partial sums of TOKENS tokens over `steps` times COLUMNS columns; the grid is (shares, token blocks).

    The products lag a turn behind: a tile made in the same turn Triton (3.6, 3.8) would make once more in each warp.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    share = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    present = token < tokens
    first = share * steps * COLUMNS
    functions = _functions(fn_ptr, first, HIDDEN, MIXES, COLUMNS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    squares = tl.zeros([TOKENS], tl.float32)
    streams, squares = _streams(
        y_ptr,
        residual_ptr,
        post_ptr,
        comb_ptr,
        residual_out_ptr,
        token,
        present,
        first,
        squares,
        HIDDEN,
        TOKENS,
        COLUMNS,
    )
    sums = tl.zeros([TOKENS, ROW], tl.float32)
    for step in tl.range(1, steps, num_stages=1):
        sums = dot(streams, functions, sums)
        functions = _functions(fn_ptr, first + step * COLUMNS, HIDDEN, MIXES, COLUMNS)
        streams, squares = _streams(
            y_ptr,
            residual_ptr,
            post_ptr,
            comb_ptr,
            residual_out_ptr,
            token,
            present,
            first + step * COLUMNS,
            squares,
            HIDDEN,
            TOKENS,
            COLUMNS,
        )
    sums = dot(streams, functions, sums)
    mix = tl.arange(0, ROW)
    sums = tl.where(mix[None, :] == SQUARES, squares[:, None], sums)
    place = (share * tokens + token[:, None]) * ROW + mix[None, :]
    tl.store(partial_ptr + place, sums, mask=present[:, None])


@triton.jit
def _pick(values, index, wanted):
    """The one value whose index is `wanted`."""
    return tl.sum(tl.where(index == wanted, values, 0.0))


@triton.jit
def _mixes(partial_ptr, scale, base, token, tokens, rms_eps, HIDDEN: tl.constexpr, SHARES: tl.constexpr):
    """A token's 24 mixing values, scaled and with their base."""
    mix = tl.arange(0, ROW)
    share = tl.arange(0, SHARES)
    sums = tl.sum(tl.load(partial_ptr + (share[:, None] * tokens + token) * ROW + mix[None, :]), 0)
    factor = tl.rsqrt(_pick(sums, mix, SQUARES) / (4 * HIDDEN) + rms_eps)
    return sums * factor * scale + base


@triton.jit
def _sums(matrix, factors, before, eps, NEXT: tl.constexpr, STEP: tl.constexpr):
    """The four rows of a matrix (NEXT 4, STEP 1) or its columns (1, 4), each summed with factors, and eps of what the
    sum was before; and the reciprocals of the sums."""
    sums = ()
    inverses = ()
    for i in tl.static_range(4):
        left = matrix[i * NEXT] * factors[0] + matrix[i * NEXT + STEP] * factors[1]
        right = matrix[i * NEXT + 2 * STEP] * factors[2] + eps * before[i]
        total = left + (matrix[i * NEXT + 3 * STEP] * factors[3] + right)
        sums = sums + (total,)
        inverses = inverses + (reciprocal(total),)
    return sums, inverses


@triton.jit
def _finish_kernel(
    partial_ptr,
    residual_ptr,
    scale_ptr,
    base_ptr,
    norm_weight_ptr,
    post_ptr,
    comb_ptr,
    x_ptr,
    tokens,
    rms_eps,
    hc_eps,
    norm_eps,
    HIDDEN: tl.constexpr,
    MIXES: tl.constexpr,
    SHARES: tl.constexpr,
    ITERATIONS: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: program (token, 0) mixes and normalises its streams, program (token, 1) works out post and comb.

    EARLY: ask for the streams before working out their weights, which pays while programs are few.
    """
    token = tl.program_id(0).to(tl.int64)
    mix = tl.arange(0, ROW)
    base = tl.load(base_ptr + mix, mask=mix < MIXES, other=0.0)
    scale = tl.load(scale_ptr + tl.minimum(mix // 4, 2), mask=mix < MIXES, other=0.0)
    column = tl.arange(0, HIDDEN)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.program_id(1) == 0:
        stream_ptr = residual_ptr + token * 4 * HIDDEN + column
        streams = ()
        if EARLY:
            for i in tl.static_range(4):
                streams = streams + (tl.load(stream_ptr + i * HIDDEN),)
        mixes = _mixes(partial_ptr, scale, base, token, tokens, rms_eps, HIDDEN, SHARES)
        weights = 1.0 / (1.0 + tl.exp(-mixes)) + hc_eps
        x = tl.zeros([HIDDEN], tl.float32)
        for i in tl.static_range(4):
            stream = streams[i] if EARLY else tl.load(stream_ptr + i * HIDDEN)
            x += _pick(weights, mix, i) * stream.to(tl.float32)
        factor = tl.rsqrt(tl.sum(x * x) / HIDDEN + norm_eps)
        weight = tl.load(norm_weight_ptr + column).to(tl.float32)
        tl.store(x_ptr + token * HIDDEN + column, to_bf16(x * factor * weight))
    else:
        mixes = _mixes(partial_ptr, scale, base, token, tokens, rms_eps, HIDDEN, SHARES)
        post = POST_FACTOR / (1.0 + tl.exp(-mixes))
        tl.store(post_ptr + token * 4 + mix - 4, post, mask=(mix >= 4) & (mix < 8))
        # Each thread holds the whole 4 x 4 matrix: no sum leaves a thread.
        matrix = ()
        for j in tl.static_range(4):
            row = ()
            for k in tl.static_range(4):
                row = row + (_pick(mixes, mix, 8 + 4 * j + k),)
            top = tl.maximum(tl.maximum(row[0], row[1]), tl.maximum(row[2], row[3]))
            a, b, c, d = tl.exp(row[0] - top), tl.exp(row[1] - top), tl.exp(row[2] - top), tl.exp(row[3] - top)
            factor = 1.0 / ((a + b) + (c + d))
            matrix = matrix + (a * factor + hc_eps, b * factor + hc_eps, c * factor + hc_eps, d * factor + hc_eps)
        # What the iterations leave is matrix[i, j] / (rows[i] columns[j]): only these eight change.
        one = tl.full([], 1.0, tl.float32)
        rows = (one, one, one, one)
        row_factors = rows
        columns, column_factors = _sums(matrix, rows, rows, hc_eps, 1, 4)
        for _ in range(ITERATIONS - 1):
            rows, row_factors = _sums(matrix, column_factors, rows, hc_eps, 4, 1)
            columns, column_factors = _sums(matrix, row_factors, columns, hc_eps, 1, 4)
        for place in tl.static_range(16):
            tl.store(comb_ptr + token * 16 + place, matrix[place] * row_factors[place // 4] * column_factors[place % 4])


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the first launch is cut: `tokens` tokens by `columns` columns a step, `steps` steps a program."""

    tokens: int
    columns: int
    steps: int
    warps: int = 4

    @property
    def shares(self) -> int:
        """Programs that share a token's columns."""
        return HIDDEN // (self.columns * self.steps)


@functools.cache
def plan(tokens: int, sms: int) -> Plan:
    """Choose the cut, after sweeps on an H200, of up to 16 tokens in a whole step (benchmarks/log.md).

    Args:
        tokens: of the call.
        sms: streaming multiprocessors of the GPU.
    """
    if tokens > 128:
        return Plan(32, 32, 4, 8)
    block = 16 if tokens <= 32 else 32
    steps = 8
    while steps > 1 and triton.cdiv(tokens, block) * (HIDDEN // (32 * steps)) < 3 * sms:
        steps //= 2
    return Plan(block, 32, steps)


class Boundary(NamedTuple):
    """What a boundary gives.

    Attributes:
        residual: [tokens, 4, 4096] bfloat16, the streams after the last block.
        post: [tokens, 4] float32, how much of the next block's output each stream takes.
        comb: [tokens, 4, 4] float32, [j, i]: how much of stream j goes to stream i at the next boundary.
        x: [tokens, 4096] bfloat16, the next block's normalised input.
    """

    residual: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor
    x: torch.Tensor

    @staticmethod
    def empty(tokens: int, device: torch.device | str) -> Boundary:
        """Results of a call, to be filled."""
        return Boundary(
            torch.empty((tokens, STREAMS, HIDDEN), dtype=torch.bfloat16, device=device),
            torch.empty((tokens, STREAMS), dtype=torch.float32, device=device),
            torch.empty((tokens, STREAMS, STREAMS), dtype=torch.float32, device=device),
            torch.empty((tokens, HIDDEN), dtype=torch.bfloat16, device=device),
        )


def mhc_post_pre_norm(
    y: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    iterations: int = 20,
    rms_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    out: Boundary | None = None,
    chosen: Plan | None = None,
) -> Boundary:
    """End one block and begin the next: new streams, the next block's input, and its weights for the boundary after it.

    With R the streams, and every sum in fp32:

        R'[i]  = post[i] y + sum_j comb[j, i] R[j]                 (rounded to bf16)
        m      = fn R' / sqrt(mean(R'^2) + rms_eps)                (24 values over all 4 x 4096)
        pre    = sigmoid(scale[0] m[0:4] + base[0:4]) + hc_eps
        post'  = 2 sigmoid(scale[1] m[4:8] + base[4:8])
        comb'  = Sinkhorn(softmax(scale[2] m[8:24] + base[8:24], rows) + hc_eps): `iterations` times divided by the
                 column sums, with the row sums in between, hc_eps added to each sum
        x      = RMSNorm(sum_i pre[i] R'[i]) norm_weight

    Two launches. All sizes come from the shapes, so the call can be captured in a CUDA graph. How many shares a token's
    24 sums are cut into depends on the number of tokens, so their fp32 grouping may too; with the same `chosen` a
    token's result is the same bit for bit in every batch.

    Args:
        y: [tokens, 4096] bfloat16, the last block's output, contiguous as everything here.
        residual: [tokens, 4, 4096] bfloat16.
        post: [tokens, 4] float32 of the last boundary.
        comb: [tokens, 4, 4] float32 of the last boundary.
        fn: [24, 16384] bfloat16, the mixing matrix. A checkpoint that has it in fp32 is converted once at load.
        scale: [3] float32.
        base: [24] float32.
        norm_weight: [4096] bfloat16 of the next block's RMSNorm.
        iterations: Sinkhorn iterations, at least 1.
        rms_eps, hc_eps, norm_eps: as in the formulas.
        out: results; allocated when None. May hold the arguments of the same name, which are then overwritten.
        chosen: cut the first launch this way, not as `plan` says.

    Returns:
        out.

    Raises:
        ValueError: a wrong dtype, shape, stride or device, or no iteration.

    Source of the semantics: SGLang 0.5.23, `kernels/ops/layernorm/mhc.py`, `_mhc_post_torch` and `_mhc_pre_torch`.
    """
    tokens = y.shape[0]
    require(y, "y", torch.bfloat16, (tokens, HIDDEN))
    require(residual, "residual", torch.bfloat16, (tokens, STREAMS, HIDDEN))
    require(post, "post", torch.float32, (tokens, STREAMS))
    require(comb, "comb", torch.float32, (tokens, STREAMS, STREAMS))
    require(fn, "fn", torch.bfloat16, (MIXES, STREAMS * HIDDEN))
    require(scale, "scale", torch.float32, (3,))
    require(base, "base", torch.float32, (MIXES,))
    require(norm_weight, "norm_weight", torch.bfloat16, (HIDDEN,))
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if out is None:
        out = Boundary.empty(tokens, y.device)
    require(out.residual, "out.residual", torch.bfloat16, (tokens, STREAMS, HIDDEN))
    require(out.post, "out.post", torch.float32, (tokens, STREAMS))
    require(out.comb, "out.comb", torch.float32, (tokens, STREAMS, STREAMS))
    require(out.x, "out.x", torch.bfloat16, (tokens, HIDDEN))
    require_device(
        y.device,
        residual=residual,
        post=post,
        comb=comb,
        fn=fn,
        scale=scale,
        base=base,
        norm_weight=norm_weight,
        **{f"out.{name}": value for name, value in out._asdict().items()},
    )
    if tokens == 0:
        return out

    cut = chosen or plan(tokens, sm_count(y.device))
    pdl = has_dependent_launch(y.device)
    launch = {"launch_pdl": True} if pdl else {}
    partial = y.new_empty((cut.shares, tokens, ROW.value), dtype=torch.float32)
    _post_kernel[(cut.shares, triton.cdiv(tokens, cut.tokens))](
        y,
        residual,
        post,
        comb,
        fn,
        out.residual,
        partial,
        tokens,
        cut.steps,
        HIDDEN=HIDDEN,
        MIXES=MIXES,
        TOKENS=cut.tokens,
        COLUMNS=cut.columns,
        PDL=pdl,
        num_warps=cut.warps,
        **launch,
    )
    _finish_kernel[(tokens, 2)](
        partial,
        out.residual,
        scale,
        base,
        norm_weight,
        out.post,
        out.comb,
        out.x,
        tokens,
        rms_eps,
        hc_eps,
        norm_eps,
        HIDDEN=HIDDEN,
        MIXES=MIXES,
        SHARES=cut.shares,
        ITERATIONS=iterations,
        EARLY=tokens <= EARLY_TOKENS,
        PDL=pdl,
        num_warps=FINISH_WARPS,
        **launch,
    )
    return out


def serving_calls() -> Iterator[Callable[[], object]]:
    """A boundary."""
    for tokens in serving.BATCHES:
        yield functools.partial(
            mhc_post_pre_norm,
            torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16),
            torch.zeros(tokens, STREAMS, HIDDEN, dtype=torch.bfloat16),
            torch.zeros(tokens, STREAMS),
            torch.zeros(tokens, STREAMS, STREAMS),
            torch.zeros(MIXES, STREAMS * HIDDEN, dtype=torch.bfloat16),
            torch.zeros(3),
            torch.zeros(MIXES),
            torch.zeros(HIDDEN, dtype=torch.bfloat16),
        )


def compile_cases() -> Iterator[CompileCase]:
    """Both launches at 1, 16, 64 and 256 tokens on a 188-SM sm_120 GPU."""
    arguments = {
        **dict.fromkeys(
            ("y_ptr", "residual_ptr", "fn_ptr", "residual_out_ptr", "norm_weight_ptr", "x_ptr"), "*bf16:16"
        ),
        **dict.fromkeys(("post_ptr", "comb_ptr", "partial_ptr", "scale_ptr", "base_ptr"), "*fp32:16"),
        **dict.fromkeys(("rms_eps", "hc_eps", "norm_eps"), "fp32"),
        **dict.fromkeys(("tokens", "steps"), "i32"),
    }
    cuts = {tokens: plan(tokens, 188) for tokens in (1, 16, 64, 256)}
    for tokens, cut in {cut: (tokens, cut) for tokens, cut in reversed(cuts.items())}.values():
        for kernel, warps, constants in (
            (
                _post_kernel,
                cut.warps,
                {"TOKENS": cut.tokens, "COLUMNS": cut.columns},
            ),
            (_finish_kernel, FINISH_WARPS, {"SHARES": cut.shares, "ITERATIONS": 20, "EARLY": tokens <= EARLY_TOKENS}),
        ):
            yield CompileCase(
                op="mhc_post_pre_norm",
                shape=f"{tokens} tokens, {'first' if kernel is _post_kernel else 'second'} launch",
                kernel=kernel,
                arguments={name: kind for name, kind in arguments.items() if name in kernel.arg_names},
                constexprs={"HIDDEN": HIDDEN, "MIXES": MIXES, "PDL": True, **constants},
                num_warps=warps,
                uses_mma=kernel is _post_kernel,
                options={"launch_pdl": True},
            )
