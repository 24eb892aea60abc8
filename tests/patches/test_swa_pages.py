"""Which pages of the sliding window FlashInfer's sm_120 kernel is given."""

from types import SimpleNamespace
from typing import Any

import flashinfer.mla._sparse_mla_sm120 as sparse_mla
import pytest
import torch
from flashinfer.mla._sparse_mla_sm120 import _policy
from sglang.kernels.ops.attention import flash_mla_sm120
from sglang.srt import runtime_context

SWITCH = "SGLANG_SM120_SWA_PAGES_IN_PLACE"
PAGES, TOKENS, ROW, STRIDE = 3, 256, 584, 149_760
ATTENTION = {"decode": flash_mla_sm120._flash_mla_flashinfer, "prefill": flash_mla_sm120._flash_mla_sm120_prefill}


class Kernel:
    """Stands for a Triton kernel, which the CPU cannot run."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_: None


def pages_given(monkeypatch: pytest.MonkeyPatch, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The cache that attention is asked to read, and the one that the kernel gets."""
    pool = torch.zeros(PAGES, STRIDE, dtype=torch.uint8)
    cache = pool[:, : TOKENS * ROW].view(PAGES, TOKENS, 1, ROW)
    given: list[torch.Tensor] = []
    monkeypatch.setattr(runtime_context, "get_resources", lambda: SimpleNamespace(buffers={}))
    monkeypatch.setattr(flash_mla_sm120, "_page_mark_kernel", Kernel())
    monkeypatch.setattr(flash_mla_sm120, "_page_split_kernel", Kernel())
    monkeypatch.setattr(
        sparse_mla, "_sparse_mla_sm120_paged_attention", lambda q, kv, *_, **__: given.append(kv), raising=True
    )
    query, indices = torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16), torch.zeros(2, 1, 128, dtype=torch.int32)
    ATTENTION[form](query, cache, indices, None, None, 512, 1.0, None, None, None)
    return cache, given[0]


@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_the_kernel_gets_the_pool_itself(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setenv(SWITCH, "1")
    cache, given = pages_given(monkeypatch, form)
    assert given.data_ptr() == cache.data_ptr()
    assert (given.shape, given.stride()) == ((PAGES, TOKENS, 1, ROW), (STRIDE, ROW, ROW, 1))


@pytest.mark.parametrize("form", ["decode", "prefill"])
def test_unchanged_it_gets_a_copy_in_pages_of_64_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    cache, given = pages_given(monkeypatch, form)
    assert given.data_ptr() != cache.data_ptr()
    assert given.shape == (PAGES * 4, 64, 1, ROW)


def test_unchanged_flashinfer_reads_pages_of_any_size() -> None:
    assert _policy._STATIC_DECODE_ENVELOPE[_policy._MODEL_TYPE_DSV4].page_block_size_is_runtime
