"""Which routes, (token, place) pairs, an expert has, and where their rows are."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_route(ids_ptr, route, routes, ROUTES: tl.constexpr):
    """The expert of a route, whether no earlier route has it, and for all routes: which have it, and their rank."""
    place = tl.arange(0, ROUTES)
    ids = tl.load(ids_ptr + place, mask=place < routes, other=-1)
    expert = tl.load(ids_ptr + route)
    same = (ids == expert) & (expert >= 0)
    first = tl.min(tl.where(same, place, ROUTES)) == route
    return expert.to(tl.int64), first, same, tl.cumsum(same.to(tl.int32)) - 1


@triton.jit
def members(same, rank, begin, ROUTES: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """[COLUMNS]: the routes of rank begin to begin + TOKENS - 1 of an expert; -1 where there is none."""
    column = tl.arange(0, COLUMNS)
    hit = same[None, :] & (rank[None, :] == (begin + column)[:, None]) & (column < TOKENS)[:, None]
    return tl.max(tl.where(hit, tl.arange(0, ROUTES)[None, :], -1), 1)


@triton.jit
def input_pointers(x, row, depth, DEPTH: tl.constexpr, FP8: tl.constexpr):
    """Pointers to rows of x [*, depth] bf16: the first of int32 pairs, or, with FP8, the first DEPTH values."""
    # What is absent reads what is there: no further lines.
    row = tl.where(row >= 0, row, tl.max(row, 0))
    if FP8:
        pointers = x.to(tl.pointer_type(tl.bfloat16)) + row[:, None] * depth + tl.arange(0, DEPTH)[None, :]
    else:
        pointers = x + row * (depth // 2)
    return pointers
