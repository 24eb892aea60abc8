"""The line of diagnosis, on made-up samples of what was seen on real hosts."""

from dataclasses import replace

import lookalike
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookalike import EIGHT_GPUS, host

from deploy.host.probe_gpus import sample_gpus
from deploy.status.diagnosis import Kind, diagnose, tokens_per_second
from deploy.status.sample import EngineSample, GpuSample, Sample, parse_engine

LIMIT = 600.0


def window(
    gpu: GpuSample, *, seconds: float = 8.0, running: float = 16, tokens: float = 100.0, answers: bool = True
) -> list[Sample]:
    """Nine samples of a role of four equal GPUs; the engine makes `tokens` a second."""
    return [
        Sample(
            at=seconds * step / 8,
            role="decode",
            gpus=tuple(replace(gpu, index=index) for index in range(4)),
            engine=EngineSample(running=running, tokens=1000 + tokens * seconds * step / 8) if answers else None,
        )
        for step in range(9)
    ]


def gpu(use: float, watts: float, memory: float = 0.1, **more: float | tuple[str, ...]) -> GpuSample:
    seen = GpuSample(index=0, utilisation=use, memory_utilisation=memory, power=watts, power_limit=LIMIT)
    return replace(seen, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("samples", "kind"),
    [
        # The campaign's signature: 100 % utilisation, 190 of 600 W, 11-14 % memory utilisation.
        (window(gpu(1.0, 190, 0.13)), Kind.LATENCY),
        # One-shot all-reduce that never completes: 100 % utilisation at 85-98 W.
        (window(gpu(1.0, 92, 0.0), tokens=0), Kind.STUCK),
        (window(gpu(1.0, 92, 0.0), answers=False), Kind.STUCK),
        # The same power while tokens flow, or for a moment, or without requests, is no hang.
        (window(gpu(1.0, 92, 0.0)), Kind.LATENCY),
        (window(gpu(1.0, 92, 0.0), tokens=0, seconds=1), Kind.LATENCY),
        (window(gpu(1.0, 92, 0.0), tokens=0, running=0), Kind.LATENCY),
        (window(gpu(0.99, 380, 0.85)), Kind.MEMORY),
        (window(gpu(0.99, 580, 0.4)), Kind.COMPUTE),
        (window(gpu(0.9, 250, 0.2, transfer=50e9, link=63e9)), Kind.PCIE),
        (
            window(gpu(1.0, 200, 0.3, throttle=("hardware thermal slowdown",), clock=900, clock_max=2430)),
            Kind.THROTTLED,
        ),
        # At the power limit, or a reason that does not slow the clock, is no fault.
        (window(gpu(1.0, 590, 0.3, throttle=("software power cap",), clock=1500, clock_max=2430)), Kind.COMPUTE),
        (window(gpu(1.0, 590, 0.3, throttle=("hardware slowdown",), clock=2400, clock_max=2430)), Kind.COMPUTE),
        (window(gpu(0.0, 35, 0.0), running=0, tokens=0), Kind.IDLE),
        (window(gpu(0.01, 80, 0.0), running=3, tokens=0), Kind.WAITING),
        (window(gpu(0.6, 300, 0.3)), Kind.MIXED),
        ([], Kind.UNKNOWN),
        ([Sample(0, "decode")], Kind.UNKNOWN),
        (window(GpuSample(0)), Kind.UNKNOWN),
    ],
)
def test_signatures(samples: list[Sample], kind: Kind) -> None:
    assert diagnose(samples).kind == kind


def test_the_line_carries_its_numbers_and_what_to_do() -> None:
    text = str(diagnose(window(gpu(1.0, 190, 0.13))))
    for words in ("latency-bound", "100% busy", "32% of power", "13% memory utilisation", "→"):
        assert words in text


SHARES = st.none() | st.floats(0, 1)


@given(
    st.lists(
        st.builds(
            Sample,
            at=st.floats(0, 1e6),
            role=st.just("decode"),
            gpus=st.lists(
                st.builds(
                    GpuSample,
                    index=st.integers(0, 7),
                    utilisation=SHARES,
                    memory_utilisation=SHARES,
                    power=st.none() | st.floats(0, 1000),
                    power_limit=st.none() | st.floats(0, 1000),
                    transfer=st.none() | st.floats(0, 1e11),
                    link=st.none() | st.floats(0, 1e11),
                    throttle=st.lists(st.sampled_from(["hardware slowdown", "software power cap"])).map(tuple),
                ),
                max_size=4,
            ).map(tuple),
            engine=st.none() | st.builds(EngineSample, running=st.floats(0, 99), tokens=st.floats(0, 1e9)),
        ),
        max_size=8,
    )
)
def test_any_samples_give_a_diagnosis(samples: list[Sample]) -> None:
    ordered = sorted(samples, key=lambda sample: sample.at)
    assert str(diagnose(ordered))
    assert (tokens_per_second(ordered) or 0) >= 0


@given(st.floats(0.5, 0.94), st.floats(100, 500))
def test_a_gpu_that_is_not_busy_is_never_called_stuck_or_latency_bound(use: float, watts: float) -> None:
    assert diagnose(window(gpu(use, watts, 0.1), tokens=0)).kind not in {Kind.STUCK, Kind.LATENCY}


def test_tokens_per_second_survive_gaps_and_notice_a_restart() -> None:
    samples = window(gpu(1, 200), tokens=50, seconds=8)
    assert tokens_per_second(samples) == pytest.approx(50)
    with_gap = [replace(sample, engine=None) if 2 < number < 6 else sample for number, sample in enumerate(samples)]
    assert tokens_per_second(with_gap) == pytest.approx(50)
    restarted = [*samples, Sample(9, "decode", engine=EngineSample(tokens=3))]
    assert tokens_per_second(restarted) is None
    assert tokens_per_second(samples[:1]) is None


def test_an_engines_page_is_read_over_all_ranks() -> None:
    page = (
        '# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{tp_rank="0"} 16.0\n'
        'sglang:num_running_reqs{tp_rank="1"} 16.0\n'
        "# TYPE sglang:num_queue_reqs gauge\nsglang:num_queue_reqs 2.0\n"
        "# TYPE sglang:num_decode_transfer_queue_reqs gauge\nsglang:num_decode_transfer_queue_reqs 1.0\n"
        "# TYPE sglang:token_usage gauge\nsglang:token_usage 0.25\n"
        "# TYPE sglang:kv_transfer_speed_gb_s gauge\nsglang:kv_transfer_speed_gb_s 11.5\n"
        '# TYPE sglang:realtime_tokens counter\nsglang:realtime_tokens_total{mode="decode"} 700.0\n'
        'sglang:realtime_tokens_total{mode="prefill_compute"} 300.0\n'
        'sglang:realtime_tokens_total{mode="prefill_cache"} 5000.0\n'
    )
    assert parse_engine(page) == EngineSample(running=16, queued=3, tokens=1000, kv_usage=0.25, transfer_gb_s=11.5)


def test_gpus_are_sampled_with_their_link() -> None:
    rates = "# gpu  rxpci  txpci\n# Idx   MB/s   MB/s\n" + "".join(f"  {index}  20000  31500\n" for index in range(8))
    samples = sample_gpus(host(EIGHT_GPUS).answering("nvidia-smi dmon", rates))
    assert [sample.index for sample in samples] == list(range(8))
    assert samples[0].transfer == 31.5e9 and samples[0].link == pytest.approx(63e9, rel=0.01)
    assert samples[0].power_limit == 600 and samples[0].utilisation == 0
    assert sample_gpus(lookalike.no_gpu()) == []
