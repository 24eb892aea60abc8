"""FP4 and FP8 values in other formats, by moving their bits.

A value's bits are put where the other format has its sign, the low bits of its exponent and the top of its mantissa:
that is the value times a power of two, subnormal where it was, so no code needs a case of its own. Compiled, four bytes
are done at once (inline PTX for any GPU); the interpreter gets fp32 in place of bf16, with the same values.
"""

import triton
import triton.language as tl

from sm120_kernels.interpret import INTERPRETED

# E2M1 in bf16 is the value times 2 ** -126, in e4m3 times 2 ** -6; e4m3 in bf16 is the value times 2 ** -120.

# $2 holds bytes b3 b2 b1 b0; results: their low halves, then their high halves.
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
# $4 holds eight codes, $5 a bf16 factor twice; results: codes p and p + 4 times the factor, for p = 0 to 3. A
# multiplication puts sign and magnitude in place at once; adding -0 keeps a zero's sign (sm_80 has no product alone).
_E2M1_PAIRS = tl.constexpr("""
{
.reg .b32 t, u, z;
mov.b32 z, 0x80008000;
and.b32 t, $4, 0x000F000F;
mul.lo.u32 t, t, 0x1040;
and.b32 t, t, 0x81C081C0;
fma.rn.bf16x2 $0, t, $5, z;
and.b32 t, $4, 0x00F000F0;
mul.lo.u32 t, t, 0x104;
and.b32 t, t, 0x81C081C0;
fma.rn.bf16x2 $1, t, $5, z;
shr.u32 u, $4, 8;
and.b32 t, u, 0x000F000F;
mul.lo.u32 t, t, 0x1040;
and.b32 t, t, 0x81C081C0;
fma.rn.bf16x2 $2, t, $5, z;
and.b32 t, u, 0x00F000F0;
mul.lo.u32 t, t, 0x104;
and.b32 t, t, 0x81C081C0;
fma.rn.bf16x2 $3, t, $5, z;
}
""")
# $2 holds four codes; results: codes 0 and 2, and 1 and 3.
_E4M3_PAIRS = tl.constexpr("""
{
.reg .b32 t, u;
shl.b32 t, $2, 4;
and.b32 t, t, 0x07F007F0;
shl.b32 u, $2, 8;
lop3.b32 $0, u, 0x80008000, t, 0xEA;
shr.u32 t, $2, 4;
and.b32 t, t, 0x07F007F0;
lop3.b32 $1, $2, 0x80008000, t, 0xEA;
}
""")


@triton.jit
def _e2m1(code):
    """fp32 of E2M1 codes in the low four bits of int32, times 2 ** -126."""
    return _fp32(((code & 8) << 12) | ((code & 7) << 6))


@triton.jit
def e2m1_pairs(word, factor):
    """Codes 0, 4, 1, 5, 2, 6, 3, 7 of int32 `word`, low bits first, times 2 ** -126 and a factor.

    The factor is what `two_powers` or `two_e4m3` gives.
    """
    if INTERPRETED:
        a = _e2m1(word) * factor
        b = _e2m1(word >> 16) * factor
        c = _e2m1(word >> 4) * factor
        d = _e2m1(word >> 20) * factor
        e = _e2m1(word >> 8) * factor
        f = _e2m1(word >> 24) * factor
        g = _e2m1(word >> 12) * factor
        h = _e2m1(word >> 28) * factor
    else:
        p, q, r, s = tl.inline_asm_elementwise(
            _E2M1_PAIRS,
            "=&r,=&r,=&r,=&r,r,r",
            [word, factor],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        a, b = halves(p)
        c, d = halves(q)
        e, f = halves(r)
        g, h = halves(s)
    return a, b, c, d, e, f, g, h


@triton.jit
def e4m3_pairs(word):
    """Codes 0, 2, 1, 3 of int32 `word`, low bits first, times 2 ** -120."""
    if INTERPRETED:
        a = _e4m3(word)
        b = _e4m3(word >> 16)
        c = _e4m3(word >> 8)
        d = _e4m3(word >> 24)
    else:
        p, q = tl.inline_asm_elementwise(
            _E4M3_PAIRS, "=&r,=&r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        a, b = halves(p)
        c, d = halves(q)
    return a, b, c, d


@triton.jit
def _e4m3(code):
    """fp32 of e4m3 codes in the low eight bits of int32, times 2 ** -120."""
    return _fp32(((code & 0x80) << 8) | ((code & 0x7F) << 4))


@triton.jit
def two_powers(exponent):
    """2 ** (exponent - 127) for int32 exponents 1 to 254, as `e2m1_pairs` takes its factor."""
    return (exponent << 23).to(tl.float32, bitcast=True) if INTERPRETED else exponent * 0x00800080


@triton.jit
def two_e4m3(code, FACTOR: tl.constexpr):
    """The value of int32 e4m3 codes times FACTOR, a power of two, as `e2m1_pairs` takes its factor."""
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 2.0**120 * FACTOR
    if not INTERPRETED:
        # Four significant bits: the upper half of the fp32 is the bf16.
        upper = (value.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        value = upper * 0x00010001
    return value


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
def _fp32(bf16_bits):
    return (bf16_bits << 16).to(tl.float32, bitcast=True)


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
