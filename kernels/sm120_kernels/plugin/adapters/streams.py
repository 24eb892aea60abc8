"""The residual streams between two blocks (hyper-connections)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch

from sm120_kernels.ops.mhc_post_pre_norm import POST_FACTOR, STREAMS, mhc_post_pre_norm
from sm120_kernels.plugin.adapters.base import DECODE_ROWS, Converted, relative_error, require_rows_at_most
from sm120_kernels.plugin.table import Hook

logger = logging.getLogger(__name__)


class MhcPostPreNorm:
    """`apply_mhc_post_pre_boundary`: ends a block and begins the next, called by `HcRead.update_and_read`."""

    def __init__(self, active: tuple[Hook, ...]) -> None:
        self._mixing = Converted(_to_bf16)

    def run(
        self,
        layer_input: torch.Tensor,
        residual: torch.Tensor,
        post: torch.Tensor,
        comb: torch.Tensor,
        hc_fn: torch.Tensor,
        hc_scale: torch.Tensor,
        hc_base: torch.Tensor,
        hc_mult: int,
        rms_eps: float,
        hc_eps: float,
        hc_post_mult: float,
        sinkhorn_iters: int,
        norm_weight: torch.Tensor | None,
        norm_eps: float | None,
        *,
        fn_transpose: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool]:
        require_rows_at_most(layer_input.shape[0], DECODE_ROWS)
        if hc_mult != STREAMS or hc_post_mult != POST_FACTOR.value:
            raise ValueError(f"{STREAMS} streams and a factor of {POST_FACTOR.value}, got {hc_mult} and {hc_post_mult}")
        if norm_weight is None:
            raise ValueError("a norm after the mix")
        new = mhc_post_pre_norm(
            layer_input,
            residual,
            post.squeeze(-1) if post.ndim == 3 else post,
            comb,
            self._mixing(hc_fn),
            hc_scale,
            hc_base,
            norm_weight,
            iterations=sinkhorn_iters,
            rms_eps=rms_eps,
            hc_eps=hc_eps,
            norm_eps=rms_eps if norm_eps is None else norm_eps,
        )
        return new.residual, new.x, new.post, new.comb, True

    def error(self, upstream: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> float:
        theirs = upstream(*args, **kwargs)
        if theirs is None or not theirs[4]:
            # SGLang has no fused boundary here (SGLANG_OPT_FUSE_MHC_POST_PRE=0).
            return math.nan
        return max(
            relative_error(ours.flatten(), side.flatten()) for ours, side in zip(result[:4], theirs, strict=False)
        )


def _to_bf16(fn: torch.Tensor) -> torch.Tensor:
    rounded = fn.detach().to(torch.bfloat16).contiguous()
    lost = relative_error(rounded, fn.detach())
    if lost:
        logger.warning("sm120_kernels: an mHC matrix loses %.1e of its norm in bf16", lost)
    return rounded
