"""The simulation against queueing theory, and the numbers of hosts that come of it."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sm120_kernels.gpus import RTX_PRO_6000

from deploy.gap.measured import Measured
from deploy.gap.model import Setting, decode_step
from deploy.plan.capacity import Limits, Option, host_rate, meets, plan
from deploy.plan.service import Service
from deploy.plan.simulate import WARM_SHARE, Load, simulate

PLAIN = Setting(RTX_PRO_6000, all_reduce="ipc")


@dataclass(frozen=True)
class Fixed(Service):
    """Service times given outright, to hold the queues against formulas."""

    read: float = 1.0
    pace: float = 0.1

    @property
    def prompt_seconds(self) -> float:  # type: ignore[override]
        return self.read

    def token_seconds(self, batch: int) -> float:
        return self.pace


def fixed(read: float, pace: float, answer: int = 1, slots: int = 10**9) -> Fixed:
    return Fixed(PLAIN, 100, answer, 8192, slots, read=read, pace=pace)


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.85])
def test_prompts_wait_as_in_an_m_d_1_queue(utilisation: float) -> None:
    # Mean wait of M/D/1: rho / (2 (1 - rho)) services (Pollaczek and Khinchine).
    seen = simulate(fixed(1.0, 0.0), Load(utilisation, 200_000), 1, apart=True)
    expected = 1 + utilisation / (2 * (1 - utilisation))
    # Waits of neighbours are alike: at 0.85 the mean of 140,000 of them is only so exact.
    assert float(seen.ttft.mean()) == pytest.approx(expected, rel=0.08)
    assert seen.reading == pytest.approx(utilisation, rel=0.03)


def test_littles_law_holds_for_the_batch() -> None:
    # Requests in the batch = arrivals a second x seconds of an answer, when nobody waits for a slot.
    seen = simulate(fixed(1e-9, 0.05, answer=101), Load(4.0, 5_000), 1, apart=True)
    assert seen.batch * seen.decoding == pytest.approx(4.0 * 100 * 0.05, rel=0.05)
    assert seen.percentile("tpot", 50) == pytest.approx(0.05)


def test_a_batch_of_one_is_a_queue_of_its_own() -> None:
    # M/D/1 once more, now of answers: 10 tokens of 0.05 s each, one request at a time.
    seen = simulate(fixed(1e-9, 0.05, answer=11, slots=1), Load(1.2, 50_000), 1, apart=True)
    wait = 0.6 / (2 * 0.4) * 0.5
    assert float(seen.tpot.mean()) * 10 == pytest.approx(0.5 + wait, rel=0.06)


def test_an_engine_that_does_both_decodes_only_while_it_does_not_read() -> None:
    alone = simulate(fixed(0.5, 0.01, answer=101), Load(1e-4, 3e6), 1, apart=False)
    assert alone.percentile("tpot", 50) == pytest.approx(0.01)
    # At a load of one half on reading, a token takes about twice as long.
    busy = simulate(fixed(0.5, 0.01, answer=2001), Load(1.0, 20_000), 1, apart=False)
    assert float(busy.tpot.mean()) == pytest.approx(0.02, rel=0.1)
    apart = simulate(fixed(0.5, 0.01, answer=2001), Load(1.0, 20_000), 1, apart=True)
    assert float(apart.tpot.mean()) == pytest.approx(0.01)


def test_the_same_seed_gives_the_same_and_another_seed_another() -> None:
    one, two, other = (simulate(fixed(1, 0.1, 20), Load(0.5, 500, seed), 2, apart=False) for seed in (1, 1, 2))
    assert one.ttft.tolist() == two.ttft.tolist() != other.ttft.tolist()


def test_a_queue_without_end_is_seen() -> None:
    seen = simulate(fixed(1.0, 0.0), Load(1.5, 2_000), 1, apart=True)
    assert not meets(seen, Limits())
    assert meets(simulate(fixed(1.0, 0.0), Load(0.5, 2_000), 1, apart=True), Limits())


def service(answer: int = 64, measured: tuple[Measured, ...] = ()) -> Service:
    return Service(PLAIN, 1024, answer, 8192, 64, measured)


@settings(deadline=None, max_examples=5)
@given(st.sampled_from(["pd", "replicas"]), st.floats(0.05, 0.6))
def test_a_stricter_limit_never_lets_a_host_carry_more(profile: str, tpot: float) -> None:
    option = Option("pd" if profile == "pd" else "replicas", service(), 1)
    strict, loose = (host_rate(option, Limits(tpot=limit)) for limit in (tpot / 4, tpot))
    assert strict <= loose * 1.1 <= option.most * 1.1


def test_hosts_grow_with_the_rate_and_their_promise_holds() -> None:
    option = Option("pd", service(), 1)
    limits = Limits(ttft=1.0, tpot=0.1)
    few, many = plan(option, 5.0, limits), plan(option, 100.0, limits)
    assert 0 < few.hosts < many.hosts
    assert many.hosts / few.hosts == pytest.approx(20, rel=0.5)
    for found in (few, many):
        assert found.seen is not None and meets(found.seen, limits) and found.headroom > -0.1


def test_what_no_host_can_do_is_said() -> None:
    found = plan(Option("pd", service(), 1), 1.0, Limits(tpot=1e-6))
    assert found.hosts == 0 and found.seen is None


def test_a_measured_step_counts_where_it_was_measured_and_is_carried_on_between() -> None:
    slow = (Measured(1, 10, 0.1), Measured(16, 80, 0.2))
    found = service(measured=slow)
    context = 1024 + 32
    # The measurement was made at another context; its factor over the prediction is what is carried over.
    assert found.token_seconds(1) == pytest.approx(0.1) and found.token_seconds(16) == pytest.approx(0.2)
    assert 0.1 < found.token_seconds(4) < 0.2
    factor = 0.2 / decode_step(16, context, PLAIN).seconds
    assert found.token_seconds(64) == pytest.approx(factor * decode_step(64, context, PLAIN).seconds)
    assert "measured at C=1, 16" in found.sources()[0] and "predicted" in found.sources()[1]
    assert "66%" in service().sources()[0]


@pytest.mark.slow
def test_a_thousand_hosts_are_simulated() -> None:
    seen = simulate(service(), Load(4000.0, 25), 1000, apart=True)
    one = simulate(service(), Load(4.0, 2500), 1, apart=True)
    assert seen.arrived == pytest.approx(4000 * 25 * (1 - WARM_SHARE), rel=0.05)
    # A thousand hosts of random arrivals are a thousand times one host.
    assert seen.percentile("tpot", 50) == pytest.approx(one.percentile("tpot", 50), rel=0.1)
    assert float(seen.ttft.mean()) == pytest.approx(float(one.ttft.mean()), rel=0.1)
