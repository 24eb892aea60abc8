"""The indexer of DeepSeek-V4: how many rows are scored at once, and by what."""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend
from sglang.srt.layers.attention.dsv4 import indexer, metadata
from sglang.srt.layers.attention.dsv4.metadata import PagedIndexerMetadata
from sglang.srt.layers.deep_gemm_wrapper import configurer
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import override_platform

GIB = 2**30
HEADS, DIM, PAGE = 64, 128, 64
NONPAGED = "SGLANG_SM120_NONPAGED_INDEXER"


@pytest.fixture(autouse=True)
def sm120(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The defaults of sm_120, with the torch kernels in TileLang's place."""
    monkeypatch.setenv("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")
    monkeypatch.setenv("SGLANG_OPT_USE_TILELANG_INDEXER", "0")
    with override_platform(is_sm120=True):
        yield


def paged(rows: int, pages: int) -> PagedIndexerMetadata:
    """Metadata of a batch whose page table is `pages` wide; it takes no memory, however wide."""
    table = torch.zeros(1, dtype=torch.int32).expand(rows, pages)
    lengths = torch.full((rows,), pages * PAGE, dtype=torch.int32)
    return PagedIndexerMetadata(256, PAGE, table, lengths, use_topk_v2=False)


@pytest.mark.parametrize("budget_gib", [1, 2])
def test_a_long_prompts_rows_are_split_by_the_free_memory(monkeypatch: pytest.MonkeyPatch, budget_gib: int) -> None:
    monkeypatch.setattr(PagedIndexerMetadata, "_mqa_logits_budget", lambda *_, **__: budget_gib * GIB)
    found = paged(rows=8192, pages=2**20 // 4 // PAGE)
    assert found.rows_per_chunk == budget_gib * GIB // (4 * found.max_compressed_seq_len)


def test_a_full_gpu_still_gets_256_mib_of_logits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedIndexerMetadata, "_mqa_logits_budget", lambda *_, **__: 1)
    assert paged(rows=8192, pages=2**20 // 4 // PAGE).rows_per_chunk == 256


def test_unchanged_a_decode_step_does_not_ask_for_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedIndexerMetadata, "_mqa_logits_budget", lambda *_, **__: pytest.fail("it asked"))
    assert paged(rows=256, pages=2**20 // 4 // PAGE).rows_per_chunk is None


class Backend(indexer.C4IndexerBackendMixin):
    """An attention backend with random queries and keys, whose top-k runs in torch."""

    hisparse_coordinator = None

    def __init__(self, rows: int, pages: int, topk: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.dsa_topk_backend = DSATopKBackend.TORCH
        self.query = torch.randn(rows, HEADS, DIM, generator=generator).to(torch.float8_e4m3fn)
        self.weights = torch.rand(rows, HEADS, 1, generator=generator)
        keys = torch.randn(pages, PAGE * DIM, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
        scales = torch.rand(pages, PAGE, generator=generator).view(torch.uint8)
        self.token_to_kv_pool = SimpleNamespace(
            get_index_k_with_scale_buffer=lambda layer_id: torch.cat([keys, scales], dim=1)
        )
        found = paged(rows, pages)
        found.page_table = torch.randperm(pages, generator=generator).to(torch.int32).expand(rows, pages)
        found.compressed_seq_lens = torch.randint(1, pages * PAGE, (rows,), dtype=torch.int32, generator=generator)
        core = SimpleNamespace(
            positions=torch.arange(rows),
            c4_sparse_page_indices=torch.full((rows, topk), -7, dtype=torch.int32),
            c4_sparse_raw_indices=None,
        )
        self.forward_metadata = SimpleNamespace(indexer_metadata=found, core_metadata=core)

    def _forward_prepare_normal(self, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.query, self.weights

    def _get_nonpaged_indexer_plan(self, **_: Any) -> None:
        return None

    def run(self) -> torch.Tensor:
        rows = self.query.shape[0]
        self.forward_c4_indexer(
            x=torch.zeros(rows, 1),
            q_lora=torch.zeros(rows, 1),
            c4_indexer=SimpleNamespace(use_fp4_indexer=False, layer_id=0),
            forward_batch=SimpleNamespace(forward_mode=ForwardMode.EXTEND),
        )
        return self.forward_metadata.core_metadata.c4_sparse_page_indices


def test_split_rows_select_what_they_select_together(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    score = indexer.fp8_paged_mqa_logits_torch_sm120

    def counted(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(q.shape[0])
        return score(q, *args, **kwargs)

    monkeypatch.setattr(indexer, "get_global_indexer_capturer", lambda: None)
    monkeypatch.setattr(indexer, "fp8_paged_mqa_logits_torch_sm120", counted)
    whole, split = Backend(rows=10, pages=3, topk=32), Backend(rows=10, pages=3, topk=32)
    split.forward_metadata.indexer_metadata.rows_per_chunk = 4
    together = whole.run().sort(dim=1).values
    assert seen == [10]
    seen.clear()
    assert torch.equal(split.run().sort(dim=1).values, together)
    assert seen == [4, 4, 2]
    assert (together >= -1).all()


def test_the_torch_fallback_gathers_no_more_than_a_gib_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    score = indexer.fp8_paged_mqa_logits_torch_sm120

    def counted(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(q.shape[0])
        return score(q, *args, **kwargs)

    monkeypatch.setattr(indexer, "fp8_paged_mqa_logits_torch_sm120", counted)
    keys = 2**20  # of one head, 549 MB a row
    pages = torch.randint(0, 256, (4, PAGE, 1, DIM + 4), dtype=torch.uint8)
    pages.view(4, -1)[:, PAGE * DIM :] = torch.ones(4, PAGE).view(torch.uint8)
    pages.view(4, -1)[:, : PAGE * DIM] &= 0x3F  # small and finite in e4m3
    query = torch.ones(2, 1, 1, DIM).to(torch.float8_e4m3fn)
    table = torch.randint(0, 4, (2, keys // PAGE), dtype=torch.int32)
    lengths = torch.tensor([keys, 100], dtype=torch.int32)
    out = counted(query, pages, torch.ones(2, 1), lengths, table, None, keys, clean_logits=False)
    assert seen == [2, 1, 1]
    alone = score(query[1:], pages, torch.ones(1, 1), lengths[1:], table[1:], None, keys, clean_logits=False)
    assert torch.equal(out[1:], alone)


def can_use_nonpaged(monkeypatch: pytest.MonkeyPatch, *, use_fp4: bool = False) -> bool:
    """Whether a long prompt is scored by DeepGEMM's contiguous kernel."""
    monkeypatch.setattr(indexer, "is_cuda", lambda: True)
    monkeypatch.setattr(indexer, "is_hip", lambda: False)
    monkeypatch.setattr(indexer, "get_parallel", lambda: SimpleNamespace(attn_cp_size=1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, _original_forward_mode=None, tbo_parent_token_range=None, batch_size=1
    )
    return indexer.C4IndexerBackendMixin._can_use_nonpaged_indexer(
        SimpleNamespace(hisparse_coordinator=None),
        c4_indexer=SimpleNamespace(use_fp4_indexer=use_fp4),
        forward_batch=batch,
        indexer_metadata=SimpleNamespace(use_prefill_cuda_graph=False),
    )


@pytest.mark.parametrize("tilelang", ["0", "1"])
def test_deepgemm_scores_long_prompts_beside_another_decode_kernel(
    monkeypatch: pytest.MonkeyPatch, tilelang: str
) -> None:
    monkeypatch.setattr(configurer, "ENABLE_JIT_DEEPGEMM", True)
    monkeypatch.setenv("SGLANG_OPT_USE_TILELANG_INDEXER", tilelang)
    monkeypatch.setenv(NONPAGED, "1")
    assert can_use_nonpaged(monkeypatch)
    assert not can_use_nonpaged(monkeypatch, use_fp4=True)
    monkeypatch.setenv("SGLANG_OPT_DSV4_NONPAGED_INDEXER", "0")
    assert not can_use_nonpaged(monkeypatch)


@pytest.mark.parametrize(("switch", "deepgemm"), [("0", True), ("1", False)])
def test_unchanged_deepgemm_does_not_score_long_prompts_unasked_or_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, switch: str, deepgemm: bool
) -> None:
    monkeypatch.setattr(configurer, "ENABLE_JIT_DEEPGEMM", deepgemm)
    monkeypatch.setenv(NONPAGED, switch)
    assert not can_use_nonpaged(monkeypatch)


def planner_called(monkeypatch: pytest.MonkeyPatch, *, is_sm120: bool) -> str:
    """Who divides the rows among the processors when DeepGEMM scores them."""
    called: list[str] = []

    def plan(name: str) -> Any:
        return lambda *_: (called.append(name), torch.zeros(1))[1]

    deep_gemm = ModuleType("deep_gemm")
    vars(deep_gemm).update(get_num_sms=lambda: 188, get_paged_mqa_logits_metadata=plan("deep_gemm"))
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm)
    kernels = importlib.import_module("sglang.kernels.ops.attention.dsv4")
    monkeypatch.setattr(kernels, "get_paged_mqa_logits_metadata", plan("sglang"))
    monkeypatch.setattr(metadata, "_IS_SM120", is_sm120)
    monkeypatch.setenv("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "0")
    paged(rows=16, pages=8)
    assert len(called) == 1
    return called[0]


def test_deepgemms_own_planner_divides_rows_on_sm120(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planner_called(monkeypatch, is_sm120=True) == "deep_gemm"


def test_unchanged_sglangs_planner_divides_them_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planner_called(monkeypatch, is_sm120=False) == "sglang"
