"""A prefill and a decode server with different SWA pages must not exchange a KV cache."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
from sglang.srt.disaggregation.common import conn
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4SingleKVPool, DeepSeekV4TokenToKVPool

LOGICAL, DIRECT = 256, 64
PAGE_BYTES = {LOGICAL: 149_760, DIRECT: 37_440}


def pool(page_size: int, *, window: bool = False) -> Any:
    """A KV pool with two SWA layers of the given physical pages."""
    swa = SimpleNamespace(page_size=page_size, kv_buffer=[torch.zeros(4, PAGE_BYTES[page_size], dtype=torch.uint8)] * 2)
    return SimpleNamespace(
        uniform_fp8=False,
        compression_ratios=[0, 4, 128],
        compressed_kv_layout=lambda ratio: KVLayout.V4,
        kv_layout=KVLayout.V4,
        swa_page_size=LOGICAL,
        request_window=SimpleNamespace(state=swa) if window else None,
        swa_kv_pool=None if window else swa,
        compress_state_pools=[],
        indexer_compress_state_pools=[],
    )


def layout(of: Any) -> str:
    return DeepSeekV4TokenToKVPool.pd_kv_layout(of)


def test_layouts_of_other_physical_pages_differ() -> None:
    assert layout(pool(DIRECT)) != layout(pool(LOGICAL))
    assert layout(pool(DIRECT)) == layout(pool(DIRECT))
    assert f"swa_page:{DIRECT}" in layout(pool(DIRECT))


def test_unchanged_a_window_of_the_same_pages_has_the_same_layout() -> None:
    assert layout(pool(LOGICAL, window=True)) == layout(pool(LOGICAL))


def test_unchanged_sizes_alone_do_not_tell_the_pages_apart() -> None:
    lengths = [DeepSeekV4TokenToKVPool.get_state_buf_infos(pool(size))[2] for size in (LOGICAL, DIRECT)]
    assert lengths == [[PAGE_BYTES[LOGICAL]] * 2] * 2


def test_unchanged_the_bytes_of_a_page_are_what_the_pool_allocates() -> None:
    for size, expected in PAGE_BYTES.items():
        made = DeepSeekV4SingleKVPool(
            size, size, torch.float8_e4m3fn, 448, 64, 1, "cpu", False, global_page_size=LOGICAL
        )
        assert made.kv_buffer[0].shape[1] == expected


class Answer:
    status_code = 200

    def __init__(self, prefill_layout: str) -> None:
        self.prefill_layout = prefill_layout

    def json(self) -> dict[str, Any]:
        sizes = dict.fromkeys(("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"), 1)
        about = {"page_size": LOGICAL, "kv_cache_dtype": "fp8_e4m3", "kv_layout": self.prefill_layout}
        return sizes | about | {"follow_bootstrap_room": True}


def connect(monkeypatch: pytest.MonkeyPatch, prefill: Any, decode: Any) -> Any:
    """Let a decode server ask a prefill server what it is."""
    monkeypatch.setattr(conn.requests, "get", lambda *_, **__: Answer(layout(prefill)))
    manager = SimpleNamespace(
        prefill_info_table={},
        kv_args=SimpleNamespace(page_size=LOGICAL, state_types=[]),
        kv_cache_dtype_str="fp8_e4m3",
        kv_layout=layout(decode),
        dsv41_spec_layout=None,
        attn_tp_size=1,
        dcp_size=1,
        is_mla_backend=True,
        is_hybrid_mla_backend=False,
        _resolve_rank_mapping=lambda info: None,
    )
    return conn.CommonKVManager.try_ensure_parallel_info(manager, "prefill:8998")


@pytest.mark.parametrize(("prefill", "decode"), [(LOGICAL, DIRECT), (DIRECT, LOGICAL)])
def test_servers_with_other_pages_refuse_to_connect_and_name_the_switch(
    monkeypatch: pytest.MonkeyPatch, prefill: int, decode: int
) -> None:
    with pytest.raises(RuntimeError, match=f"swa_page:{prefill}.*swa_page:{decode}.*SM120_DIRECT_SWA_KV"):
        connect(monkeypatch, pool(prefill), pool(decode))


@pytest.mark.parametrize("size", [LOGICAL, DIRECT])
def test_unchanged_servers_with_the_same_pages_connect(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    assert connect(monkeypatch, pool(size), pool(size))
