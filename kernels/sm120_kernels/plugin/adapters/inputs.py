"""What attention reads: normed and turned queries, and the tokens' keys in the caches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from sm120_kernels import kv_layout
from sm120_kernels.ops.bf16_linear_partials import bf16_linear_partials
from sm120_kernels.ops.indexer_logits import PAGE_BYTES
from sm120_kernels.ops.prepare_queries import prepare_queries
from sm120_kernels.ops.store_attention_inputs import Compressor, store_attention_inputs
from sm120_kernels.plugin.adapters.base import (
    DECODE_ROWS,
    SMALL_BATCH,
    capturing,
    relative_error,
    require_rows_at_most,
    rope_table,
)
from sm120_kernels.plugin.table import Hook
from sm120_kernels.reference.indexer_logits import unpack_cache
from sm120_kernels.reference.sparse_mla_decode import unpack_tokens


class PrepareQueries:
    """`MQALayer._compute_q_b`: the query projection, then norm and RoPE in its own memory."""

    def __init__(self, active: tuple[Hook, ...]) -> None:
        pass

    def run(self, layer: Any, q: Any, positions: torch.Tensor, q_out: torch.Tensor | None = None) -> torch.Tensor:
        if q_out is not None:
            raise ValueError("queries of this rank's own heads, not a buffer of more")
        if layer.use_mega_attention or not layer.q_head_norm:
            raise ValueError("query heads with a norm")
        require_rows_at_most(len(positions), DECODE_ROWS)
        projected, _ = layer.wq_b(q)
        table = rope_table(layer.freqs_cis)
        return prepare_queries(projected, layer.n_local_heads, table, positions, eps=layer.eps)[0]

    def error(self, upstream: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> float:
        return relative_error(result, upstream(*args, **kwargs))


# The batch whose keys a compressor has stored ahead of its turn.
_stored: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class StoreAttentionInputs:
    """`MQALayer._compute_kv_to_cache`, and with it the layer's compressors where they are decoding.

    SGLang runs them later in the same layer, on the same input: `StoredByInputs` leaves them out then. Where they run
    on streams of their own (the default under graph capture) SGLang has begun one before, so they stay with it.
    """

    def __init__(self, active: tuple[Hook, ...]) -> None:
        self._context = importlib.import_module("sglang.srt.model_executor.forward_context")
        self._runner = importlib.import_module("sglang.srt.model_executor.runner")
        self._envs = importlib.import_module("sglang.srt.environ").envs
        self._projections: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()

    def run(
        self,
        layer: Any,
        x: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        attn_backend: Any,
        qkv_a: torch.Tensor | None = None,
        q_rope: torch.Tensor | None = None,
    ) -> None:
        require_rows_at_most(len(positions), DECODE_ROWS)
        if qkv_a is None or q_rope is not None or not isinstance(x, torch.Tensor):
            raise ValueError("queries and keys of one projection")
        if self._envs.SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE.get():
            raise ValueError("keys that are not rounded to bf16 (SGLANG_DSV4_USE_BF16_KV_QUANT_SOURCE)")
        pool = self._context.get_token_to_kv_pool()
        if pool.uniform_fp8 or pool.request_window is not None or pool.kv_layout.value != "v4":
            raise ValueError("a paged window of DeepSeek-V4's layout")
        kv = qkv_a[..., layer.q_lora_rank :]
        compressors = self._compressors(layer, x, forward_batch, attn_backend, pool)
        projected = None
        if compressors:
            projected = bf16_linear_partials(x, self._projection(layer))
        store_attention_inputs(
            kv,
            layer.kv_norm.weight.data,
            rope_table(layer.freqs_cis),
            positions,
            paged(pool.get_swa_raw_buffer(layer.layer_id)),
            attn_backend.get_swa_out_cache_loc(forward_batch),
            projected=projected,
            compressor=compressors[0] if compressors else None,
            index_compressor=compressors[1] if len(compressors) > 1 else None,
            eps=layer.eps,
        )
        for module in _modules(layer)[: len(compressors)]:
            _stored[module] = forward_batch

    def error(self, upstream: Callable[..., Any], result: Any, layer: Any, *args: Any, **kwargs: Any) -> float:
        forward_batch, backend = _argument(args, kwargs, 2, "forward_batch"), _argument(args, kwargs, 3, "attn_backend")
        pool = self._context.get_token_to_kv_pool()
        cache = paged(pool.get_swa_raw_buffer(layer.layer_id))
        slots = backend.get_swa_out_cache_loc(forward_batch)
        ours = unpack_tokens(cache, slots.clamp(min=0))
        upstream(layer, *args, **kwargs)
        return relative_error(ours, unpack_tokens(cache, slots.clamp(min=0)))

    def _compressors(self, layer: Any, x: Any, forward_batch: Any, backend: Any, pool: Any) -> list[Compressor]:
        """What of the layer's compressors can go with the window's key: none, or all."""
        modules = _modules(layer)
        overlapped = layer.alt_streams is not None and self._runner.get_is_capture_mode()
        if not modules or overlapped or not forward_batch.forward_mode.is_decode() or len(x) > SMALL_BATCH:
            return []
        found: list[Compressor] = []
        for module in modules:
            plan = backend._get_paged_compress_metadata(module.ratio)
            state = module.get_state_pool(backend).kv_score_buffer.kv_score
            weight = getattr(module.wkv_gate, "weight", None)
            online = module.ratio == 128 and self._envs.SGLANG_OPT_USE_ONLINE_COMPRESS.get()
            if not plan.is_decode or online or state.dtype != torch.float32 or weight is None:
                return []
            if weight.dtype != torch.bfloat16 or backend.online_c128_mtp.enabled():
                return []
            if module.is_in_indexer:
                if backend.enable_deepseek_v4_fp4_indexer:
                    return []
                cache = pool.get_index_k_with_scale_buffer(layer.layer_id).view(torch.uint8)
            else:
                compressed = pool.layer_mapping[layer.layer_id][2]
                if compressed.kv_layout.value != "v4" or hasattr(compressed, "translate_loc_to_hisparse_device"):
                    return []
                cache = paged(pool.get_extra_key_buffer(layer.layer_id).view(torch.uint8))
            found.append(
                Compressor(
                    ratio=module.ratio,
                    first_column=sum(one.columns for one in found),
                    ape=module.ape.data.view(-1, module.head_dim),
                    norm_weight=module.norm.weight.data,
                    state=state.view(-1, state.shape[-1]),
                    plan=plan[1].view(torch.int32),
                    cache=cache,
                    slots=backend._get_out_loc(module.ratio),
                )
            )
        return found

    def _projection(self, layer: Any) -> torch.Tensor:
        """The compressors' weights below each other; each then keeps its own as a part of it, so none is held twice."""
        if layer not in self._projections:
            if capturing():
                raise ValueError("weights are put together at their first use, which must come before graph capture")
            weights = [module.wkv_gate.weight for module in _modules(layer)]
            # SGLang computes in inference mode, whose tensors cannot become a parameter's.
            with torch.inference_mode(False), torch.no_grad():
                together = torch.cat([weight.data for weight in weights])
                for weight, part in zip(weights, together.split([len(weight) for weight in weights]), strict=True):
                    weight.data = part
            self._projections[layer] = together
        return self._projections[layer]


class StoredByInputs:
    """`forward_core_compressor` and `forward_indexer_compressor`: nothing is left to do for them."""

    def __init__(self, active: tuple[Hook, ...]) -> None:
        pass

    def run(self, backend: Any, x: torch.Tensor, forward_batch: Any, layer_id: int, compressor: Any) -> None:
        if _stored.pop(compressor, None) is not forward_batch:
            raise ValueError("keys that were not stored with the window's")

    def error(
        self,
        upstream: Callable[..., Any],
        result: Any,
        backend: Any,
        x: torch.Tensor,
        forward_batch: Any,
        layer_id: int,
        compressor: Any,
    ) -> float:
        pool, ratio = backend.token_to_kv_pool, compressor.ratio
        plan = backend._get_paged_compress_metadata(ratio)[1].view(torch.int32)
        state = compressor.get_state_pool(backend).kv_score_buffer.kv_score
        state = state.view(-1, state.shape[-1])
        ending = plan[:, 0] % ratio == 0
        slots = backend._get_out_loc(ratio)[: len(plan)][ending]

        def written() -> torch.Tensor:
            if not compressor.is_in_indexer:
                cache = paged(pool.get_extra_key_buffer(layer_id).view(torch.uint8))
                return unpack_tokens(cache, slots)
            cache = pool.get_index_k_with_scale_buffer(layer_id).view(torch.uint8)
            keys, scales = unpack_cache(cache.reshape(len(cache), PAGE_BYTES)[slots // 64])
            row = torch.arange(len(slots), device=slots.device)
            return keys[row, slots % 64] * scales[row, slots % 64, None]

        ours, rows = written(), state[plan[:, 1].long()].clone()
        upstream(backend, x=x, forward_batch=forward_batch, layer_id=layer_id, compressor=compressor)
        projections = relative_error(rows, state[plan[:, 1].long()])
        return max(projections, relative_error(ours, written()) if len(slots) else 0.0)


def _modules(layer: Any) -> list[Any]:
    """The layer's compressors, in the order of `store_attention_inputs`."""
    own, indexer = layer.compressor, layer.indexer
    if own is None or layer.compress_ratio not in (4, 128):
        return []
    return [own] if indexer is None else [own, indexer.compressor]


def paged(raw: torch.Tensor) -> torch.Tensor:
    """A pool's buffer [pages, bytes] as the ops take it: [pages, tokens a page, 1, 584].

    Raises:
        ValueError: no page of these bytes.
    """
    sizes = {kv_layout.page_bytes(size): size for size in kv_layout.PAGE_SIZES}
    if raw.ndim != 2 or raw.shape[1] not in sizes or raw.stride() != (raw.shape[1], 1):
        raise ValueError(f"pages of {sorted(sizes)} bytes, got {list(raw.shape)}")
    token = kv_layout.TOKEN_BYTES
    return raw.view(torch.uint8).as_strided(
        (len(raw), sizes[raw.shape[1]], 1, token), (raw.shape[1], token, token, 1), raw.storage_offset()
    )


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if place < len(args) else kwargs[name]
