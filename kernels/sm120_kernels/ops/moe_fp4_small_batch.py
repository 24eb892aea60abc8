"""The FP4 experts and the shared expert for a small batch: work proportional to the experts that are hit."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sm120_kernels.aot import CompileCase

SWIGLU_LIMIT = 10.0


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """y[t] = sum over k of topk_weights[t, k] E[topk_ids[t, k]](x[t]) + S(x[t]) for up to 64 tokens.

    An expert is w2 a with a = silu(min(gate, L)) * clamp(up, -L, L), gate and up the two halves of w13 x, L the
    swiglu_limit. Routed weights are FP4, two a byte, low half first; the shared expert S, if given, is FP8 with
    128 x 128 scales. Three launches: gate and up, down, sum. Sums are fp32; a is rounded to bf16.

    Args:
        x: [tokens, H] bfloat16, contiguous; H a multiple of 256.
        topk_ids: [tokens, top_k] int32: distinct experts of each token, or -1 for none.
        topk_weights: [tokens, top_k] float32, the routed scaling factor folded in.
        w13: [experts, 2 I, H / 2] uint8, contiguous: I gate rows, then I up rows; I a multiple of 128.
        w13_scale: MXFP4: [experts, 2 I, H / 32] float8_e8m0fnu or uint8 (2 ** (byte - 127)). NVFP4: [experts, 2 I, H / 16]
            float8_e4m3fn. Contiguous.
        w2: [experts, H, I / 2] uint8, contiguous.
        w2_scale: as w13_scale: [experts, H, I / 32] or [experts, H, I / 16].
        w13_global, w2_global: NVFP4 only: [experts] float32, a factor for each expert's weights.
        shared_w13: [2 I, H] float8_e4m3fn, contiguous: gate rows, then up rows.
        shared_w13_scale: [2 I / 128, H / 128], contiguous; float32, or float8_e8m0fnu or uint8.
        shared_w2, shared_w2_scale: [H, I] and [H / 128, I / 128], as above.
        swiglu_limit: L; inf for none.
        fp8_activations: MXFP4 only: round x and a to e4m3 with a power-of-two scale for each 32 values (W4A8) and
            multiply with `tl.dot_scaled`, which sm_100 and sm_120 do in the tensor cores; elsewhere Triton emulates it.
        out: [tokens, H] bfloat16, contiguous; allocated when None.

    Returns:
        y, bfloat16 [tokens, H].

    Raises:
        ValueError: a wrong dtype, shape, stride or device, scales that do not go together.

    Source: SGLang 0.5.23, `cast_e2m1fn_to_e4m3fn` (FP4 packing), `silu_and_mul_masked_post_quant.cuh` (clamped SwiGLU),
    `DeepseekV2MoE` (shared expert, its clamp); the limit of 10 is the checkpoint's `swiglu_limit`.
    """
    raise NotImplementedError


def compile_cases() -> Iterator[CompileCase]:
    yield from ()
