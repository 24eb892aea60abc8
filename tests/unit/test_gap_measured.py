"""The campaign's arithmetic, the published records, and what a measurement lacks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sm120_kernels.gpus import RTX_PRO_6000

from deploy.gap.measured import Measured, by_category, missing, of_throughput, split
from deploy.gap.model import VERIFIED, Part, Pass, Setting, decode_step, step_budget
from deploy.gap.published import POINTS, check

PLAIN = Setting(RTX_PRO_6000)
ONE, SIXTEEN = decode_step(1, 256, PLAIN), decode_step(16, 256, PLAIN)


def test_the_campaigns_gap_is_a_factor_of_43() -> None:
    found = missing(Measured(16, 26.6, 0.696), SIXTEEN, RTX_PRO_6000, step_budget(1000, 16))
    assert found.budget == 0.016
    assert found.target_factor == pytest.approx(43, abs=0.6)


def test_94_milliseconds_are_43_layers_of_2_2_which_are_30_launches_of_73_microseconds() -> None:
    found = missing(Measured(1, 11.5, 0.094), ONE, RTX_PRO_6000)
    assert found.layer * 1e3 == pytest.approx(2.2, abs=0.02)
    thirty = Pass((Part("launches", 0.0, "launches", count=43 * 30),))
    with_thirty = replace(found, launch=found.measured.step / thirty.parts[0].count)
    assert with_thirty.launch * 1e6 == pytest.approx(73, abs=0.2)
    assert found.target_factor is None


def test_sixteen_times_the_batch_cost_7_4_times_the_step_so_launches_alone_do_not_explain_it() -> None:
    levels = [
        missing(Measured(1, 11.5, 0.094), ONE, RTX_PRO_6000),
        missing(Measured(16, 26.6, 0.696), SIXTEEN, RTX_PRO_6000),
    ]
    found = split(levels[::-1])
    assert found is not None
    assert found.batch == 16 and found.step == pytest.approx(7.4, abs=0.01)
    assert found.fixed + found.growing == pytest.approx(levels[1].excess)
    # Redundant work (the KV cache re-read by each head) and not launches was the larger part.
    assert found.growing > 5 * found.fixed
    assert split(levels[:1]) is None


@pytest.mark.parametrize(("watts", "busy", "verdict"), [(190, 100, True), (520, 100, False), (190, 40, False)])
def test_busy_gpus_that_draw_little_power_wait(watts: float, busy: float, verdict: bool) -> None:
    level = Measured(16, 26.6, 0.696, watts, busy)
    assert missing(level, SIXTEEN, RTX_PRO_6000).latency_bound is verdict


def test_without_gpu_samples_nothing_is_said_of_latency() -> None:
    assert missing(of_throughput(26.6, 16), SIXTEEN, RTX_PRO_6000).latency_bound is None


@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p.source} {p.ranks} GPUs C={p.users} {p.tokens_per_second}")
def test_no_record_is_above_the_roofline_and_its_acceptance_is_possible(point: object) -> None:
    assert isinstance(point, type(POINTS[0]))
    found = check(point)
    assert point.tokens_per_second < found.roofline
    if point.speculation:
        assert any(1 <= tokens <= VERIFIED[way] for way, tokens in found.accepted.items())


def test_the_stated_errors_are_those_of_the_model() -> None:
    # docs/gap.md states them.
    errors = [found.error for point in POINTS if (found := check(point)).error is not None]
    assert errors == pytest.approx([0.09, 0.50, 0.17], abs=0.005)


def test_nccl_as_sglangs_docstring_has_it_refutes_the_record_of_one_request() -> None:
    # 81 tok/s against 183.5 published: there, an all-reduce on 4 GPUs took less than that.
    assert check(POINTS[0], "nccl").predicted < POINTS[0].tokens_per_second


TRACE = st.dictionaries(st.sampled_from(["attention", "linear", "experts", "glue", "idle"]), st.floats(0, 1))


@given(TRACE)
def test_the_shares_of_a_traced_steps_excess_add_up(profiled: dict[str, float]) -> None:
    found = by_category(profiled, SIXTEEN)
    shares = sum(row.share for row in found)
    assert shares == pytest.approx(1) or shares == 0
    assert [row.share for row in found] == sorted((row.share for row in found), reverse=True)
    assert {"experts", "all-reduce"} <= {row.name for row in found}
    assert not any(row.name in ("launches", "head") for row in found)
