"""The indexer's scores in float64."""

from __future__ import annotations

import torch

from sm120_kernels.ops.indexer_logits import HEAD_DIM, PAGE_BYTES, PAGE_TOKENS


def random_cache(pages: int, generator: torch.Generator) -> torch.Tensor:
    """A cache [pages, 8448] uint8: normally distributed keys, scales 0.1 to 1.1; on the generator's device."""
    device = generator.device
    cache = torch.empty(pages, PAGE_BYTES, dtype=torch.uint8, device=device)
    split = PAGE_TOKENS * HEAD_DIM
    for part in cache.split(65536):
        keys = torch.randn(len(part), split, generator=generator, device=device)
        part[:, :split] = keys.to(torch.float8_e4m3fn).view(torch.uint8)
        part[:, split:] = (torch.rand(len(part), PAGE_TOKENS, generator=generator, device=device) + 0.1).view(
            torch.uint8
        )
    return cache


def unpack_cache(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [pages, 64, 128] and their scales [pages, 64] of every page, float64.

    Args:
        cache: [pages, ...] uint8 or float8_e4m3fn, 8448 bytes a page: 64 x 128 e4m3, then 64 float32 scales.
    """
    pages = cache.reshape(cache.shape[0], PAGE_BYTES).view(torch.uint8)
    keys = pages[:, : PAGE_TOKENS * HEAD_DIM].contiguous().view(torch.float8_e4m3fn)
    scales = pages[:, PAGE_TOKENS * HEAD_DIM :].contiguous().view(torch.float32)
    return keys.double().view(-1, PAGE_TOKENS, HEAD_DIM), scales.double()


def indexer_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    width: int,
    skip_length: int = 0,
) -> torch.Tensor:
    """Logits as `ops.indexer_logits` defines them, float64 [rows, width], NaN where it writes nothing."""
    requests, rows_per_request = q.shape[:2]
    logits = torch.full((requests * rows_per_request, width), torch.nan, dtype=torch.float64, device=q.device)
    for row, length in enumerate(lengths.tolist()):
        if length <= skip_length:
            continue
        request = row // rows_per_request
        used = page_table[request, : -(-length // PAGE_TOKENS)].long()
        keys, scales = unpack_cache(cache[used])
        products = keys.view(-1, HEAD_DIM)[:length] @ q[request, row % rows_per_request].double().T
        logits[row, :length] = products.clamp(min=0) @ weights[row].double() * scales.flatten()[:length]
    return logits
