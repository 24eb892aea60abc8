"""The experts: their choice and their products."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch

from sm120_kernels.ops.moe_fp4_small_batch import moe_fp4_small_batch
from sm120_kernels.ops.route_experts import TOP, route_experts
from sm120_kernels.plugin.adapters.base import (
    DECODE_ROWS,
    SMALL_BATCH,
    Converted,
    relative_error,
    require_rows_at_most,
)
from sm120_kernels.plugin.table import Hook


class ScoredExperts:
    """`moe_fused_gate`."""

    def __init__(self, active: tuple[Hook, ...]) -> None:
        pass

    def run(
        self,
        scores: torch.Tensor,
        bias: torch.Tensor | None,
        topk: int,
        scoring_func: str = "sigmoid",
        num_fused_shared_experts: int = 0,
        renormalize: bool = True,
        routed_scaling_factor: float | None = 1.0,
        apply_routed_scaling_factor_on_output: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        require_rows_at_most(len(scores), DECODE_ROWS)
        if scoring_func != "sqrtsoftplus" or topk != TOP or num_fused_shared_experts or not renormalize:
            raise ValueError(
                f"the {TOP} best of renormalised sqrtsoftplus scores and no shared expert among them, got the {topk} "
                f"best of {scoring_func}, {num_fused_shared_experts} shared, renormalize={renormalize}"
            )
        # What SGLang leaves at its default is the same in both.
        strange = sorted(name for name, value in others.items() if value not in _DEFAULTS.get(name, ()))
        if strange:
            raise ValueError(f"nothing for {', '.join(strange)}")
        factor = routed_scaling_factor if apply_routed_scaling_factor_on_output else 1.0
        ids, weights = route_experts(scores[None], bias, factor=1.0 if factor is None else factor)
        return weights, ids

    def error(self, upstream: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> float:
        return routing_error(result, upstream(*args, **kwargs))


_DEFAULTS = {
    "moe_softcapping": (0.0,),
    "num_expert_group": (0, 1, None),
    "topk_group": (0, 1, None),
    "bias_alt": (None,),
    "input_ids": (None,),
    "bias_alt_token_id": (None,),
    "num_token_non_padded": (None,),
    "renormalize_epsilon": (0.0,),
    "packed_out": (None,),
    "sqrtsoftplus_log1p": (False,),
}


class HashedExperts:
    """`hash_topk`: the caller multiplies by the routed scaling factor where it must."""

    def __init__(self, active: tuple[Hook, ...]) -> None:
        pass

    def run(
        self,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor,
        tid2eid: torch.Tensor,
        num_fused_shared_experts: int = 0,
        routed_scaling_factor: float = 1.0,
        scoring_func: str = "sqrtsoftplus",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        require_rows_at_most(len(router_logits), DECODE_ROWS)
        if scoring_func != "sqrtsoftplus" or num_fused_shared_experts:
            raise ValueError(
                f"sqrtsoftplus scores and no shared expert, got {scoring_func}, {num_fused_shared_experts}"
            )
        ids, weights = route_experts(router_logits[None], None, table=tid2eid, token_ids=input_ids, factor=1.0)
        return weights, ids

    def error(self, upstream: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> float:
        return routing_error(result, upstream(*args, **kwargs))


def routing_error(ours: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Relative error of the weights, each at its expert's place: the order of a token's experts does not count."""
    experts = int(max(side[1].max() for side in (ours, theirs))) + 1
    dense = []
    for weights, ids in (ours, theirs):
        table = torch.zeros((len(ids), experts), dtype=torch.float64, device=ids.device)
        dense.append(table.scatter_add_(1, ids.long().clamp(min=0), weights.double()))
    return relative_error(*dense)


class MoeFp4SmallBatch:
    """`Mxfp4FlashinferCutlassMoEMethod.apply` on sm_120.

    There the weights lie as FlashInfer's sm_120 kernel wants them: two values a byte as in the checkpoint, the up rows
    before the gate rows, and the scales interleaved in tiles of 128 rows and 4 columns. The op reads the same weights;
    of the scales it needs a copy in rows, 1/17 of the experts' bytes.
    """

    def __init__(self, active: tuple[Hook, ...]) -> None:
        self._combine = importlib.import_module("sglang.srt.layers.moe.token_dispatcher.standard").StandardCombineInput
        self._rows = Converted(scales_in_rows)

    def run(self, method: Any, layer: Any, dispatch_output: Any) -> Any:
        require_rows_at_most(len(dispatch_output.hidden_states), SMALL_BATCH)
        config = method.moe_runner_config
        if getattr(layer, "_dsv4_mxfp4_backend", None) != "flashinfer_cutlass_sm120":
            raise ValueError("experts that FlashInfer's sm_120 kernel takes")
        if layer.num_local_experts != layer.num_experts:
            raise ValueError("all experts on each rank")
        if method._use_swiglu_step or config.gemm1_alpha is not None or config.apply_router_weight_on_input:
            raise ValueError("DeepSeek-V4's clamped SwiGLU, weighted after the experts")
        topk = dispatch_output.topk_output
        if not hasattr(topk, "topk_ids"):
            raise ValueError("experts that are chosen already")
        out = moe_fp4_small_batch(
            dispatch_output.hidden_states,
            topk.topk_ids,
            topk.topk_weights,
            layer.w13_weight.view(torch.uint8),
            self._rows(layer.w13_weight_scale_inv),
            layer.w2_weight.view(torch.uint8),
            self._rows(layer.w2_weight_scale_inv),
            swiglu_limit=math.inf if config.swiglu_limit is None else float(config.swiglu_limit),
            up_first=True,
        )
        return self._combine(hidden_states=out)

    def error(self, upstream: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> float:
        return relative_error(result.hidden_states, upstream(*args, **kwargs).hidden_states)


def scales_in_rows(scale: torch.Tensor) -> torch.Tensor:
    """Scales as FlashInfer's `block_scale_interleave` wrote them into their own memory, back in rows.

    It puts row r, column c of an expert at [r / 128, c / 4, r % 32, r / 32 % 4, c % 4]
    (`get_sf_out_offset_128x4` in `nv_internal/tensorrt_llm/kernels/quantization_utils.cuh`).

    Args:
        scale: [experts, rows, columns] of one byte, contiguous.

    Raises:
        ValueError: rows or columns that FlashInfer would have padded.
    """
    experts, rows, columns = scale.shape
    if rows % 128 or columns % 4:
        raise ValueError(f"scales in whole tiles of 128 x 4, got {rows} x {columns}")
    tiles = scale.detach().view(torch.uint8).view(experts, rows // 128, columns // 4, 32, 4, 4)
    return tiles.permute(0, 1, 4, 3, 2, 5).reshape(experts, rows, columns)
