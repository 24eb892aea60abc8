"""What of W and x is asked for, and where in the ring it waits (`fragments`).

In the ring, 64 bytes of each row of W are a part, with the columns of x that go with them. Between parts is a gap, so
that two parts of a row lie in different banks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sm120_kernels.fragments import ask


@triton.jit
def ask_rows(rows, slots, ROWS: tl.constexpr, PARTS: tl.constexpr, NEXT: tl.constexpr, PAIR: tl.constexpr):
    """Ask for PARTS parts of each of ROWS rows: neighbouring threads for one row.

    Eight rows at a time, whose pointers differ from the first eight's by a constant, so that they take no registers.

    Args:
        rows: int32 pointers [8] to the first eight rows.
        NEXT, PAIR: words from them to the second eight, and to the third.
    """
    chunk = tl.arange(0, 4 * PARTS)[None, :]
    place = chunk // 4 * (ROWS * 64 + 64) + (tl.arange(0, 8)[:, None] * 4 + chunk % 4) * 16
    pointers = rows[:, None] + chunk * 4
    for i in tl.static_range(ROWS // 8):
        ask(pointers + (i // 2 * PAIR + i % 2 * NEXT), slots + place + i * 512, 16)


@triton.jit
def ask_scales(scales, slots, ROWS: tl.constexpr, BYTES: tl.constexpr, STRIDE: tl.constexpr):
    """Ask for BYTES bytes from each of `scales` on, uint8 pointers [ROWS]; STRIDE bytes apart in the ring."""
    SIZE: tl.constexpr = min(BYTES, 16)
    chunk = tl.arange(0, BYTES // SIZE)[None, :] * SIZE
    ask(scales[:, None] + chunk, slots + tl.arange(0, ROWS)[:, None] * STRIDE + chunk, SIZE)


@triton.jit
def ask_tokens(inputs, present, slots, TOKENS: tl.constexpr, PARTS: tl.constexpr, CHUNKS: tl.constexpr):
    """Ask for PARTS parts of x from `inputs` on, int32 pointers [TOKENS]: CHUNKS times 16 bytes a thread and part.

    What is not present is not read: many programs would ask for the same bytes at once.
    """
    chunk = tl.arange(0, 4 * CHUNKS * PARTS)[None, :]
    place = (chunk // (4 * CHUNKS) * CHUNKS + chunk % CHUNKS) * (TOKENS * 64 + 32)
    place += (tl.arange(0, TOKENS)[:, None] * 4 + chunk // CHUNKS % 4) * 16
    ask(inputs[:, None] + chunk * 4, slots + place, 16, present[:, None])
