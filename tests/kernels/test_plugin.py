"""The plug-in inside the real SGLang of the image, kernels in Triton's interpreter: hooks in place, same results."""

import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sm120_kernels.kv_layout import page_bytes
from sm120_kernels.plugin import adapters, hooks
from sm120_kernels.plugin.table import ALIASES, HOOKS, Hook, enabled

pytest.importorskip("sglang")
pytestmark = pytest.mark.filterwarnings("ignore")
SPARSE_MLA, LOGITS_TILELANG, LOGITS_TORCH, TOPK_V1, TOPK_V2 = HOOKS[:5]


@pytest.fixture(autouse=True)
def fresh_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang as it was imported: afterwards every replaced function is back in every module that holds it."""
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    monkeypatch.setattr(hooks, "REPORT", tmp_path / "hooks.json")
    yield
    for hook in HOOKS:
        owner = pkgutil.resolve_name(hook.owner)
        wrapped = getattr(owner, hook.function)
        original = wrapped
        while hasattr(original, "__wrapped__"):
            original = original.__wrapped__
            if isinstance(owner, type):
                setattr(owner, hook.function, original)
        for module in [module for module in sys.modules.values() if module is not None]:
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is wrapped and wrapped is not original:
                    setattr(module, name, original)
    registry.HookRegistry.reset()


def function(hook: Hook):
    return getattr(pkgutil.resolve_name(hook.owner), hook.function)


def calls(hook: Hook, path: str) -> float:
    return hooks._metrics()[0].labels(hook.op, hook.function, path)._value.get()


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.function)
def test_a_target_is_the_function_that_the_hook_was_written_against(hook: Hook) -> None:
    hooks.require_upstream(hook)


def test_a_changed_function_ends_the_process_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = replace(LOGITS_TORCH, upstream_sha256="0" * 64)
    monkeypatch.setattr(hooks, "enabled", lambda environment: (changed,))
    with pytest.raises(SystemExit, match=r"fp8_paged_mqa_logits_torch_sm120 is not the function.*renew the hash"):
        hooks.activate()
    assert not hooks.is_replaced(LOGITS_TORCH)


@pytest.mark.parametrize("hook", [hook for hook in HOOKS if hook.relies_on], ids=lambda hook: hook.function)
def test_a_changed_function_that_a_hook_counts_on_is_named(hook: Hook) -> None:
    path, _ = hook.relies_on[-1]
    changed = replace(hook, relies_on=(*hook.relies_on[:-1], (path, "0" * 64)))
    with pytest.raises(LookupError, match=f"{path} is not the function that {hook.op} was written against"):
        hooks.require_upstream(changed)


def test_a_missing_function_ends_the_process_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = replace(LOGITS_TORCH, target=LOGITS_TORCH.owner + ".gone")
    monkeypatch.setattr(hooks, "enabled", lambda environment: (gone,))
    with pytest.raises(SystemExit, match="gone"):
        hooks.activate()


def test_a_hook_that_did_not_take_effect_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    monkeypatch.setattr(registry.HookRegistry, "apply_hooks", classmethod(lambda cls: None))
    monkeypatch.setenv(TOPK_V1.switch, "1")
    with pytest.raises(SystemExit, match="was not replaced"):
        hooks.activate()


def test_nothing_is_replaced_when_no_switch_is_on() -> None:
    hooks.activate()
    assert not any(hooks.is_replaced(hook) for hook in HOOKS)
    assert not hooks.REPORT.exists()


def test_every_switch_replaces_its_functions_and_reports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for hook in HOOKS:
        monkeypatch.setenv(hook.switch, "1")
    hooks.activate()
    assert all(hooks.is_replaced(hook) for hook in HOOKS)
    assert json.loads(hooks.REPORT.read_text()) == [hook.target for hook in HOOKS]


def test_the_old_switch_still_turns_its_op_on() -> None:
    for alias, switch in ALIASES.items():
        assert enabled({alias: "1"}) == tuple(hook for hook in HOOKS if hook.switch == switch) != ()


def test_a_switch_that_is_neither_on_nor_off_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOPK_V1.switch, "maybe")
    with pytest.raises(SystemExit, match="'maybe': expected 1 or 0"):
        hooks.activate()


def logits_arguments(lengths: list[int], heads: int = 64) -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)
    rows, pages = len(lengths), -(-max(lengths) // 64)
    values = torch.randn(rows * pages * 64, 128, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(rows * pages, 64, generator=generator) + 0.5
    cache = torch.cat([values.reshape(rows * pages, -1), scales.view(torch.uint8)], dim=1)
    return {
        "q_fp8": torch.randn(rows, 1, heads, 128, generator=generator).to(torch.float8_e4m3fn),
        "kvcache_fp8": cache.reshape(rows * pages, 64, 1, 132),
        "weight": torch.randn(rows, heads, generator=generator),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "page_table": torch.randperm(rows * pages, generator=generator).to(torch.int32).reshape(rows, pages),
        "deep_gemm_metadata": None,
        "max_seq_len": pages * 64,
        "clean_logits": False,
    }


def test_indexer_logits_through_the_hook_equal_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    given = logits_arguments([200, 64, 1])
    theirs = function(LOGITS_TORCH)(**given)
    monkeypatch.setenv(LOGITS_TORCH.switch, "1")
    hooks.activate()
    before = calls(LOGITS_TORCH, "ours")
    ours = function(LOGITS_TORCH)(**given)
    assert calls(LOGITS_TORCH, "ours") == before + 1
    for row, length in enumerate([200, 64, 1]):
        torch.testing.assert_close(ours[row, :length], theirs[row, :length], rtol=2e-2, atol=0.5)


def test_what_the_op_does_not_take_goes_to_sglang_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    given = logits_arguments([70], heads=32)
    theirs = function(LOGITS_TORCH)(**given)
    monkeypatch.setenv(LOGITS_TORCH.switch, "1")
    hooks.activate()
    before = calls(LOGITS_TORCH, "upstream")
    assert torch.equal(function(LOGITS_TORCH)(**given)[:, :70], theirs[:, :70])
    assert calls(LOGITS_TORCH, "upstream") == before + 1


def test_checking_runs_both_and_reports_the_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOGITS_TORCH.switch, "1")
    monkeypatch.setenv(hooks.CHECK, "1")
    hooks.activate()
    function(LOGITS_TORCH)(**logits_arguments([200, 64]))
    assert 0 < hooks._metrics()[1].labels(LOGITS_TORCH.op, LOGITS_TORCH.function)._value.get() < 1e-2


@pytest.mark.parametrize("hook", (TOPK_V1, TOPK_V2), ids=lambda hook: hook.function)
def test_checking_topk_reports_the_share_of_other_tokens(hook: Hook) -> None:
    lengths, scores = torch.tensor([600], dtype=torch.int32), torch.randn(1, 640)
    table, plan = torch.arange(10, dtype=torch.int32).reshape(1, 10), () if hook is TOPK_V1 else (None,)
    given = (scores, lengths, table, torch.empty(1, 512, dtype=torch.int32), 64, *plan)

    def upstream(scores, lengths, table, out, *rest):
        # Every other token is another one than ours took.
        out.copy_(given[3])
        out[:, ::2] = -5

    replacement = hooks.Replacement(hook, (), checked=True)
    replacement(upstream, *given)
    assert hooks._metrics()[1].labels(hook.op, hook.function)._value.get() >= 0.4


def test_topk_through_the_hook_takes_the_best_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    indexer = importlib.import_module("sglang.srt.layers.attention.dsv4.indexer")
    lengths = torch.tensor([1000, 3], dtype=torch.int32)
    scores = torch.randn(2, 1024, generator=torch.Generator().manual_seed(2))
    table = torch.randperm(32, generator=torch.Generator().manual_seed(3)).to(torch.int32).reshape(2, 16)
    theirs, raw_theirs, ours, raw_ours = (torch.empty(2, 512, dtype=torch.int32) for _ in range(4))
    indexer.topk_transform_pytorch_vectorized(scores, lengths, table, theirs, 64, raw_theirs)
    monkeypatch.setenv(TOPK_V1.switch, "1")
    hooks.activate()
    for hook, plan in ((TOPK_V1, ()), (TOPK_V2, (None,))):
        ours.fill_(-7)
        function(hook)(scores, lengths, table, ours, 64, *plan, raw_ours)
        assert torch.equal(ours.sort(dim=1).values, theirs.sort(dim=1).values)
        assert torch.equal(raw_ours.sort(dim=1).values, raw_theirs.sort(dim=1).values)


def test_checking_topk_leaves_what_ours_wrote_as_it_is() -> None:
    lengths, scores = torch.tensor([600], dtype=torch.int32), torch.randn(1, 640)
    table = torch.arange(10, dtype=torch.int32).reshape(1, 10)

    def upstream(scores, lengths, table, out, page_size, *rest):
        out.copy_(ours.flip(1))
        rest[-1].fill_(-9)

    for adapter, plan in ((adapters.TopkIndices(()), ()), (adapters.TopkIndicesV2(()), (None,))):
        ours, raw = (torch.empty(1, 512, dtype=torch.int32) for _ in range(2))
        given = (scores, lengths, table, ours, 64, *plan, raw)
        adapter.run(*given)
        before = ours.clone(), raw.clone()
        assert adapter.error(upstream, None, *given) == 0
        assert torch.equal(ours, before[0]) and torch.equal(raw, before[1])


def cache_of(pages: int, page: int, generator: torch.Generator) -> torch.Tensor:
    """SGLang's view of a cache with random tokens of moderate size."""
    stride = page_bytes(page)
    raw = torch.zeros(pages, stride, dtype=torch.uint8)
    data = raw[:, : page * 576].view(pages, page, 576)
    nope = torch.randn(pages, page, 448, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    rope = torch.randn(pages, page, 64, generator=generator).to(torch.bfloat16).view(torch.uint8)
    data.copy_(torch.cat([nope, rope.reshape(pages, page, 128)], dim=2))
    raw[:, page * 576 : page * 584] = 127
    return raw.as_strided((pages, page, 1, 584), (stride, 584, 584, 1))


def test_attention_through_the_hook_equals_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(SPARSE_MLA.owner)
    monkeypatch.setattr(module, "_sm120_default_backend", "torch")
    generator = torch.Generator().manual_seed(4)
    given = {
        "q": torch.randn(2, 1, 16, 512, generator=generator).to(torch.bfloat16),
        "k_cache": cache_of(2, 64, generator),
        "head_dim_v": 512,
        "softmax_scale": 512**-0.5,
        "indices": torch.randint(0, 128, (2, 1, 64), generator=generator).to(torch.int32),
        "topk_length": torch.tensor([64, 5], dtype=torch.int32),
        "attn_sink": torch.randn(16, generator=generator),
        "extra_k_cache": cache_of(3, 64, generator),
        "extra_indices_in_kvcache": torch.randint(0, 192, (2, 1, 128), generator=generator).to(torch.int32),
        "extra_topk_length": torch.tensor([100, 1], dtype=torch.int32),
    }
    theirs = function(SPARSE_MLA)(**given)[0]
    monkeypatch.setenv(SPARSE_MLA.switch, "1")
    monkeypatch.setenv(hooks.CHECK, "1")
    hooks.activate()
    before = calls(SPARSE_MLA, "ours")
    ours = function(SPARSE_MLA)(**given)[0]
    assert calls(SPARSE_MLA, "ours") == before + 1 and ours.shape == theirs.shape
    assert 0 < hooks._metrics()[1].labels(SPARSE_MLA.op, SPARSE_MLA.function)._value.get() < 1e-2
    assert (ours - theirs).float().norm() / theirs.float().norm() < 1e-2
