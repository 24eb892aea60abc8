"""The boundary between two blocks with hyper-connections, in float64."""

from __future__ import annotations

import torch

from sm120_kernels.ops.mhc_post_pre_norm import HIDDEN, MIXES, STREAMS, Boundary


def random_arguments(tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Arguments of `ops.mhc_post_pre_norm` on the generator's device, with mixing values of order 1."""
    device = generator.device

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    return {
        "y": normal(tokens, HIDDEN).to(torch.bfloat16),
        "residual": normal(tokens, STREAMS, HIDDEN).to(torch.bfloat16),
        "post": normal(tokens, STREAMS).sigmoid() * 2,
        "comb": normal(tokens, STREAMS, STREAMS).softmax(-1),
        "fn": (normal(MIXES, STREAMS * HIDDEN) / (STREAMS * HIDDEN) ** 0.5).to(torch.bfloat16),
        "scale": normal(3) * 0.5 + 1,
        "base": normal(MIXES),
        "norm_weight": (normal(HIDDEN) * 0.2 + 1).to(torch.bfloat16),
    }


def mhc_post_pre_norm(
    y: torch.Tensor,
    residual: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_weight: torch.Tensor,
    *,
    iterations: int = 20,
    rms_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> Boundary:
    """As `ops.mhc_post_pre_norm` defines it, float64 and without its rounding of the streams."""
    streams = post.double()[..., None] * y.double()[:, None, :]
    streams = streams + torch.einsum("tji,tjh->tih", comb.double(), residual.double())
    flat = streams.flatten(1)
    mixes = flat @ fn.double().T * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    scale, base = scale.double(), base.double()
    pre = torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + hc_eps
    new_post = 2 * torch.sigmoid(mixes[:, 4:8] * scale[1] + base[4:8])
    matrix = (mixes[:, 8:] * scale[2] + base[8:]).view(-1, STREAMS, STREAMS).softmax(-1) + hc_eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + hc_eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + hc_eps)
    x = torch.einsum("ti,tih->th", pre, streams)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps) * norm_weight.double()
    return Boundary(streams, new_post, matrix, x)
