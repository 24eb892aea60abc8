"""E2M1 values, two a byte, as bf16.

The four bits are moved to where bf16 has its sign, the low two bits of its exponent and the top of its mantissa. That
is the value times 2 ** -126, subnormal where E2M1 is, so no code needs a case of its own.
"""

import triton
import triton.language as tl

from sm120_kernels.interpret import INTERPRETED

# Four bytes at once: 1.5 byte-permute, shift and logic instructions a value. $4 holds bytes b3 b2 b1 b0; a register of
# the result two values, of the low halves ($0: b0, b1; $1: b2, b3) or of the high halves ($2, $3).
_UNPACK = tl.constexpr("""
{
.reg .b32 p, q, t;
prmt.b32 p, $4, $4, 0x1100;
prmt.b32 q, $4, $4, 0x3322;
shl.b32 t, p, 6;
and.b32 t, t, 0x01C001C0;
shl.b32 $0, p, 12;
lop3.b32 $0, $0, 0x80008000, t, 0xEA;
shl.b32 t, q, 6;
and.b32 t, t, 0x01C001C0;
shl.b32 $1, q, 12;
lop3.b32 $1, $1, 0x80008000, t, 0xEA;
shr.u32 t, p, 6;
and.b32 t, t, 0x01C001C0;
lop3.b32 $2, p, 0x80008000, t, 0xEA;
shr.u32 t, q, 6;
and.b32 t, t, 0x01C001C0;
lop3.b32 $3, q, 0x80008000, t, 0xEA;
}
""")


@triton.jit
def unpack_e2m1(packed):
    """Low and high halves of uint8 `packed`, of its shape, both times 2 ** -126: bf16, in the interpreter fp32."""
    if INTERPRETED:
        code = packed.to(tl.int32)
        low = _place(code)
        high = _place(code >> 4)
    else:
        low, high = tl.inline_asm_elementwise(
            _UNPACK, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def _place(code):
    bits = ((code & 8) << 12) | ((code & 7) << 6)
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(exponent):
    """2 ** (exponent - 127) for int32 exponents 1 to 254: bf16, in the interpreter fp32."""
    if INTERPRETED:
        value = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        value = (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value


@triton.jit
def halves(pairs):
    """The two bf16 values in each int32, low half first: bf16, in the interpreter fp32."""
    if INTERPRETED:
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, high
