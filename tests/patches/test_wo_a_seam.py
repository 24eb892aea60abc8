"""The place that a plug-in gets between attention and wo_b."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.models import deepseek_v4
from sglang.srt.models.deepseek_v4 import MQALayer

TOKENS, HEADS, DIM, GROUPS = 3, 4, 8, 2
NOBODY = SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False, is_target_verify=lambda: False)


class OwnSteps(Exception):
    """SGLang's own steps have begun."""


def forward(monkeypatch: pytest.MonkeyPatch, *, fp8: bool = True) -> tuple[Any, torch.Tensor]:
    """What reaches wo_b, and attention's output."""
    out = torch.randn(TOKENS, HEADS, DIM)

    def own_steps(*_: Any, **__: Any) -> None:
        raise OwnSteps

    layer = SimpleNamespace(
        alt_streams=None,
        attn_mqa=None,
        compress_ratio=0,
        compressor=None,
        freqs_cis=None,
        head_dim=DIM,
        is_dsv41=False,
        n_local_groups=GROUPS,
        n_local_heads=HEADS,
        q_head_norm=True,
        qk_rope_head_dim=2,
        use_flashinfer_mxfp8_wo_b=False,
        use_fused_wo_a=False,
        use_mega_attention=False,
        use_npu_arch35_mxfp8_wo_a=False,
        wo_a_fp8=fp8,
        _forward_prepare=lambda *_, **__: (out.clone(), None),
        _kernel_num_heads=lambda tokens: HEADS,
        _local_attn_sink=lambda heads: None,
        _multi_stream_bs_limit=0,
        _project_wo_b=lambda o, defer_all_reduce: o,
    )
    backend = SimpleNamespace(forward=lambda **_: out)
    monkeypatch.setattr(deepseek_v4, "get_attn_backend", lambda: backend)
    monkeypatch.setattr(deepseek_v4, "get_attn_tp_context", lambda: SimpleNamespace(input_scattered=False))
    monkeypatch.setattr(deepseek_v4, "get_forward", lambda: SimpleNamespace(sp_active=False))
    monkeypatch.setattr(deepseek_v4, "fused_rope_inplace", own_steps)
    x = torch.zeros(TOKENS, DIM)
    return MQALayer.forward(layer, x, torch.arange(TOKENS), SimpleNamespace(forward_mode=NOBODY)), out


def test_what_the_plugin_returns_goes_to_wo_b(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def plugin(layer: Any, o: torch.Tensor, positions: torch.Tensor) -> str:
        given.append((o, positions.tolist()))
        return "of the plug-in"

    monkeypatch.setattr(deepseek_v4, "fused_inverse_rope_wo_a", plugin)
    result, out = forward(monkeypatch)
    assert result == "of the plug-in"
    (o, positions) = given[0]
    assert torch.equal(o, out) and positions == list(range(TOKENS))


def test_without_a_plugin_sglangs_own_steps_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert deepseek_v4.fused_inverse_rope_wo_a(None, torch.zeros(1), torch.zeros(1)) is None
    with pytest.raises(OwnSteps):
        forward(monkeypatch)


def test_a_bf16_weight_is_never_the_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepseek_v4, "fused_inverse_rope_wo_a", lambda *_: "of the plug-in")
    with pytest.raises(OwnSteps):
        forward(monkeypatch, fp8=False)
