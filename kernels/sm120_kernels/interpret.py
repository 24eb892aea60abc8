"""What Triton's interpreter (``TRITON_INTERPRET=1``, the CPU tests) does not do by itself.

It multiplies bf16 operands of a dot as if they were integers, and its rounding to bf16 and FP8 loses a carry into the
exponent. Compiled, the helpers are the plain operation.
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
def to_e4m3(x):
    """fp32 in e4m3's range to e4m3, to the nearest, ties to even."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
        # Below 2 ** -6 values are multiples of 2 ** -9, which is the last bit of fp32 at this sum.
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, normal)
    return x.to(tl.float8e4nv)
