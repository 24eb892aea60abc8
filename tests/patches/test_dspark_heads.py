"""How many query heads the DSpark draft gives to the attention kernel of a TP4 rank."""

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention import flash_mla_sm120
from sglang.srt.model_executor import forward_context
from sglang.srt.models import deepseek_v4_dspark
from sglang.srt.models.deepseek_v4 import MqaAttentionBase
from sglang.srt.models.deepseek_v4_dspark import DSparkAttention
from sglang.srt.runtime_context import override_platform

HEADS, RANKS, DIM, TOKENS = 64, 4, 8, 6
LOCAL = HEADS // RANKS


def attention(rank: int) -> Any:
    """The draft's attention on one of four ranks, with stand-ins for its projections."""
    made = SimpleNamespace(
        alt_streams=None,
        attn=None,
        attn_sink=torch.arange(HEADS, dtype=torch.float32),
        _attn_sink_local=None,
        attn_tp_rank=rank,
        attn_tp_size=RANKS,
        freqs_cis=None,
        head_dim=DIM,
        is_dsv41=False,
        kv_proj_only=lambda x: x,
        n_heads=HEADS,
        n_local_groups=2,
        n_local_heads=LOCAL,
        o_lora_rank=1,
        q_head_norm=True,
        rope_head_dim=2,
        wo_a=SimpleNamespace(weight=torch.zeros(2, 1, LOCAL * DIM // 2)),
        wo_b=lambda value, skip_all_reduce: (value, None),
        _multi_stream_bs_limit=0,
        _store_block_kv=lambda **_: None,
        _use_fast_kernel=True,
    )
    made._kernel_num_heads = MethodType(MqaAttentionBase._kernel_num_heads, made)
    made._local_attn_sink = MethodType(MqaAttentionBase._local_attn_sink, made)
    made._compute_q = lambda x, positions, q_out: (
        torch.ones(TOKENS, LOCAL, DIM) if q_out is None else q_out.copy_(torch.ones(TOKENS, LOCAL, DIM))
    )
    return made


def heads_given(monkeypatch: pytest.MonkeyPatch, *, sm120: bool = True, rank: int = 1) -> tuple[int, torch.Tensor]:
    """Query heads and attention sink that reach the kernel."""
    given: list[tuple[int, torch.Tensor]] = []

    def forward(q: torch.Tensor, attn_sink: torch.Tensor, **_: Any) -> torch.Tensor:
        assert q[:, :LOCAL].eq(1).all()
        given.append((q.shape[1], attn_sink))
        return q.clone()

    monkeypatch.setattr(forward_context, "get_attn_backend", lambda: SimpleNamespace(forward=forward))
    monkeypatch.setattr(deepseek_v4_dspark, "_resolve_dspark_pool", lambda: SimpleNamespace(uniform_fp8=False))
    monkeypatch.setattr(deepseek_v4_dspark, "fused_rope_inplace", lambda *_, **__: None)
    monkeypatch.setattr(deepseek_v4_dspark, "_apply_wo_a_bf16_matmul", lambda o, *_, **__: o)
    mode = SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True, is_target_verify=lambda: False)
    with override_platform(is_sm120=sm120):
        out = DSparkAttention.forward(
            attention(rank), torch.arange(TOKENS), torch.zeros(TOKENS, DIM), SimpleNamespace(forward_mode=mode)
        )
    assert out.shape == (TOKENS, LOCAL * DIM)
    return given[0]


def test_a_rank_computes_its_own_heads_and_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_SM120_DSPARK_NATIVE_HEADS", raising=False)
    heads, sink = heads_given(monkeypatch)
    assert heads == LOCAL
    assert sink.tolist() == list(range(LOCAL, 2 * LOCAL))


@pytest.mark.parametrize(
    ("switch", "sm120", "backend"), [("0", True, "flashinfer"), ("1", False, "flashinfer"), ("1", True, "triton")]
)
def test_unchanged_elsewhere_heads_are_padded_to_64(
    monkeypatch: pytest.MonkeyPatch, switch: str, sm120: bool, backend: str
) -> None:
    monkeypatch.setenv("SGLANG_SM120_DSPARK_NATIVE_HEADS", switch)
    monkeypatch.setenv("SGLANG_SM120_FLASHMLA_BACKEND", backend)
    heads, sink = heads_given(monkeypatch, sm120=sm120)
    assert heads == HEADS
    assert sink[:LOCAL].tolist() == list(range(LOCAL, 2 * LOCAL))


def test_unchanged_flashinfer_decodes_the_heads_of_a_rank() -> None:
    assert flash_mla_sm120.flashinfer_dsv4_decode_supports_num_heads(LOCAL, 64)
