"""Which settings can be tried, and what is refused; on the repository's own deploy.toml and compose files."""

import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm120_kernels.plugin.table import HOOKS

from deploy.spec.load import SpecFile, load, parse
from deploy.spec.model import MOE_BACKENDS, Spec, Tuned, Winner
from deploy.spec.signoff import stale, word
from deploy.stack.compose import stack_of
from deploy.stack.origins import variable_names
from deploy.tune.decide import Judgement
from deploy.tune.experiment import Comparison, Edits, Finding
from deploy.tune.signed import signed, winners
from deploy.tune.switches import (
    FLAGS,
    LISTS,
    SIZE_VARIABLES,
    WrongSetting,
    apply,
    chosen,
    comparisons,
    edited,
    refusal,
    tried,
)

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy.toml").read_text(encoding="utf-8")
REPLICAS = """profile = "replicas"
[[replica]]
gpus = [0, 1, 2, 3]
numa_node = 0
[[replica]]
gpus = [4, 5, 6, 7]
numa_node = 1
"""


def spec_of(text: str = TEXT) -> SpecFile:
    return parse(text, ROOT / "deploy.toml")


def found(text: str = TEXT) -> dict[str, Comparison]:
    spec_file = spec_of(text)
    files = stack_of(ROOT, Path(os.devnull), spec_file.spec).files
    return {one.name: one for one in comparisons(spec_file, files)}


def refused(text: str, edits: Edits, holds: Edits | None = None) -> str:
    return refusal(ROOT, spec_of(text), text, edits, holds or {})


def test_every_hook_and_every_switch_of_the_issue_is_tried() -> None:
    names = set(found())
    assert {f"variables.SM120_{hook.op.upper()}=1" for hook in HOOKS} <= names
    assert {f"engine.moe_backend={value}" for value in MOE_BACKENDS["mxfp4"][1:]} <= names
    assert {
        *("variables.NCCL_PROTO=LL", "variables.NCCL_PROTO=Simple", "variables.NCCL_ALGO=Ring", "engine.nccl=ll_ring"),
        *("variables.NCCL_P2P_LEVEL=LOC", "engine.pcie_ipc_all_reduce=true", "variables.FP8_WO_A_GEMM=1"),
        *("variables.DIRECT_SWA_KV=0", "variables.JIT_DEEPGEMM=0", "engine.speculation=eagle", "transport=p2p"),
        *("profile=replicas of 2 GPUs", "profile=replicas of 4 GPUs", "prefill.chunked_prefill_size=4096"),
    } <= names
    deeper = found(REPLICAS + '[engine]\nspeculation = "eagle"\n')
    assert {"engine.speculation_steps=2", "engine.speculation_steps=4", "profile=pd"} <= set(deeper)
    assert "variables.CHUNKED_PREFILL_SIZE=16384" in deeper


@pytest.mark.parametrize("text", [TEXT, REPLICAS, 'profile = "cpu"\n'])
def test_no_setting_is_what_holds_already_and_each_is_taken_or_refused_with_a_reason(text: str) -> None:
    for one in found(text).values():
        why = refused(text, one.edits)
        assert why == "" or one.switch in ("engine.speculation", "engine.speculation_steps", "transport"), (one, why)
        assert any(spec_of(text).spec.at(key) != value for key, value in one.edits.items())


def test_the_named_variables_have_the_defaults_that_their_kind_needs() -> None:
    files = stack_of(ROOT, Path(os.devnull), Spec()).files
    assert {*FLAGS, *LISTS, *SIZE_VARIABLES, "NCCL_P2P_LEVEL"} <= variable_names(files)
    compose = (ROOT / "compose.yaml").read_text(encoding="utf-8")
    for name in FLAGS:
        assert f"${{{name}:-0}}" in compose or f"${{{name}:-1}}" in compose
        # One line for both roles.
        assert compose.count(f"${{{name}:-") == 1


def test_a_setting_that_holds_is_tried_the_other_way_round() -> None:
    text = f'{TEXT}SM120_TOPK_INDICES = "1"\nDIRECT_SWA_KV = 0\n'
    assert {"variables.SM120_TOPK_INDICES=0", "variables.DIRECT_SWA_KV=1"} <= set(found(text))


def test_a_number_that_is_not_the_default_is_held_against_the_default() -> None:
    planted = found('profile = "cpu"\n[variables]\nCHUNKED_PREFILL_SIZE = 16\n')
    assert set(planted) == {"variables.CHUNKED_PREFILL_SIZE=2048", "variables.OMP_NUM_THREADS=2"}


@pytest.mark.parametrize(
    ("text", "edits", "words"),
    [
        (TEXT, {"engine.speculation": "eagle"}, "sglang#31466"),
        (TEXT, {"engine.moe_backend": "flashinfer_cutlass"}, "mxfp4"),
        (TEXT, {"engine.nccl": "fast"}, "not allowed"),
        (TEXT, {"engine.surprise": 1}, "unknown key"),
        (TEXT, {"variables.SM120_NOTHING": "1"}, "unknown variable"),
        (TEXT, {"engine.nccl": "ll_ring", "variables.NCCL_PROTO": "Simple"}, "set twice"),
        (TEXT, {"variables.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "allocator"),
        (TEXT, {"engine.memory_fraction": 0.4}, "no room"),
        (TEXT, {"engine.nccl": "auto"}, "changes nothing"),
        (TEXT, {"variables.FP8_WO_A_GEMM": "0"}, "changes nothing"),
        ('profile = "cpu"\n', {"engine.nccl": "ll_ring"}, "changes nothing"),
        (REPLICAS, {"transport": "p2p"}, "nothing travels"),
        (TEXT, {"profile.nothing": 1}, "no place"),
    ],
)
def test_what_cannot_be_run_is_refused_with_its_reason(text: str, edits: Edits, words: str) -> None:
    assert words in refused(text, edits)


def test_a_combination_is_held_against_what_has_won_before() -> None:
    assert refused(TEXT, {"engine.nccl": "ll_ring"}) == ""
    assert "changes nothing" in refused(TEXT, {"engine.nccl": "ll_ring"}, {"engine.nccl": "ll_ring"})


def test_a_person_names_switches_and_values() -> None:
    every = list(found().values())
    assert [one.name for one in chosen(every, ["nccl"])] == ["engine.nccl=ll_ring"]
    assert [one.op for one in chosen(every, ["Indexer_Logits"])] == ["indexer_logits"]
    assert chosen(every, []) == every
    with pytest.raises(WrongSetting, match="no switch warp_drive"):
        chosen(every, ["warp_drive"])
    one, two, three = tried(["engine.context_length=4096|8192", 'variables.DECODE_EXTRA_ARGUMENTS="--a b"'])
    assert (one.edits, two.edits) == ({"engine.context_length": 4096}, {"engine.context_length": 8192})
    assert three.edits == {"variables.DECODE_EXTRA_ARGUMENTS": "--a b"}
    assert tried(["engine.nccl=ll_ring"])[0].edits == {"engine.nccl": "ll_ring"}
    for wrong in ("engine.nccl", "=1", "a b=1"):
        with pytest.raises(WrongSetting, match="--try"):
            tried([wrong])


values = st.one_of(st.integers(0, 10**6), st.booleans(), st.text(st.characters(codec="ascii", categories=["L", "N"])))
edits_of = st.dictionaries(
    st.sampled_from(["profile", "engine.nccl", "variables.A", "router.port", "new.key", "top"]), values, max_size=5
)


@settings(max_examples=40)
@given(edits_of, st.sampled_from([TEXT, REPLICAS, "", "# only a comment\n"]))
def test_edits_set_exactly_their_keys_and_keep_every_comment(edits: Edits, text: str) -> None:
    before, after = tomllib.loads(text), tomllib.loads(changed := apply(text, edits))
    for key, value in edits.items():
        place = after
        for part in key.split("."):
            place = place[part]
        assert place == value
        table = before
        *tables, name = key.split(".")
        for part in tables:
            table = table.setdefault(part, {})
        table[name] = value
    assert before == after
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert [line for line in changed.splitlines() if line.startswith("#")] == comments


def test_replicas_of_the_same_gpus_follow_from_the_roles() -> None:
    one = found()["profile=replicas of 2 GPUs"]
    spec = edited(spec_of(), TEXT, one.edits).spec
    assert [role.gpus for role in spec.replica] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [role.numa_node for role in spec.replica] == [0, 0, 1, 1] and spec.profile == "replicas"
    back = found(REPLICAS)["profile=pd"]
    pair = edited(spec_of(REPLICAS), REPLICAS, back.edits).spec
    assert (pair.prefill.gpus, pair.decode.gpus) == ((0, 1, 2, 3), (4, 5, 6, 7))


def won(key: str, value: str | bool, ratio: float = 1.1) -> Finding:
    one = Comparison(name=f"{key}={value}", switch=key, edits={key: value})
    return Finding(one, "better", Judgement("better", 4, ratio, 1.05, 1.2), 1.0)


def sign(text: str, *findings: Finding) -> str:
    spec = spec_of(text).spec
    edits = {key: value for one in findings for key, value in one.comparison.edits.items()}
    block = Tuned(
        by="me",
        at="2026-11-30T05:00:00Z",
        host="h",
        gpu="8 x G",
        image="sha256:1",
        workload="w",
        results="r",
        results_sha256="0" * 64,
        winner=winners(findings, {key: spec.at(key) for key in edits}),
    )
    return signed(text, edits, block)


def test_the_sign_off_changes_the_values_keeps_the_file_and_is_written_anew() -> None:
    text = sign(TEXT, won("engine.nccl", "ll_ring"), won("engine.pcie_ipc_all_reduce", True))
    spec = spec_of(text).spec
    assert spec.engine.nccl == "ll_ring" and spec.engine.pcie_ipc_all_reduce and spec.tuned
    assert [(one.setting, one.was, one.now) for one in spec.tuned.winner] == [
        ("engine.nccl", "auto", "ll_ring"),
        ("engine.pcie_ipc_all_reduce", "false", "true"),
    ]
    assert set(TEXT.splitlines()) - set(text.splitlines()) == {'nccl = "auto"', "pcie_ipc_all_reduce = false"}
    again = sign(text, won("variables.FP8_WO_A_GEMM", "1"))
    assert again.count("[tuned]") == 1 and again.count("signed it off") == 1
    assert spec_of(again).spec.engine.nccl == "ll_ring"


def test_a_sign_off_that_the_file_no_longer_says_is_named() -> None:
    text = sign(TEXT, won("engine.nccl", "ll_ring"), won("variables.FP8_WO_A_GEMM", "1"))
    assert stale(spec_of(text).spec) == [] == stale(spec_of().spec)
    changed = text.replace('nccl = "ll_ring"', 'nccl = "auto"').replace('FP8_WO_A_GEMM = "1"\n', "")
    assert stale(spec_of(changed).spec) == [
        "engine.nccl is auto, and ll_ring was signed off",
        "variables.FP8_WO_A_GEMM is not set, and 1 was signed off",
    ]


def test_of_two_winners_of_one_key_the_last_is_signed() -> None:
    text = sign(TEXT, won("prefill.chunked_prefill_size", "4096"), won("prefill.chunked_prefill_size", "16384"))
    tuned = tomllib.loads(text)["tuned"]
    assert [one["now"] for one in tuned["winner"]] == ["16384"]
    assert Winner.model_validate(tuned["winner"][0]).was == "8192"


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.text()))
def test_a_value_is_one_word(value: object) -> None:
    assert word(value) == ("" if value is None else str(value).lower() if isinstance(value, bool) else str(value))


def test_the_repositorys_spec_is_read_from_disk_as_from_text() -> None:
    assert load(ROOT / "deploy.toml").spec == spec_of().spec
