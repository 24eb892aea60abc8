"""What several kernels use, and what Triton's interpreter (``TRITON_INTERPRET=1``, the CPU tests) does not do by itself.

It multiplies bf16 operands of a dot as if they were integers, and its rounding to bf16 loses a carry into the
exponent. Compiled, `dot` and `to_bf16` are the plain operation.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def dot(a, b, acc=None):
    """``tl.dot`` with fp32 accumulation."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def to_bf16(x):
    """fp32 to bf16, to the nearest, ties to even."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def side_by_side(left, right, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """Two [TOKENS, COLUMNS] tiles as one of twice the columns."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (TOKENS, 2 * COLUMNS))
