"""The attention output's inverse RoPE and its grouped low-rank FP8 projection."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch

from sm120_kernels import kv_layout, serving
from sm120_kernels.aot import CompileCase
from sm120_kernels.checks import require, require_block_scale, require_device, require_index, sm_count
from sm120_kernels.ops import fp8_block_linear
from sm120_kernels.ops.fp8_block_linear import BLOCK, Plan, plan

HEAD_DIM = kv_layout.HEAD_DIM
ROPE_DIM = kv_layout.ROPE_DIM


def inv_rope_wo_a(
    o: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    ue8m0: bool = False,
    out: torch.Tensor | None = None,
    chosen: Plan | None = None,
) -> torch.Tensor:
    """y[t, g] = Q(R(o[t, heads of g])) W[g]^T, R turning the last 64 columns of each head back by its position.

    One launch. R multiplies each pair (a, b) of columns, read as a + bi, by cos - i sin of rope[position]; Q is
    `fp8_block_linear`'s rounding. The rotated value is not rounded to bf16 in between.

    Args:
        o: [rows, heads, 512] bfloat16, contiguous.
        positions: [rows] int32 or int64.
        rope: [positions, 64] float32, contiguous: cos and sin of 32 frequencies, interleaved.
        weight: [groups, N, heads / groups * 512] float8_e4m3fn, contiguous, N a multiple of 128.
        weight_scale: [groups, N / 128, heads / groups * 4] or the same flattened to two dimensions, contiguous;
            float32, or float8_e8m0fnu or uint8 (2 ** (byte - 127)).
        ue8m0: activation scales are powers of two.
        out: [rows, groups * N] bfloat16, contiguous; allocated when None.
        chosen: cut the call this way, not as `fp8_block_linear.plan` says, in shares of whole heads.

    Returns:
        y, bfloat16 [rows, groups * N]: what wo_b takes.

    Raises:
        ValueError: a wrong dtype, shape, stride or device.

    Source: SGLang 0.5.23, `srt/models/deepseek_v4.py` (`fused_rope_inplace(..., inverse=True)`, `_fp8_wo_a_einsum`).
    """
    if o.ndim != 3 or o.shape[2] != HEAD_DIM:
        raise ValueError(f"o must be [rows, heads, {HEAD_DIM}], got {list(o.shape)}")
    tokens, heads, _ = o.shape
    require(o, "o", torch.bfloat16, tuple(o.shape))
    require_index(positions, "positions", (tokens,))
    if rope.ndim != 2:
        raise ValueError(f"rope must be [positions, {ROPE_DIM}], got {list(rope.shape)}")
    require(rope, "rope", torch.float32, (rope.shape[0], ROPE_DIM))
    if weight.ndim != 3 or heads % weight.shape[0] or weight.shape[1] % BLOCK:
        raise ValueError(f"weight must be [a divisor of {heads}, a multiple of {BLOCK}, K], got {list(weight.shape)}")
    groups, columns, _ = weight.shape
    depth = heads // groups * HEAD_DIM
    require(weight, "weight", torch.float8_e4m3fn, (groups, columns, depth))
    flat = weight_scale.flatten(0, 1) if weight_scale.ndim == 3 else weight_scale
    require_block_scale(flat, "weight_scale", (groups * columns // BLOCK, depth // BLOCK))
    if out is None:
        out = torch.empty((tokens, groups * columns), dtype=torch.bfloat16, device=o.device)
    require(out, "out", torch.bfloat16, (tokens, groups * columns))
    require_device(o.device, positions=positions, rope=rope, weight=weight, weight_scale=weight_scale, out=out)
    fp8_block_linear.launch(
        chosen or plan(tokens, groups * columns, depth, sm_count(o.device)),
        o.view(tokens, heads * HEAD_DIM),
        weight,
        flat,
        out,
        groups=groups,
        ue8m0=ue8m0,
        positions=positions,
        rope=rope,
    )
    return out


def serving_calls() -> Iterator[Callable[[], object]]:
    """A rank's output projection."""
    for ranks in serving.RANKS:
        heads, groups = serving.HEADS // ranks, serving.OUTPUT_GROUPS // ranks
        depth = heads // groups * HEAD_DIM
        weight = torch.zeros(groups, 1024, depth, dtype=torch.float8_e4m3fn)
        scale = torch.zeros(groups * 1024 // BLOCK, depth // BLOCK)
        for tokens in serving.BATCHES:
            o = torch.zeros(tokens, heads, HEAD_DIM, dtype=torch.bfloat16)
            positions = torch.zeros(tokens, dtype=torch.int64)
            yield functools.partial(inv_rope_wo_a, o, positions, torch.zeros(1, ROPE_DIM), weight, scale)


def compile_cases() -> Iterator[CompileCase]:
    """A TP4 rank's projection on a 188-SM sm_120 GPU."""
    groups, columns, depth = 2, 1024, 4096
    for tokens in (1, 16, 64):
        for ue8m0 in (False, True):
            yield fp8_block_linear.linear_case(
                "inv_rope_wo_a",
                f"{tokens} tokens, {'UE8M0' if ue8m0 else 'fp32'} scales",
                plan(tokens, groups * columns, depth, 188),
                columns,
                depth,
                {"NORM": False, "RESIDUAL": False, "UE8M0": ue8m0},
                groups,
            )
