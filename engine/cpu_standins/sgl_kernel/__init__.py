"""Stand-in for `sgl_kernel`, whose CUDA library cannot be loaded without a driver and which has no CPU wheel.

SGLang's CPU path calls one function of it. Any other name can be imported, because SGLang imports many at module level,
and raises when called. `torch.ops.sgl_kernel` stays empty, so SGLang takes its plain PyTorch layers.
"""

from collections.abc import Callable
from typing import NoReturn

import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new KV slots into its row of the request → token table.

    Args:
        req_pool_indices: Row of each request, integer [requests].
        req_to_token: Table of KV slots, int32 [pool, pool_len]; changed in place.
        start_offset: First column of each request, integer [requests].
        end_offset: Column after the last of each request, integer [requests].
        out_cache_loc: The new slots of all requests one after another, integer [sum(end - start)].
        pool_len: Columns of the table; the tensor knows it.
    """
    del pool_len
    slots = out_cache_loc.to(req_to_token.dtype)
    position = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = slots[position : position + end - start]
        position += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} exists on CUDA only")

    return missing
