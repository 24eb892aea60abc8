"""The interpreter's check of addresses (conftest.py) itself."""

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _copy_kernel(source, target, count, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(target + place, tl.load(source + place, mask=place < count), mask=place < count)


def test_an_access_outside_the_arguments_is_an_error() -> None:
    five, four = torch.ones(5), torch.zeros(4)
    _copy_kernel[(1,)](five, four, 4, SIZE=8)
    assert four.tolist() == [1.0] * 4
    with pytest.raises(Exception, match="writes 1 places outside its arguments"):
        _copy_kernel[(1,)](five, four, 5, SIZE=8)
    with pytest.raises(Exception, match="reads 1 places outside its arguments"):
        _copy_kernel[(1,)](four, five, 5, SIZE=8)
