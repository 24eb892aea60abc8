"""What Triton's interpreter (``TRITON_INTERPRET=1``, the CPU tests) does not do by itself.

It multiplies bf16 operands of a dot as if they were integers, and its rounding to bf16 loses a carry into the
exponent. Compiled, both helpers are the plain operation.
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
