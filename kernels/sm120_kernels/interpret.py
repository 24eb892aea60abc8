"""What several kernels use, and what Triton's interpreter does not do by itself.

The interpreter (``TRITON_INTERPRET=1``, the CPU tests) multiplies bf16 operands of a dot as if they were integers, and
its rounding to bf16 and e4m3 loses a carry into the exponent. Compiled, `dot`, `to_bf16` and `to_e4m3` are the plain
operation.
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
    """fp32 to e4m3, to the nearest, ties to even; beyond 448 it saturates."""
    if INTERPRETED:
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        bits = x.to(tl.int32, bitcast=True)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576
        # Below 2^-6 the steps are 2^-9, which is the last place of 1.5 * 2^14.
        small = (x + 24576.0) - 24576.0
        x = tl.where(tl.abs(x) < 0.015625, small, normal.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


@triton.jit
def reciprocal(x):
    """1 / x of a positive fp32, as the hardware approximates it (1 ulp)."""
    if INTERPRETED:
        found = 1.0 / x
    else:
        found = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def side_by_side(left, right, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """Two [TOKENS, COLUMNS] tiles as one of twice the columns."""
    return tl.reshape(tl.permute(tl.join(left, right), (0, 2, 1)), (TOKENS, 2 * COLUMNS))


@triton.jit
def prefetch_l2(pointers):
    """Ask for the 128-byte lines at `pointers` [n] to be brought into the L2 cache; nothing waits for them.

    Before a kernel waits for the one before (`gdc_wait`), this puts the memory to work while that one computes.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
