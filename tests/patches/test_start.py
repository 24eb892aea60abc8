"""What a server makes of its arguments and environment before it starts."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.arg_groups import deepseek_v4_hook, model_hook
from sglang.srt.runtime_context import override_platform

TOPK_V2 = "SGLANG_OPT_USE_TOPK_V2"
ALLOW = "SGLANG_ALLOW_DSV4_PD_SPECULATION"


class Settings(SimpleNamespace):
    """Server arguments that are None unless a test sets them."""

    def __getattr__(self, name: str) -> None:
        return None


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Resolves the environment of DeepSeek-V4 on sm_120; all other steps of the resolver are left out."""
    hf_config = SimpleNamespace(architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4")
    model = SimpleNamespace(hf_config=hf_config, decision_config=None)
    for name, stand_in in {
        "resolving_view": lambda _: Settings(model_path="model", dcp_size=1, pp_size=1, ep_size=1),
        "model_config_of": lambda _: model,
        "collect_model_override_declarations": lambda *_: [],
        "get_linear_attn_spec": nothing,
        "declare_resolution": nothing,
        "validate_declarations": nothing,
        "handle_mamba_radix_cache": nothing,
        "run_post_process_pass": nothing,
    }.items():
        monkeypatch.setattr(model_hook, name, stand_in)
    for name in ("apply_deepseek_v4_defaults", "validate_deepseek_v41_features", "validate_deepseek_v4_cp"):
        monkeypatch.setattr(deepseek_v4_hook, name, nothing)

    def run() -> None:
        with override_platform(is_sm120=True, is_npu=False, is_hip=False):
            model_hook.handle_model_specific_adjustments(SimpleNamespace(_resolved_overrides=[]))

    # The resolver writes to the environment, where other tests would find it.
    for name in ("FP8_WO_A_GEMM", "USE_TOPK_V2", "USE_TILELANG_MHC_PRE", "FUSE_MHC_POST_PRE", "DEEPGEMM_HC_PRENORM"):
        monkeypatch.setenv(f"SGLANG_OPT_{name}", "")
        monkeypatch.delenv(f"SGLANG_OPT_{name}")
    for name in ("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "SGLANG_OPT_USE_TILELANG_INDEXER"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return run


def test_topk_v2_stays_on_where_it_is_asked_for(resolve: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOPK_V2, "1")
    resolve()
    assert model_hook.envs.SGLANG_OPT_USE_TOPK_V2.get() is True


def test_unchanged_topk_v2_is_off_unless_asked_for(resolve: Callable[[], None]) -> None:
    resolve()
    assert model_hook.envs.SGLANG_OPT_USE_TOPK_V2.get() is False


# Upstream has a switch for each of these by now; a release that forces one again fails here.
@pytest.mark.parametrize(
    ("switch", "value"),
    [
        ("SGLANG_OPT_FP8_WO_A_GEMM", "1"),
        ("SGLANG_OPT_DEEPGEMM_HC_PRENORM", "1"),
        ("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "0"),
        ("SGLANG_OPT_USE_TILELANG_INDEXER", "0"),
        ("SGLANG_OPT_USE_TILELANG_MHC_PRE", "1"),
    ],
)
def test_unchanged_each_deepgemm_path_is_chosen_by_itself(
    resolve: Callable[[], None], monkeypatch: pytest.MonkeyPatch, switch: str, value: str
) -> None:
    monkeypatch.setenv(switch, value)
    resolve()
    assert getattr(model_hook.envs, switch).get() is (value == "1")


def settings(**values: Any) -> Settings:
    return Settings(dsv4_attn_backend="flashmla", max_running_requests=8, speculative_eagle_topk=1, **values)


def apply(monkeypatch: pytest.MonkeyPatch, arguments: Settings, model_type: str = "deepseek_v4") -> None:
    """Check server arguments for DeepSeek-V4."""
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type))
    monkeypatch.setattr(deepseek_v4_hook, "resolving_view", lambda _: arguments)
    monkeypatch.setattr(deepseek_v4_hook, "model_config_of", lambda _: model)
    monkeypatch.setattr(deepseek_v4_hook, "run_post_process_pass", nothing)
    deepseek_v4_hook.apply_deepseek_v4_defaults(arguments, "DeepseekV4ForCausalLM")


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("algorithm", ["EAGLE", "DSPARK"])
def test_a_role_with_speculation_is_refused_with_the_reason_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, role: str, algorithm: str
) -> None:
    monkeypatch.delenv(ALLOW, raising=False)
    with pytest.raises(ValueError, match=f"--speculative-algorithm {algorithm} is refused .*{ALLOW}=1"):
        apply(monkeypatch, settings(disaggregation_mode=role, speculative_algorithm=algorithm))


@pytest.mark.parametrize(
    ("arguments", "allow", "model_type"),
    [
        ({"disaggregation_mode": "null", "speculative_algorithm": "DSPARK"}, "0", "deepseek_v4"),
        ({"disaggregation_mode": "decode", "speculative_algorithm": None}, "0", "deepseek_v4"),
        ({"disaggregation_mode": "decode", "speculative_algorithm": "DSPARK"}, "1", "deepseek_v4"),
        ({"disaggregation_mode": "decode", "speculative_algorithm": "DSPARK"}, "0", "deepseek_v41"),
    ],
)
def test_unchanged_anything_else_may_start(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], allow: str, model_type: str
) -> None:
    monkeypatch.setenv(ALLOW, allow)
    apply(monkeypatch, settings(**arguments), model_type)
