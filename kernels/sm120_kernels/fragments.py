"""Operands of small products, from memory to the tensor cores' registers without an exchange between threads.

A thread takes 16 consecutive bytes of a weight row; four neighbouring threads take 64. The columns of a product may be
taken in any order as long as both operands agree, so they are numbered such that what a thread has taken is what its
place in the operand asks for: then no value changes hands. The compiler finds that out by itself from the shapes below
(backwards from the product to the addresses).

The bytes are asked for some turns ahead and wait in a ring in shared memory, where they cost no registers. Triton's own
pipelining of loads would keep the layout in which they were loaded up to the product, and exchange the finished operand
through shared memory. A launch gets at most 48 KiB for the ring and Triton's own shared memory together.

The interpreter takes from memory what `ask` would have brought: only a GPU shows whether it was asked for.

The interpreter takes the same columns in the same order, with fp32 in place of bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sm120_kernels.interpret import INTERPRETED
from sm120_kernels.unpack import e2m1_pairs, e4m3_pairs, halves

# Neighbouring columns of a bf16 operand that Triton gives a thread where the operand is joined from parts: 3.6 counts
# the parts as narrower than they are. A wrong guess costs time, not correctness.
_NEIGHBOURS = tl.constexpr(4 if triton.__version__ < "3.7" else 2)

_TAKE = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
_TAKE_WORD = tl.constexpr("ld.shared.b32 $0, [$1];")
_TAKE_TWO = tl.constexpr("ld.shared.v2.b32 {$0, $1}, [$2];")
_TAKE_BYTE = tl.constexpr("ld.shared.u8 $0, [$1];")
# The float whose bits, as an integer, are where `integer_product` begins to count: n more are a float n larger.
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)
# $4 and $5 hold eight codes each. `prmt` looks four of them up in a table of eight bytes by their lower three bits, but
# where a code's sign is set it gives the sign of that byte, here 0. So twice the magnitudes of the positive codes, and
# then minus the magnitudes of all, give the values: two products. $8 and $9 are the tables' first halves.
_INTEGER_PRODUCT = tl.constexpr(
    """
{
.reg .b32 a, b, c, d, e, f, m, n, z;
mov.b32 z, MAGIC_BITS;
shr.u32 e, $4, 16;
shr.u32 f, $5, 16;
mov.b32 n, 0x18100C08;
prmt.b32 a, $8, n, $4;
prmt.b32 b, $8, n, $5;
prmt.b32 c, $8, n, e;
prmt.b32 d, $8, n, f;
mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {a, b, c, d}, {$6, $7}, {z, z, z, z};
and.b32 m, $4, 0x77777777;
and.b32 n, $5, 0x77777777;
shr.u32 e, m, 16;
shr.u32 f, n, 16;
mov.b32 z, 0xF4F8FAFC;
prmt.b32 a, $9, z, m;
prmt.b32 b, $9, z, n;
prmt.b32 c, $9, z, e;
prmt.b32 d, $9, z, f;
mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {$0, $1, $2, $3}, {a, b, c, d}, {$6, $7}, {$0, $1, $2, $3};
}
""".replace("MAGIC_BITS", str(MAGIC_BITS.value))
)
DOUBLES = tl.constexpr(0x06040200)
NEGATIVES = tl.constexpr(-0x02010100)


@triton.jit
def ring(BYTES: tl.constexpr):
    """Address (int32, 128 bytes aligned) of BYTES of shared memory; once in a kernel."""
    base = tl.program_id(0) * 0
    if not INTERPRETED:
        base = tl.inline_asm_elementwise(
            f".shared .align 128 .b8 operand_ring[{BYTES}]; mov.u32 $0, operand_ring;",
            "=r,r",
            [base],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return base


@triton.jit
def ask(pointers, slots, SIZE: tl.constexpr, present=None):
    """Begin to copy SIZE (4, 8 or 16) bytes from each pointer to the shared-memory address in `slots` beside it.

    With present (bool, 16 bytes only), zeros where it is false: nothing is read there.
    """
    if not INTERPRETED:
        # All 16: past the L1 cache, and the rest of the line into L2, where the next turns find it.
        if present is None:
            tl.inline_asm_elementwise(
                f"cp.async.{'cg' if SIZE == 16 else 'ca'}.shared.global.L2::128B [$2], [$1], {SIZE}; mov.u32 $0, 0;",
                "=r,l,r",
                [pointers.to(tl.int64), slots],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
        else:
            tl.inline_asm_elementwise(
                "cp.async.cg.shared.global.L2::128B [$2], [$1], 16, $3; mov.u32 $0, 0;",
                "=r,l,r,r",
                [pointers.to(tl.int64), slots, tl.where(present, 16, 0)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def close_group():
    """What was asked for since the last call is a group."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "cp.async.commit_group; mov.u32 $0, 0;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def await_groups(LEFT: tl.constexpr):
    """Wait until at most LEFT groups are on their way; what has come is there for all threads."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            f"cp.async.wait_group {LEFT}; mov.u32 $0, 0;",
            "=r,r",
            [tl.program_id(0)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.debug_barrier()


@triton.jit
def take(pointers, slots):
    """The four int32 that `ask(pointers, slots, 16)` brought, of int32 pointers."""
    if INTERPRETED:
        a = tl.load(pointers)
        b = tl.load(pointers + 1)
        c = tl.load(pointers + 2)
        d = tl.load(pointers + 3)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _TAKE,
            "=r,=r,=r,=r,r",
            [slots],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    return a, b, c, d


@triton.jit
def take_byte(pointers, slots):
    """int32 of the byte at each of `slots`, which `ask` brought from uint8 `pointers`."""
    if INTERPRETED:
        value = tl.load(pointers).to(tl.int32)
    else:
        value = tl.inline_asm_elementwise(_TAKE_BYTE, "=r,r", [slots], dtype=tl.int32, is_pure=False, pack=1)
    return value


@triton.jit
def take_word(pointers, slots):
    """The int32 that `ask` brought from int32 `pointers` to `slots`."""
    if INTERPRETED:
        value = tl.load(pointers)
    else:
        value = tl.inline_asm_elementwise(_TAKE_WORD, "=r,r", [slots], dtype=tl.int32, is_pure=False, pack=1)
    return value


@triton.jit
def take_two(first, second, slots):
    """The two int32 that `ask` brought from int32 pointers `first` and `second` to `slots` and behind it."""
    if INTERPRETED:
        a = tl.load(first)
        b = tl.load(second)
    else:
        a, b = tl.inline_asm_elementwise(
            _TAKE_TWO, "=r,=r,r", [slots], dtype=(tl.int32, tl.int32), is_pure=False, pack=1
        )
    return a, b


@triton.jit
def integer_product(upper, lower, left, right, doubles, negatives, LANES: tl.constexpr):
    """W X of 16 rows, 32 columns and 8 right-hand sides for each warp; W is E2M1 times two, X int8.

    Everything is [LANES] int32, one value a thread. Thread 4 g + t of a warp has columns 8 t to 8 t + 7 of rows g
    (`upper`) and g + 8 (`lower`) of W, and of column g of X (`left`, `right`).

    Args:
        doubles, negatives: DOUBLES and NEGATIVES, in registers.

    Returns:
        fp32 MAGIC + n for rows g, g, g + 8, g + 8 and right-hand sides 2 t, 2 t + 1, 2 t, 2 t + 1; |n| below 2 ** 22.
    """
    if INTERPRETED:
        WARPS: tl.constexpr = LANES // 32
        place = tl.arange(0, 8)
        code = tl.join(upper, lower)[:, :, None] >> (4 * place)[None, None, :]
        value = code & 7
        value = tl.where(value < 5, value, tl.where(value == 5, 6, 4 * value - 16))
        value = tl.where(code & 8 != 0, -value, value).reshape(WARPS, 8, 4, 2, 8)
        value = value.permute(0, 1, 3, 2, 4).reshape(WARPS, 16, 1, 32)
        x = tl.where(place < 4, left[:, None], right[:, None]) << (24 - place % 4 * 8)[None, :]
        n = tl.sum(value * (x >> 24).reshape(WARPS, 1, 8, 32), 3).reshape(WARPS, 8, 2, 4, 2)
        n = n.permute(0, 1, 3, 2, 4).reshape(LANES, 2, 2).to(tl.float32) + MAGIC
        even, odd = tl.split(n)
        a, c = tl.split(even)
        b, d = tl.split(odd)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _INTEGER_PRODUCT,
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
            [upper, lower, left, right, doubles, negatives],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return a, b, c, d


@triton.jit
def counted_times(counted, scale):
    """n scale, of MAGIC + n and a scale of 22 bits: MAGIC times it is exact, and so one instruction does it."""
    return (counted - MAGIC) * scale if INTERPRETED else tl.fma(counted, scale, -MAGIC * scale)


@triton.jit
def from_two_on(value, LANES: tl.constexpr):
    """Of fp32 [LANES], one a thread: the value of the thread two places on or back, within four."""
    if INTERPRETED:
        a, b = tl.split(value.reshape(LANES // 4, 2, 2).permute(0, 2, 1))
        found = tl.join(b, a).permute(0, 2, 1).reshape(LANES)
    else:
        found = tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;",
            "=r,r",
            [value],
            dtype=tl.float32,
            is_pure=False,
            pack=1,
        )
    return found


@triton.jit
def _weight_operand(a, b, c, d, e, f, g, h, ROWS: tl.constexpr):
    """[ROWS, 32] of eight [ROWS, 4]: the halves of pairs 0 to 3."""
    value = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
    # Dimensions: row, thread of the four, half, low and high bit of the pair.
    value = value.permute(0, 4, 1, 3, 2) if _NEIGHBOURS == 4 else value.permute(0, 4, 3, 1, 2)
    return value.reshape(ROWS, 32)


@triton.jit
def _token_operand(a, b, c, d, e, f, g, h, TOKENS: tl.constexpr):
    """[32, TOKENS] of eight [4, TOKENS], in the order of _weight_operand."""
    value = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
    value = value.permute(4, 0, 3, 2, 1) if _NEIGHBOURS == 4 else value.permute(4, 3, 0, 2, 1)
    return value.reshape(32, TOKENS)


@triton.jit
def e2m1_operand(word, factor, ROWS: tl.constexpr):
    """Weights [ROWS, 32] bf16 of `word` [ROWS, 4] int32, eight E2M1 each, times `factor` as `e2m1_pairs` takes it."""
    a, b, c, d, e, f, g, h = e2m1_pairs(word, factor)
    return _weight_operand(a, b, c, d, e, f, g, h, ROWS)


@triton.jit
def e2m1_tokens(p, q, r, s, TOKENS: tl.constexpr):
    """x [32, TOKENS] in the column order of `e2m1_operand`; p, q, r, s [4, TOKENS] int32 hold eight columns."""
    a, e = halves(p)
    c, g = halves(q)
    b, f = halves(r)
    d, h = halves(s)
    return _token_operand(a, b, e, f, c, d, g, h, TOKENS)


@triton.jit
def e4m3_operand(first, second, ROWS: tl.constexpr):
    """Weights [ROWS, 32] bf16 of two neighbouring words [ROWS, 4] int32, four e4m3 each, times 2 ** -120."""
    a, b, c, d = e4m3_pairs(first)
    e, f, g, h = e4m3_pairs(second)
    return _weight_operand(a, b, c, d, e, f, g, h, ROWS)


@triton.jit
def e4m3_tokens(p, q, r, s, TOKENS: tl.constexpr):
    """As `e2m1_tokens`, in the column order of `e4m3_operand`."""
    a, c = halves(p)
    b, d = halves(q)
    e, g = halves(r)
    f, h = halves(s)
    return _token_operand(a, b, c, d, e, f, g, h, TOKENS)
