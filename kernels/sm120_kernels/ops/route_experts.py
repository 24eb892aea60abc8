"""From the router's logits to each token's experts and their weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from sm120_kernels import serving
from sm120_kernels.aot import CompileCase
from sm120_kernels.checks import has_dependent_launch, require, require_device, require_index

EXPERTS = 256
TOP = 6
PLACES = 8
LEAST_SUM = tl.constexpr(1e-20)
TAKEN = tl.constexpr(-(2**31))


@triton.jit
def _scores(partial_ptr, place, mask, tokens, EXPERTS: tl.constexpr, SPLITS: tl.constexpr):
    """sqrt(softplus(logit)) of the logits at `place` in each share."""
    logit = tl.load(partial_ptr + place, mask=mask, other=0.0)
    for split in tl.static_range(1, SPLITS):
        logit += tl.load(partial_ptr + split * tokens * EXPERTS + place, mask=mask, other=0.0)
    z = tl.exp(-tl.abs(logit))
    u = 1.0 + z
    # log(1 + z), right for small z too.
    log1p = tl.where(u == 1.0, z, z * tl.log(u) / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.sqrt(tl.maximum(logit, 0.0) + log1p)


@triton.jit
def _route_experts_kernel(
    partial_ptr,
    bias_ptr,
    table_ptr,
    token_ids_ptr,
    ids_ptr,
    weights_ptr,
    tokens,
    factor,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    PLACES: tl.constexpr,
    SPLITS: tl.constexpr,
    HASHED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token a program."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    place = tl.arange(0, PLACES)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if HASHED:
        row = tl.load(token_ids_ptr + token).to(tl.int64) * TOP
        ids = tl.load(table_ptr + row + place, mask=place < TOP, other=0)
        weights = _scores(partial_ptr, token * EXPERTS + ids, place < TOP, tokens, EXPERTS, SPLITS)
        weights = tl.where(place < TOP, weights, 0.0)
    else:
        scores = _scores(partial_ptr, token * EXPERTS + expert, expert < EXPERTS, tokens, EXPERTS, SPLITS)
        choice = scores + tl.load(bias_ptr + expert)
        bits = choice.to(tl.int32, bitcast=True)
        # In the order of the scores; a warp finds the largest int32 in one instruction.
        keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        score_bits = scores.to(tl.int32, bitcast=True)
        ids = tl.zeros([PLACES], tl.int32)
        weights = tl.zeros([PLACES], tl.int32)
        for rank in tl.static_range(TOP):
            best = tl.max(keys)
            # The lower expert among equals.
            chosen = tl.min(tl.where(keys == best, expert, EXPERTS))
            weight = tl.max(tl.where(expert == chosen, score_bits, 0))
            ids = tl.where(place == rank, chosen, ids)
            weights = tl.where(place == rank, weight, weights)
            keys = tl.where(expert == chosen, TAKEN, keys)
        weights = weights.to(tl.float32, bitcast=True)
    weights = weights * (factor / (tl.sum(weights) + LEAST_SUM))
    tl.store(ids_ptr + token * TOP + place, ids, mask=place < TOP)
    tl.store(weights_ptr + token * TOP + place, weights, mask=place < TOP)


def route_experts(
    projected: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    table: torch.Tensor | None = None,
    token_ids: torch.Tensor | None = None,
    factor: float = 1.5,
    ids: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's six experts and their weights.

    One launch. With score = sqrt(softplus(logit)): the six experts of largest score + bias, or, in a hash-routed layer,
    the six the table has for the token's id; weights = factor x score / (sum of the six scores + 1e-20).

    Args:
        projected: [splits, tokens, 256] float32 from `bf16_linear_partials`, contiguous: logits are their sum.
        bias: [256] float32, for the choice only; None with a table.
        table: [vocabulary, 6] int32, contiguous: experts of each token id.
        token_ids: [tokens] int32 or int64, with a table.
        factor: the routed scaling factor.
        ids: [tokens, 6] int32, contiguous; allocated when None.
        weights: [tokens, 6] float32, contiguous; allocated when None.

    Returns:
        ids, largest score + bias first (the lower expert first among equals), and weights.

    Raises:
        ValueError: a wrong dtype, shape, stride or device; neither or both of bias and table.

    Source of the semantics: SGLang 0.5.23, `srt/layers/moe/topk.py` (`biased_topk_impl`, sqrtsoftplus) and
    `kernels/jit/csrc/deepseek_v4/hash_topk.cuh`.
    """
    if projected.ndim != 3:
        raise ValueError(f"projected must have 3 dimensions, got {list(projected.shape)}")
    splits, tokens, _ = projected.shape
    require(projected, "projected", torch.float32, (splits, tokens, EXPERTS))
    if (bias is None) == (table is None) or (table is None) != (token_ids is None):
        raise ValueError("give either bias, or table and token_ids")
    if bias is not None:
        require(bias, "bias", torch.float32, (EXPERTS,))
    if table is not None and token_ids is not None:
        require(table, "table", torch.int32, (table.shape[0], TOP))
        require_index(token_ids, "token_ids", (tokens,))
    if ids is None:
        ids = torch.empty((tokens, TOP), dtype=torch.int32, device=projected.device)
    if weights is None:
        weights = torch.empty((tokens, TOP), dtype=torch.float32, device=projected.device)
    require(ids, "ids", torch.int32, (tokens, TOP))
    require(weights, "weights", torch.float32, (tokens, TOP))
    require_device(projected.device, bias=bias, table=table, token_ids=token_ids, ids=ids, weights=weights)
    if tokens == 0:
        return ids, weights
    pdl = has_dependent_launch(projected.device)
    _route_experts_kernel[(tokens,)](
        projected,
        projected if bias is None else bias,
        ids if table is None else table,
        ids if token_ids is None else token_ids,
        ids,
        weights,
        tokens,
        factor,
        EXPERTS=EXPERTS,
        TOP=TOP,
        PLACES=PLACES,
        SPLITS=splits,
        HASHED=table is not None,
        PDL=pdl,
        num_warps=1,
        **({"launch_pdl": True} if pdl else {}),
    )
    return ids, weights


def serving_calls() -> Iterator[Callable[[], object]]:
    """By score and by table; SGLang has added the gate's shares up."""
    for tokens in serving.BATCHES:
        projected = torch.zeros(1, tokens, EXPERTS)
        token_ids = torch.zeros(tokens, dtype=torch.int64)
        table = torch.zeros(16, TOP, dtype=torch.int32)
        yield functools.partial(route_experts, projected, torch.zeros(EXPERTS))
        yield functools.partial(route_experts, projected, None, table=table, token_ids=token_ids)


def compile_cases() -> Iterator[CompileCase]:
    """By score and by table, with few and many shares."""
    for splits, hashed in ((1, False), (8, False), (8, True)):
        yield CompileCase(
            op="route_experts",
            shape=f"{splits} shares, {'table' if hashed else 'scores'}",
            kernel=_route_experts_kernel,
            arguments={
                **dict.fromkeys(("partial_ptr", "bias_ptr", "weights_ptr"), "*fp32:16"),
                **dict.fromkeys(("table_ptr", "ids_ptr"), "*i32:16"),
                # Without a table the ids stand in for them.
                "token_ids_ptr": "*i64:16" if hashed else "*i32:16",
                "tokens": "i32",
                "factor": "fp32",
            },
            constexprs={
                "EXPERTS": EXPERTS,
                "TOP": TOP,
                "PLACES": PLACES,
                "SPLITS": splits,
                "HASHED": hashed,
                "PDL": True,
            },
            num_warps=1,
            options={"launch_pdl": True},
        )
