"""Samples of a running role: its GPUs and its engine's own counters."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from deploy.host.report import Gpu

# Bytes per second of one PCIe lane and direction after encoding (PCI Express Base Specification, 128b/130b from
# generation 3 on, 8b/10b before; generation 6 in flit mode).
_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9}

_WORK = {"prefill_compute", "decode"}


@dataclass(frozen=True)
class GpuSample:
    """One GPU at one moment; None is "not seen". Shares from 0 to 1, watts, MHz, °C, bytes per second.

    `transfer` is the busier direction of its PCIe link, `link` what one direction can carry.
    """

    index: int
    utilisation: float | None = None
    memory_utilisation: float | None = None
    power: float | None = None
    power_limit: float | None = None
    memory_used: float | None = None
    temperature: float | None = None
    clock: float | None = None
    clock_max: float | None = None
    throttle: tuple[str, ...] = ()
    transfer: float | None = None
    link: float | None = None


@dataclass(frozen=True)
class EngineSample:
    """One engine's own numbers; counters count since its start.

    Attributes:
        running: requests in the batch.
        queued: requests that wait for it.
        tokens: prompt tokens computed and answer tokens written.
        kv_usage: share of the KV cache in use.
        transfer_gb_s: speed of the last KV transfer as the engine reports it.
        acceptance: tokens a verification step accepts on average, 0 without speculation.
    """

    running: float = 0
    queued: float = 0
    tokens: float = 0
    kv_usage: float = 0
    transfer_gb_s: float = 0
    acceptance: float = 0


@dataclass(frozen=True)
class Sample:
    """A role at `at` seconds of a monotonic clock; `engine` is None if it did not answer."""

    at: float
    role: str
    gpus: tuple[GpuSample, ...] = ()
    engine: EngineSample | None = None


def gpu_sample(gpu: Gpu, transfer: float | None) -> GpuSample:
    """A sample from the driver's query and, if measured, the busier direction of the link in bytes per second."""

    def share(percent: float | None) -> float | None:
        return None if percent is None else percent / 100

    lane = _LANE.get(gpu.link.generation_max or 0)
    used = gpu.memory_used_mib / gpu.memory_mib if gpu.memory_used_mib is not None and gpu.memory_mib else None
    return GpuSample(
        index=gpu.index,
        utilisation=share(gpu.utilisation_percent),
        memory_utilisation=share(gpu.memory_utilisation_percent),
        power=gpu.power_w,
        power_limit=gpu.power_limit_w,
        memory_used=used,
        temperature=gpu.temperature_c,
        clock=gpu.clock_sm_mhz,
        clock_max=gpu.clock_sm_max_mhz,
        throttle=tuple(gpu.throttle),
        transfer=transfer,
        link=lane * gpu.link.width if lane and gpu.link.width else None,
    )


def parse_engine(metrics: str) -> EngineSample:
    """An engine's `/metrics` page (SGLang 0.5.23).

    Gauges are the same on every rank, so the highest counts; token counters are summed.

    Raises:
        ValueError: the text is not in Prometheus' format.
    """
    gauges: dict[str, float] = {}
    tokens = 0.0
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == "sglang:realtime_tokens_total" and sample.labels.get("mode") in {
                "prefill_compute",
                "decode",
            }:
                tokens += sample.value
            elif sample.name.startswith("sglang:"):
                gauges[sample.name] = max(sample.value, gauges.get(sample.name, 0.0))
    waiting = (
        "num_queue_reqs",
        "num_prefill_bootstrap_queue_reqs",
        "num_prefill_inflight_queue_reqs",
        "num_decode_prealloc_queue_reqs",
        "num_decode_transfer_queue_reqs",
    )
    return EngineSample(
        running=gauges.get("sglang:num_running_reqs", 0),
        queued=sum(gauges.get(f"sglang:{name}", 0) for name in waiting),
        tokens=tokens,
        kv_usage=gauges.get("sglang:token_usage", 0),
        transfer_gb_s=gauges.get("sglang:kv_transfer_speed_gb_s", 0),
        acceptance=gauges.get("sglang:spec_accept_length", 0),
    )
