"""The cache layout against SGLang's own description of it."""

import pytest
from sm120_kernels import kv_layout


@pytest.mark.parametrize("page_size, expected", [(256, 149_760), (64, 37_440), (2, 1_728)])
def test_a_page_has_the_bytes_upstream_allocates(page_size: int, expected: int) -> None:
    assert kv_layout.page_bytes(page_size) == expected


@pytest.mark.parametrize("page_size", kv_layout.PAGE_SIZES)
def test_the_layout_equals_sglangs_description(page_size: int) -> None:
    upstream = pytest.importorskip("sglang.kernels.ops.attention.dsv4.kv_layout").KVLayout.V4
    assert upstream.page_bytes(page_size) == kv_layout.page_bytes(page_size)
    assert upstream.tile_size == kv_layout.SCALE_GROUP
    assert upstream.row_addressing(page_size) == (
        kv_layout.DATA_BYTES,
        kv_layout.scale_offset(page_size),
        kv_layout.SCALE_BYTES,
    )
