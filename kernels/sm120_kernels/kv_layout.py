"""Byte layout of DeepSeek-V4-Flash's paged FP8 KV cache.

A page holds ``page_size`` data rows and after them ``page_size`` scale rows. A token's data row is 448 e4m3 values
(nope) followed by 64 bf16 values (rope); its scale row is one UE8M0 byte for each 64 nope values and a byte of padding.
The page's length is rounded up to a multiple of the data row.

Source: SGLang 0.5.23, ``kernels/ops/attention/dsv4/kv_layout.py`` (``KVLayout.V4``) and
``kernels/ops/attention/flash_mla_sm120.py``; ``tests/kernels/test_kv_layout.py`` compares the two where SGLang is
installed.
"""

NOPE_DIM = 448
ROPE_DIM = 64
HEAD_DIM = NOPE_DIM + ROPE_DIM
SCALE_GROUP = 64
SCALES_PER_TOKEN = NOPE_DIM // SCALE_GROUP
DATA_BYTES = NOPE_DIM + 2 * ROPE_DIM
SCALE_BYTES = SCALES_PER_TOKEN + 1
TOKEN_BYTES = DATA_BYTES + SCALE_BYTES
# UE8M0: byte b means 2 ** (b - 127).
SCALE_BIAS = 127

# Tokens a page: sliding window (pool default), sliding window with SGLANG_OPT_SM120_DIRECT_SWA_KV and C4, C128.
PAGE_SIZES = (256, 64, 2)


def page_bytes(page_size: int) -> int:
    """Bytes from one page of ``page_size`` tokens to the next: 149,760 / 37,440 / 1,728 for 256 / 64 / 2 tokens."""
    return -(-page_size * TOKEN_BYTES // DATA_BYTES) * DATA_BYTES


def scale_offset(page_size: int) -> int:
    """Bytes from the start of a page to its first scale row."""
    return page_size * DATA_BYTES
