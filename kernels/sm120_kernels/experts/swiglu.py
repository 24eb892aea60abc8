"""How gate and up rows lie in a block, and what the two give."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_up_rows(tile, r, intermediate, ROWS: tl.constexpr, UP_FIRST: tl.constexpr):
    """Rows r of a block, in w13: eight gate rows, then the eight up rows that go with them, and so on.

    So one thread of the product holds a gate and its up. With UP_FIRST w13 has all up rows before the gate rows.
    """
    return tile * (ROWS // 2) + r // 16 * 8 + r % 8 + ((r // 8 + UP_FIRST) % 2) * intermediate


@triton.jit
def swiglu(gate_up, limit, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """[ROWS / 2, TOKENS] activations of a block in the row order of gate_up_rows."""
    pairs = gate_up.reshape(ROWS // 16, 2, 8, TOKENS).permute(0, 2, 3, 1)
    gate, up = tl.split(pairs)
    return gated(gate, up, limit).reshape(ROWS // 2, TOKENS)


@triton.jit
def gated(gate, up, limit):
    """silu(gate) up, both clamped."""
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return gate / (1.0 + tl.exp(-gate)) * up
