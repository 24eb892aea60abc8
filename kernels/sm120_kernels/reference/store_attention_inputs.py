"""What a token adds to a layer's caches, in float64; and the caches' contents read back."""

from __future__ import annotations

import torch

from sm120_kernels import kv_layout
from sm120_kernels.ops.indexer_logits import PAGE_TOKENS
from sm120_kernels.ops.store_attention_inputs import Compressor
from sm120_kernels.reference import indexer_logits
from sm120_kernels.reference.rotation import hadamard, rotate
from sm120_kernels.reference.sparse_mla_decode import unpack_tokens


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMSNorm of x [..., dim] in float64."""
    return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps) * weight.double()


def quantise(key: torch.Tensor, pooled: bool = False) -> torch.Tensor:
    """Keys [..., 512] as a cache holds them: 448 values in e4m3 with power-of-two scales, 64 in bf16.

    A pooled key is rounded to bf16 first.
    """
    key = key.to(torch.bfloat16).double() if pooled else key
    groups = key[..., : kv_layout.NOPE_DIM].unflatten(-1, (-1, kv_layout.SCALE_GROUP))
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)))
    nope = (groups / scale).float().to(torch.float8_e4m3fn).double() * scale
    return torch.cat([nope.flatten(-2), key[..., kv_layout.NOPE_DIM :].to(torch.bfloat16).double()], -1)


def quantise_index(key: torch.Tensor) -> torch.Tensor:
    """Keys [..., 128] as the indexer's cache holds them: e4m3 with one scale."""
    scale = key.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    return (key / scale).float().to(torch.float8_e4m3fn).double() * scale


def window_key(
    kv: torch.Tensor, norm_weight: torch.Tensor, rope: torch.Tensor, positions: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """The window keys [tokens, 512], not quantised."""
    return rotate(norm(kv, norm_weight, eps), positions, rope)


def pooled_key(
    one: Compressor, projected: torch.Tensor, rope: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pooled keys [n, dim], not quantised, of the tokens that end a group, and those tokens' numbers.

    Args:
        one: the compressor, its state as before the call.
        projected: [tokens, columns], the shares added up.
        rope: [positions, 64].
        eps: of the norm.
    """
    dim = one.ape.shape[1]
    own = projected.double()[:, one.first_column : one.first_column + one.columns]
    lengths = one.plan[:, 0].tolist()
    ending = [token for token, length in enumerate(lengths) if length % one.ratio == 0]
    keys = []
    for token in ending:
        _, write, page_0, page_1 = one.plan[token].tolist()
        state = one.state.double().clone()
        state[write] = own[token]
        groups = state.view(-1, one.ratio, one.columns)
        if one.ratio == 4:
            before, current = groups[page_0], groups[page_1]
            value = torch.cat([before[:, :dim], current[:, dim : 2 * dim]])
            score = torch.cat([before[:, 2 * dim : 3 * dim], current[:, 3 * dim :]])
            if lengths[token] == 4:
                score[:4] = -torch.inf
        else:
            value, score = groups[page_1][:, :dim], groups[page_1][:, dim:]
        keys.append((torch.softmax(score + one.ape.double(), 0) * value).sum(0))
    if not keys:
        return projected.new_zeros((0, dim), dtype=torch.float64), torch.tensor([], dtype=torch.long)
    first = torch.tensor([lengths[token] - one.ratio for token in ending], device=rope.device)
    key = rotate(norm(torch.stack(keys), one.norm_weight, eps), first, rope)
    return hadamard(key) if dim == 128 else key, torch.tensor(ending)


def read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Keys [n, 512] or [n, 128] that a cache holds in `slots` [n]."""
    if cache.ndim == 4:
        return unpack_tokens(cache, slots)
    keys, scales = indexer_logits.unpack_cache(cache)
    page, place = slots.long() // PAGE_TOKENS, slots.long() % PAGE_TOKENS
    return keys[page, place] * scales[page, place, None]
