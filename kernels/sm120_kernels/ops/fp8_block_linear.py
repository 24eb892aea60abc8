"""FP8 linear layer of a few rows: activations quantised inside, block-scaled weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sm120_kernels.aot import CompileCase


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = Q(x) W^T with W in FP8, 128 x 128 values a scale, and Q the FP8 rounding of each row's 128-column groups.

    One launch. Q(v) = s e4m3(v / s) with s = max(|v|) / 448 over the group, raised to a power of two with ue8m0.
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
        out: [rows, N] bfloat16, contiguous; allocated when None.

    Returns:
        y, bfloat16 [rows, N].

    Raises:
        ValueError: a wrong dtype, shape, stride or device.

    Source of the quantisation: SGLang 0.5.23, `sglang_per_token_group_quant_fp8` (floor of 1e-10 for the maximum).
    """
    raise NotImplementedError


def compile_cases() -> Iterator[CompileCase]:
    yield from ()
