"""Linear layers: FP8 with 128 x 128 scales, bf16 with an fp32 result, and the attention's grouped output projection."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from sm120_kernels.ops.bf16_linear_partials import bf16_linear_partials
from sm120_kernels.ops.fp8_block_linear import BLOCK, fp8_block_linear
from sm120_kernels.ops.inv_rope_wo_a import inv_rope_wo_a
from sm120_kernels.plugin.adapters.base import (
    SMALL_BATCH,
    Converted,
    relative_error,
    require_rows_at_most,
    rope_table,
)
from sm120_kernels.plugin.table import Hook


class CutlassFp8Linear:
    """`cutlass_w8a8_block_fp8_linear_with_fallback`: weights as loaded, fp32 scales of both operands."""

    def __init__(self, active: tuple[Hook, ...]) -> None:
        pass

    def run(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        block_size: list[int],
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return _fp8_linear(input, weight, block_size, weight_scale, input_scale, bias, ue8m0=False)

    def error(self, upstream: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> float:
        return relative_error(result, upstream(*args, **kwargs))


class UnpackedScales:
    """Scales that DeepGEMM keeps as four powers of two a word, one word a row, as float32 of 128 x 128 values."""

    def __init__(self) -> None:
        self._unpack = importlib.import_module(
            "sglang.srt.layers.quantization.fp8_utils"
        )._unpack_ue8m0_scale_for_triton
        self._kept: dict[tuple[int, int], Converted] = {}

    def __call__(self, packed: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """[rows / 128, columns / 128] of [rows, columns / 512] int32 of any strides; groups in front stay."""

        def convert(words: torch.Tensor) -> torch.Tensor:
            groups = words.detach() if words.ndim == 3 else words.detach()[None]
            scales = torch.stack([self._unpack(group, (rows, columns), [BLOCK, BLOCK]) for group in groups])
            return scales if words.ndim == 3 else scales[0]

        return self._kept.setdefault((rows, columns), Converted(convert))(packed)


class DeepGemmFp8Linear:
    """`deepgemm_w8a8_block_fp8_linear_with_fallback`: scales may be powers of two, and packed for DeepGEMM."""

    def __init__(self, active: tuple[Hook, ...]) -> None:
        self._configurer = importlib.import_module("sglang.srt.layers.deep_gemm_wrapper.configurer")
        self._platform = importlib.import_module("sglang.srt.runtime_context").get_platform
        self._scales = UnpackedScales()

    def run(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        block_size: list[int],
        weight_scale: torch.Tensor,
        input_scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        act_scale_ue8m0: bool = False,
        weight_bf16: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if weight_scale.dtype == torch.int32:
            weight_scale = self._scales(weight_scale, *weight.shape)
        ue8m0 = self._configurer.DEEPGEMM_SCALE_UE8M0 or (act_scale_ue8m0 and self._platform().is_sm90)
        return _fp8_linear(input, weight, block_size, weight_scale, input_scale, bias, ue8m0)

    def error(self, upstream: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> float:
        return relative_error(result, upstream(*args, **kwargs))


def _fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    ue8m0: bool,
) -> torch.Tensor:
    if list(block_size) != [BLOCK, BLOCK]:
        raise ValueError(f"scales of {BLOCK} x {BLOCK} weights, got {list(block_size)}")
    if input_scale is not None:
        raise ValueError("an input that is not quantised yet")
    if bias is not None:
        raise ValueError("no bias")
    rows = x.reshape(-1, x.shape[-1]) if x.ndim != 2 else x
    require_rows_at_most(len(rows), SMALL_BATCH)
    return fp8_block_linear(rows, weight, weight_scale, ue8m0=ue8m0).view(*x.shape[:-1], weight.shape[0])


class Bf16Linear:
    """`linear_bf16_fp32`: the compressors' projections and the router. The shares are added up in a second launch."""

    def __init__(self, active: tuple[Hook, ...]) -> None:
        pass

    def run(self, x: torch.Tensor, y: torch.Tensor, *, hpc_kernel_min_m: int | None = None) -> torch.Tensor:
        require_rows_at_most(len(x), SMALL_BATCH)
        partials = bf16_linear_partials(x, y)
        return partials[0] if len(partials) == 1 else partials.sum(0)

    def error(self, upstream: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> float:
        return relative_error(result, upstream(*args, **kwargs))


class InvRopeWoA:
    """`fused_inverse_rope_wo_a`, a seam of `patches/wo-a-seam.patch`: None means that SGLang's own steps follow."""

    def __init__(self, active: tuple[Hook, ...]) -> None:
        self._model = importlib.import_module("sglang.srt.models.deepseek_v4")
        self._scales = UnpackedScales()

    def run(self, layer: Any, o: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        require_rows_at_most(len(o), SMALL_BATCH)
        weight = layer.wo_a.weight
        groups, columns, depth = layer.n_local_groups, layer.o_lora_rank, weight.shape[1]
        scale = layer.wo_a.weight_scale_inv
        if scale.dtype == torch.int32:
            scale = self._scales(scale, columns, depth)
        return inv_rope_wo_a(
            o,
            positions,
            rope_table(layer.freqs_cis),
            weight.view(groups, columns, depth),
            scale,
            ue8m0=self._model._FP8_WO_A_UE8M0,
        )

    def error(self, upstream: Callable[..., Any], result: Any, layer: Any, o: torch.Tensor, positions: Any) -> float:
        """SGLang's own steps are lines of `MQALayer.forward`, not a function: called here in their order."""
        model, (rows, _, _) = self._model, o.shape
        turned = o.clone()
        model.fused_rope_inplace(
            turned[..., -layer.qk_rope_head_dim :], None, layer.freqs_cis, positions=positions, inverse=True
        )
        groups, columns = layer.n_local_groups, layer.o_lora_rank
        grouped = turned.view(rows, groups, -1)
        if model._FP8_WO_A_UE8M0:
            values, scales = model.sglang_per_token_group_quant_fp8_dsv4_wo_a(grouped)
            recipe = (1, 1, BLOCK)
        else:
            values, scales = model.sglang_per_token_group_quant_fp8(
                grouped.reshape(rows * groups, -1).contiguous(), group_size=BLOCK, scale_ue8m0=False
            )
            values, scales = values.view(rows, groups, -1), scales.view(rows, groups, -1)
            recipe = (1, BLOCK, BLOCK)
        theirs = model._fp8_wo_a_einsum(
            values,
            scales,
            layer.wo_a.weight.view(groups, columns, -1),
            layer.wo_a.weight_scale_inv.data,
            recipe=recipe,
        )
        return relative_error(result, theirs.flatten(1))
