"""Sparse MLA decode in float64."""

from __future__ import annotations

import torch

from sm120_kernels import kv_layout


def unpack_tokens(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The 512 values of the tokens in `slots` (any shape, each >= 0), float64.

    Args:
        cache: uint8 or float8_e4m3fn [pages, page_size, 1, 584], the first stride being the page's bytes.
        slots: token slots, page * page_size + place in the page.
    """
    page_size, page_bytes = cache.shape[1], kv_layout.page_bytes(cache.shape[1])
    pages = cache.view(torch.uint8).as_strided((cache.shape[0], page_bytes), (page_bytes, 1))
    page, place = slots.long()[..., None] // page_size, slots.long()[..., None] % page_size

    def read(first: torch.Tensor, count: int) -> torch.Tensor:
        return pages[page, first + torch.arange(count, device=cache.device)]

    data = read(place * kv_layout.DATA_BYTES, kv_layout.DATA_BYTES)
    scales = read(kv_layout.scale_offset(page_size) + place * kv_layout.SCALE_BYTES, kv_layout.SCALES_PER_TOKEN)
    nope = data[..., : kv_layout.NOPE_DIM].contiguous().view(torch.float8_e4m3fn).double()
    nope = (
        nope.unflatten(-1, (-1, kv_layout.SCALE_GROUP)) * torch.exp2(scales.double() - kv_layout.SCALE_BIAS)[..., None]
    )
    rope = data[..., kv_layout.NOPE_DIM :].contiguous().view(torch.bfloat16).double()
    return torch.cat([nope.flatten(-2), rope], dim=-1)


def random_cache(slots: int, page_size: int, generator: torch.Generator) -> torch.Tensor:
    """A cache of at least `slots` random tokens on the generator's device, as uint8 [pages, page_size, 1, 584].

    Values are of order 1; the scales of a token's groups differ. Bytes that belong to no token are NaN patterns.
    """
    device = generator.device
    pages, page_bytes = -(-slots // page_size), kv_layout.page_bytes(page_size)
    shape = (pages, page_size)
    raw = torch.full((pages, page_bytes), 255, dtype=torch.uint8, device=device)
    data = raw[:, : kv_layout.scale_offset(page_size)].view(*shape, kv_layout.DATA_BYTES)
    nope = torch.randn(*shape, kv_layout.NOPE_DIM, generator=generator, device=device) * 64
    data[..., : kv_layout.NOPE_DIM] = nope.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    rope = torch.randn(*shape, kv_layout.ROPE_DIM, generator=generator, device=device).to(torch.bfloat16)
    data[..., kv_layout.NOPE_DIM :] = rope.view(torch.uint8)
    scales = torch.randint(118, 124, (*shape, kv_layout.SCALES_PER_TOKEN), generator=generator, device=device)
    first = kv_layout.scale_offset(page_size)
    rows = raw[:, first : first + page_size * kv_layout.SCALE_BYTES].view(*shape, kv_layout.SCALE_BYTES)
    rows[..., : kv_layout.SCALES_PER_TOKEN] = scales.to(torch.uint8)
    view = (page_bytes, kv_layout.TOKEN_BYTES, kv_layout.TOKEN_BYTES, 1)
    return raw.as_strided((pages, page_size, 1, kv_layout.TOKEN_BYTES), view)


def sparse_mla_decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor | None = None,
    *,
    extra_cache: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_lengths: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse as `ops.sparse_mla_decode` defines them, float64."""
    batch, heads, dim = q.shape
    out = torch.zeros((batch, heads, dim), dtype=torch.float64, device=q.device)
    lse = torch.full((batch, heads), -torch.inf, dtype=torch.float64, device=q.device)
    for row in range(batch):
        tokens = []
        for pages, slots, counts in ((cache, indices, lengths), (extra_cache, extra_indices, extra_lengths)):
            if pages is not None and slots is not None:
                listed = slots[row] if counts is None else slots[row, : max(int(counts[row]), 0)]
                tokens.append(unpack_tokens(pages, listed[listed >= 0]))
        values = torch.cat(tokens)
        if len(values) == 0:
            continue
        scores = q[row].double() @ values.T * (dim**-0.5 if scale is None else scale)
        lse[row] = scores.logsumexp(dim=-1)
        denominator = lse[row] if sink is None else torch.logaddexp(lse[row], sink.double())
        out[row] = torch.exp(scores - denominator[:, None]) @ values
    return out, lse
