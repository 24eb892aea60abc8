"""The attention output's inverse RoPE and its grouped low-rank FP8 projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sm120_kernels.aot import CompileCase


def inv_rope_wo_a(
    o: torch.Tensor,
    positions: torch.Tensor,
    rope: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    ue8m0: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[t, g] = Q(R(o[t, heads of g])) W[g]^T, R turning the last 64 columns of each head back by its position.

    One launch. R multiplies each pair (a, b) of columns, read as a + bi, by cos - i sin of rope[position]; Q is
    `fp8_block_linear`'s rounding. The rotated value is not rounded to bf16 in between.

    Args:
        o: [rows, heads, 512] bfloat16, contiguous.
        positions: [rows] int32.
        rope: [positions, 64] float32, contiguous: cos and sin of 32 frequencies, interleaved.
        weight: [groups, N, heads / groups * 512] float8_e4m3fn, contiguous, N a multiple of 128.
        weight_scale: [groups, N / 128, heads / groups * 4] or the same flattened to two dimensions, contiguous; float32, or
            float8_e8m0fnu or uint8 (2 ** (byte - 127)).
        ue8m0: activation scales are powers of two.
        out: [rows, groups * N] bfloat16, contiguous; allocated when None.

    Returns:
        y, bfloat16 [rows, groups * N]: what wo_b takes.

    Raises:
        ValueError: a wrong dtype, shape, stride or device.

    Source: SGLang 0.5.23, `srt/models/deepseek_v4.py` (`fused_rope_inplace(..., inverse=True)`, `_fp8_wo_a_einsum`).
    """
    raise NotImplementedError


def compile_cases() -> Iterator[CompileCase]:
    yield from ()
