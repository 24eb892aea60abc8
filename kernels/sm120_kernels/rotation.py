"""RoPE and the Hadamard rotation as the attention kernels use them."""

import functools

import torch
import triton
import triton.language as tl


@triton.jit
def rotate(x, rotated, table_row, ROWS: tl.constexpr):
    """RoPE on the rows of x [ROWS, 64] that `rotated` [ROWS] marks: neighbours are a pair, (re, im).

    table_row points at the position's 32 (cos, sin) pairs. The compiler is not left to choose which product is rounded,
    so that every kernel that rotates gives the same bits.
    """
    pair = tl.arange(0, 32)[None, :]
    cos = tl.where(rotated[:, None], tl.load(table_row + 2 * pair), 1.0)
    sin = tl.where(rotated[:, None], tl.load(table_row + 2 * pair + 1), 0.0)
    re, im = tl.split(tl.reshape(x, (ROWS, 32, 2)))
    return tl.reshape(tl.join(tl.fma(re, cos, -im * sin), tl.fma(re, sin, im * cos)), (ROWS, 64))


@functools.cache
def hadamard(device: torch.device) -> torch.Tensor:
    """The 128 x 128 Hadamard matrix in natural order, entries 1 and -1, bfloat16; symmetric."""
    matrix = torch.ones((1, 1))
    while len(matrix) < 128:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.to(device, torch.bfloat16)
