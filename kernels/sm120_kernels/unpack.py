"""FP4 and FP8 values in other formats, by moving their bits.

A value's bits are put where the other format has its sign, the low bits of its exponent and the top of its mantissa:
that is the value times a power of two, subnormal where it was, so no code needs a case of its own. Compiled, four bytes
are done at once (inline PTX for any GPU); the interpreter gets fp32 in place of bf16, with the same values.
"""

import triton
import triton.language as tl

from sm120_kernels.interpret import INTERPRETED

# E2M1 in bf16 is the value times 2 ** -126, in e4m3 times 2 ** -6; e4m3 in bf16 is the value times 2 ** -120.

# $4 holds bytes b3 b2 b1 b0; results, two values each: low halves of b0, b1 and of b2, b3, then the high halves.
_E2M1_TO_BF16 = tl.constexpr("""
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
_E2M1_TO_E4M3 = tl.constexpr("""
{
.reg .b32 t;
shl.b32 t, $2, 2;
and.b32 t, t, 0x1C1C1C1C;
shl.b32 $0, $2, 4;
lop3.b32 $0, $0, 0x80808080, t, 0xEA;
shr.u32 t, $2, 2;
and.b32 t, t, 0x1C1C1C1C;
lop3.b32 $1, $2, 0x80808080, t, 0xEA;
}
""")
_E4M3_TO_BF16 = tl.constexpr("""
{
.reg .b32 p, t;
prmt.b32 p, $2, 0, 0x1404;
shr.u32 t, p, 4;
and.b32 t, t, 0x07F007F0;
lop3.b32 $0, p, 0x80008000, t, 0xEA;
prmt.b32 p, $2, 0, 0x3424;
shr.u32 t, p, 4;
and.b32 t, t, 0x07F007F0;
lop3.b32 $1, p, 0x80008000, t, 0xEA;
}
""")


@triton.jit
def e2m1_to_bf16(packed):
    """Low and high halves of uint8 `packed`, each of its shape, times 2 ** -126."""
    if INTERPRETED:
        code = packed.to(tl.int32)
        low = _fp32(((code & 8) << 12) | ((code & 7) << 6))
        high = _fp32(((code & 0x80) << 8) | ((code & 0x70) << 2))
    else:
        low, high = tl.inline_asm_elementwise(
            _E2M1_TO_BF16, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    return low, high


@triton.jit
def e2m1_to_e4m3(packed):
    """[ROWS, 2 COLUMNS] e4m3 of uint8 `packed` [ROWS, COLUMNS], low halves first, times 2 ** -6."""
    if INTERPRETED:
        low = ((packed & 8) << 4) | ((packed & 7) << 2)
        high = (packed & 0x80) | ((packed & 0x70) >> 2)
    else:
        low, high = tl.inline_asm_elementwise(
            _E2M1_TO_E4M3, "=r,=r,r", [packed], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    both = tl.join(low, high).reshape(packed.shape[0], 2 * packed.shape[1])
    return both.to(tl.float8e4nv, bitcast=True)


@triton.jit
def e4m3_to_bf16(values):
    """e4m3 `values` times 2 ** -120."""
    code = values.to(tl.uint8, bitcast=True)
    if INTERPRETED:
        code = code.to(tl.int32)
        result = _fp32(((code & 0x80) << 8) | ((code & 0x7F) << 4))
    else:
        result = tl.inline_asm_elementwise(_E4M3_TO_BF16, "=r,=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)
    return result


@triton.jit
def _fp32(bf16_bits):
    return (bf16_bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(exponent):
    """2 ** (exponent - 127) for int32 exponents 1 to 254."""
    if INTERPRETED:
        value = (exponent << 23).to(tl.float32, bitcast=True)
    else:
        value = (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return value


@triton.jit
def halves(pairs):
    """The two bf16 values in each int32, low half first."""
    if INTERPRETED:
        low = (pairs << 16).to(tl.float32, bitcast=True)
        high = (pairs & -65536).to(tl.float32, bitcast=True)
    else:
        low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return low, high


@triton.jit
def scale_value(scale):
    """fp32 of a float32 scale, or of a UE8M0 byte."""
    if scale.dtype == tl.uint8:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale
