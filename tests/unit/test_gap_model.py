"""The roofline's arithmetic: by hand, against a measured step's bytes, and what must hold for every setting."""

import json
from math import comb
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm120_kernels.gpus import H200, RTX_PRO_6000
from sm120_kernels.shapes import EXPERTS, LAYERS, RATIOS, TOP_EXPERTS, Rank, Work, distinct_experts

from deploy.gap.model import (
    AllReduce,
    Setting,
    Speculation,
    all_reduce_seconds,
    assumptions,
    ceiling,
    decode_step,
    prefill,
    shares,
    step_budget,
)

RESULTS = Path(__file__).parents[2] / "kernels/benchmarks/results/decode_step.json"
PLAIN = Setting(RTX_PRO_6000)


def settings(**fixed: object) -> st.SearchStrategy[Setting]:
    return st.builds(
        Setting,
        gpu=st.sampled_from([RTX_PRO_6000, H200]),
        ranks=st.sampled_from([2, 4, 8]),
        engines=st.integers(1, 4),
        variant=st.sampled_from(["mxfp4", "nvfp4"]),
        kernels=st.sampled_from(["sglang", "sm120"]),
        all_reduce=st.sampled_from(["nccl", "ipc"]),
        **{name: st.just(value) for name, value in fixed.items()},
    )


def test_the_bytes_are_those_that_the_benchmark_counted_on_its_tensors() -> None:
    row = next(row for row in json.loads(RESULTS.read_text())["rows"] if row["way"] == "ours")
    work = Work.decode([row["context"] - i for i in range(row["requests"])])
    found = Rank(4).step(work, [row["experts_hit"]] * LAYERS, head=False)
    assert {name: round(cost.bytes) for name, cost in found.items()} == row["bytes_by_category"]


@given(st.integers(1, 6))
def test_the_expected_number_of_experts_is_exact(tokens: int) -> None:
    # By counting: an expert stays out of a token's six in C(255, 6) of C(256, 6) cases, independently of other tokens.
    missed = (comb(EXPERTS - 1, TOP_EXPERTS) / comb(EXPERTS, TOP_EXPERTS)) ** tokens
    assert distinct_experts(tokens) == pytest.approx(EXPERTS * (1 - missed))


def test_sixteen_tokens_hit_about_eighty_experts_and_read_their_ten_gigabytes() -> None:
    assert distinct_experts(16) == pytest.approx(80.8, abs=0.1)
    experts = decode_step(16, 8192, PLAIN)
    part = next(part for part in experts.parts if part.name == "experts")
    # design: "about 10.7 GB of FP4 experts", here with the shared one and one more hit a layer.
    assert part.bytes / 1e9 == pytest.approx(11.8, rel=0.02)


@given(settings(), st.integers(1, 128), st.integers(1, 131072))
def test_nothing_is_faster_than_memory_and_products(setting: Setting, users: int, context: int) -> None:
    found = ceiling(users, context, setting)
    assert found.step.seconds >= found.step.roofline > 0
    assert found.roofline_tokens_per_second >= found.tokens_per_second > 0
    assert found.step.seconds == pytest.approx(sum(part.seconds for part in found.step.parts))


@given(settings(), st.integers(1, 64), st.integers(1, 65536))
def test_more_requests_and_more_context_never_make_a_step_shorter(setting: Setting, users: int, context: int) -> None:
    step = decode_step(users, context, setting).seconds
    assert decode_step(users + 1, context, setting).seconds >= step
    assert decode_step(users, context * 2, setting).seconds >= step


@given(st.integers(0, 200), st.integers(1, 8))
def test_engines_get_equal_shares(users: int, engines: int) -> None:
    found = shares(users, engines)
    assert sum(found) == users and len(found) == engines and max(found) - min(found) <= 1


@pytest.mark.parametrize(("way", "seconds"), [("nccl", 205e-6), ("ipc", 5.3e-6)])
def test_an_all_reduce_takes_what_sglang_says_of_it(way: AllReduce, seconds: float) -> None:
    assert all_reduce_seconds(12288, Setting(RTX_PRO_6000, ranks=8, all_reduce=way)) == pytest.approx(seconds)


@given(st.integers(1, 1 << 28), st.sampled_from([1, 2, 4, 8]))
def test_ipc_is_never_slower_than_the_ring_it_falls_back_to(message: int, ranks: int) -> None:
    ring, ipc = (all_reduce_seconds(message, Setting(RTX_PRO_6000, ranks, all_reduce=w)) for w in ("nccl", "ipc"))
    assert ipc <= ring
    assert (ring == 0) == (ranks == 1)


@given(st.integers(1, 5000), st.integers(1, 3000))
def test_a_prompt_in_chunks_attends_to_as_much_as_in_one(prompt: int, chunk: int) -> None:
    whole = Work.prefill(prompt)
    parts = [Work.prefill(min(chunk, prompt - start), start) for start in range(0, prompt, chunk)]
    assert sum(p.tokens for p in parts) == whole.tokens
    assert sum(p.window for p in parts) == whole.window
    assert sum(p.scored for p in parts) == whole.scored
    for ratio in (4, 128):
        assert sum(p.compressed[ratio] for p in parts) == whole.compressed[ratio]
    assert len(prefill(prompt, chunk, PLAIN)) == len(parts)


def test_the_last_token_of_a_prompt_sees_what_a_decode_step_sees() -> None:
    before, new = Work.prefill(4095), Work.decode([4096])
    last = Work.prefill(4096)
    assert last.window - before.window == new.window
    assert {r: last.compressed[r] - before.compressed[r] for r in (4, 128)} == new.compressed
    assert last.scored - before.scored == new.scored


@given(st.sampled_from(["eagle", "dspark"]), st.integers(1, 64))
def test_a_speculating_step_costs_more_and_is_cheaper_a_token_if_all_is_kept(way: Speculation, users: int) -> None:
    plain = ceiling(users, 2048, PLAIN)
    kept = 4 if way == "eagle" else 8
    speculating = ceiling(users, 2048, Setting(RTX_PRO_6000, speculation=way, accepted=kept))
    assert speculating.step.seconds > plain.step.seconds
    assert speculating.tokens_per_second > plain.tokens_per_second


def test_the_target_leaves_sixteen_milliseconds() -> None:
    assert step_budget(1000, 16) == 0.016
    assert step_budget(1000, 16, accepted=2) == 0.032


def test_every_setting_says_what_it_assumes() -> None:
    said = assumptions(Setting(RTX_PRO_6000, speculation="eagle", accepted=2.5))
    assert any("1.79 TB/s" in line for line in said) and any("2.5 kept" in line for line in said)
    assert any("NCCL" in line for line in said)
    assert not any("all-reduce:" in line for line in assumptions(Setting(RTX_PRO_6000, ranks=1)))
    assert len(RATIOS) == LAYERS
