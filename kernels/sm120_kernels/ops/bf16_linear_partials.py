"""bf16 projections of a few rows with fp32 results: the compressors', the indexer's head weights, the router's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from sm120_kernels import serving
from sm120_kernels.aot import CompileCase
from sm120_kernels.checks import has_dependent_launch, require, require_device, require_rows, sm_count
from sm120_kernels.interpret import dot, prefetch_l2

OUTPUTS = 64
DEPTH = 64
WARPS = 4
STAGES = 4
MAX_SPLITS = 8


@triton.jit
def _bf16_linear_kernel(
    x_ptr,
    weight_ptr,
    partial_ptr,
    tokens,
    outputs,
    depth,
    x_stride,
    turns,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    SETTLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """A share of the depth for OUTPUTS outputs of TOKENS tokens; the grid is (output blocks, shares, token blocks)."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    share = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    column = share * turns * DEPTH + tl.arange(0, DEPTH)
    weights = weight_ptr + output.to(tl.int64)[:, None] * depth + column[None, :]
    rows = x_ptr + token.to(tl.int64)[None, :] * x_stride + column[:, None]
    sums = tl.zeros([OUTPUTS, TOKENS], tl.float32)
    if PDL and not SETTLED:
        # A turn's columns of a row are one 128-byte line.
        line = tl.arange(0, 2 * OUTPUTS)
        lines = weight_ptr + tl.minimum(tl.program_id(0) * OUTPUTS + line // 2, outputs - 1).to(tl.int64) * depth
        for turn in range(0, turns, 2):
            prefetch_l2(lines + (share * turns + tl.minimum(turn + line % 2, turns - 1)) * DEPTH)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for turn in tl.range(0, turns, num_stages=STAGES):
        weight = tl.load(weights + turn * DEPTH, mask=(output < outputs)[:, None], other=0.0)
        x = tl.load(rows + turn * DEPTH, mask=(token < tokens)[None, :], other=0.0)
        sums = dot(weight, x, sums)
    if PDL and SETTLED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    place = (share * tokens + token).to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(partial_ptr + place, sums, mask=(output < outputs)[:, None] & (token < tokens)[None, :])


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is cut: `tokens` tokens a program, the depth in `splits` shares."""

    tokens: int
    splits: int


@functools.cache
def plan(tokens: int, outputs: int, depth: int, sms: int) -> Plan:
    """Choose the cut: as few shares as give every multiprocessor a program; more are slower in a step (log.md).

    Args:
        tokens, outputs, depth: the product's sizes.
        sms: streaming multiprocessors of the GPU.
    """
    block = min(64, max(16, triton.next_power_of_2(tokens)))
    programs = triton.cdiv(outputs, OUTPUTS) * triton.cdiv(tokens, block)
    splits = 1
    while splits < MAX_SPLITS and depth % (2 * splits * DEPTH) == 0 and programs * splits < sms:
        splits *= 2
    return Plan(block, splits)


def bf16_linear_partials(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    settled: bool = False,
    out: torch.Tensor | None = None,
    chosen: Plan | None = None,
) -> torch.Tensor:
    """Products x weight^T in fp32, left as shares of the depth that the next kernel adds up.

    One launch. The ops that read the result (`store_attention_inputs`, `prepare_queries`, `route_experts`) take it as
    it is, so that no launch only adds. Weights of several projections of the same x may be stacked; each reader names
    its columns.

    Args:
        x: [tokens, depth] bfloat16, rows contiguous and a multiple of 8 elements apart.
        weight: [outputs, depth] bfloat16, contiguous; depth a multiple of 64.
        settled: x is older than what the kernel right before this one writes (`checks.has_dependent_launch`).
        out: [splits, tokens, outputs] float32, contiguous, splits as `plan` says; allocated when None.
        chosen: cut the call this way, not as `plan` says.

    Returns:
        [splits, tokens, outputs] float32; the result is their sum over the first dimension.

    Raises:
        ValueError: a wrong dtype, shape, stride or device.
    """
    tokens = x.shape[0]
    require_rows(x, "x", torch.bfloat16, tokens)
    depth = x.shape[1]
    if depth % DEPTH or depth == 0 or x.stride(0) % 8:
        raise ValueError(f"x must have a positive multiple of {DEPTH} columns and strides of 8, got {list(x.shape)}")
    require(weight, "weight", torch.bfloat16, (weight.shape[0], depth))
    outputs = weight.shape[0]
    cut = chosen or plan(tokens, outputs, depth, sm_count(x.device))
    if out is None:
        out = torch.empty((cut.splits, tokens, outputs), dtype=torch.float32, device=x.device)
    require(out, "out", torch.float32, (cut.splits, tokens, outputs))
    require_device(x.device, weight=weight, out=out)
    if tokens == 0:
        return out
    pdl = has_dependent_launch(x.device)
    _bf16_linear_kernel[(triton.cdiv(outputs, OUTPUTS), cut.splits, triton.cdiv(tokens, cut.tokens))](
        x,
        weight,
        out,
        tokens,
        outputs,
        depth,
        x.stride(0),
        depth // DEPTH // cut.splits,
        TOKENS=cut.tokens,
        OUTPUTS=OUTPUTS,
        DEPTH=DEPTH,
        STAGES=STAGES,
        SETTLED=settled,
        PDL=pdl,
        num_warps=WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def serving_calls() -> Iterator[Callable[[], object]]:
    """The compressors' projections (C4 and the indexer's together or each alone, C128) and the experts' gate."""
    for outputs in (4 * 512 + 4 * 128, 4 * 512, 4 * 128, 2 * 512, 256):
        weight = torch.zeros(outputs, serving.HIDDEN, dtype=torch.bfloat16)
        for tokens in serving.BATCHES:
            x = torch.zeros(tokens, serving.HIDDEN, dtype=torch.bfloat16)
            yield functools.partial(bf16_linear_partials, x, weight)


def compile_cases() -> Iterator[CompileCase]:
    """16, 32 and 64 tokens a program."""
    for tokens in (16, 32, 64):
        yield CompileCase(
            op="bf16_linear_partials",
            shape=f"{tokens} tokens",
            kernel=_bf16_linear_kernel,
            arguments={
                "x_ptr": "*bf16:16",
                "weight_ptr": "*bf16:16",
                "partial_ptr": "*fp32:16",
                "tokens": "i32",
                "turns": "i32",
                **dict.fromkeys(("outputs", "depth", "x_stride"), "i32:16"),
            },
            constexprs={
                "TOKENS": tokens,
                "OUTPUTS": OUTPUTS,
                "DEPTH": DEPTH,
                "STAGES": STAGES,
                "SETTLED": False,
                "PDL": True,
            },
            num_warps=WARPS,
            uses_mma=True,
            options={"launch_pdl": True},
        )
