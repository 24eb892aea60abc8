"""Why a role is as fast as it is: one line from a window of samples. Pure rules, tested on made-up samples."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import mean

from deploy.status.sample import GpuSample, Sample

BUSY = 0.95
IDLE = 0.05
STUCK_POWER = 0.2
"""All-reduce spinning across host bridges was seen at 85-98 W of 600 W with 100 % utilisation."""
STUCK_SECONDS = 5.0
"""No step takes so long; a first compile does, but it does not spin on the GPU."""
LATENCY_POWER = 0.5
"""A step of thousands of tiny kernels was seen at about 190 of 600 W with 100 % utilisation."""
LATENCY_MEMORY = 0.35
"""… and 11-14 % memory utilisation."""
MEMORY_BOUND = 0.6
PCIE_BOUND = 0.6
COMPUTE_POWER = 0.85
SLOW_CLOCK = 0.75


class Kind(StrEnum):
    """What holds a role back."""

    UNKNOWN = "unknown"
    IDLE = "idle"
    WAITING = "waiting"
    STUCK = "stuck all-reduce"
    THROTTLED = "throttled"
    PCIE = "PCIe-bound"
    MEMORY = "memory-bound"
    COMPUTE = "compute-bound"
    LATENCY = "latency-bound"
    MIXED = "mixed"


@dataclass(frozen=True)
class Diagnosis:
    """What holds a role back, in one line with the numbers that say so, and what to do."""

    kind: Kind
    line: str
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.line}" + (f" → {self.hint}" if self.hint else "")


def tokens_per_second(window: Sequence[Sample]) -> float | None:
    """Tokens an engine made per second over the window; None with fewer than two answers or after a restart."""
    seen = [(sample.at, sample.engine.tokens) for sample in window if sample.engine]
    if len(seen) < 2 or seen[-1][0] <= seen[0][0] or seen[-1][1] < seen[0][1]:
        return None
    return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


def diagnose(window: Sequence[Sample]) -> Diagnosis:
    """Name what holds a role back.

    Args:
        window: samples of one role, oldest first, over some seconds. A longer window is steadier; "stuck" needs at
            least STUCK_SECONDS.
    """
    gpus = [gpu for sample in window for gpu in sample.gpus]
    use = _mean([gpu.utilisation for gpu in gpus])
    if use is None:
        return Diagnosis(Kind.UNKNOWN, "no GPU to look at" if not gpus else "the driver does not say how busy they are")
    power = _mean([_share(gpu.power, gpu.power_limit) for gpu in gpus])
    memory = _mean([gpu.memory_utilisation for gpu in gpus])
    link = _mean([_share(gpu.transfer, gpu.link) for gpu in gpus])
    numbers = _numbers(use, power, memory, link)
    last = next((sample.engine for sample in reversed(window) if sample.engine), None)
    work = bool(last and last.running)

    if use < IDLE:
        if work and last:
            return Diagnosis(
                Kind.WAITING,
                f"{last.running:.0f} requests and idle GPUs ({numbers})",
                "the engine waits for the other role, a transfer, or its host threads",
            )
        return Diagnosis(Kind.IDLE, numbers)
    if use >= BUSY and power is not None and power <= STUCK_POWER and _no_progress(window):
        return Diagnosis(
            Kind.STUCK,
            f"no token for {window[-1].at - window[0].at:.0f} s at {numbers}",
            "ranks spin in an all-reduce that never completes: deploy doctor --probe, then NCCL_P2P_LEVEL",
        )
    if slow := _throttled(window):
        return Diagnosis(Kind.THROTTLED, f"{slow} ({numbers})", "airflow, power cables, power limit")
    if link is not None and link >= PCIE_BOUND:
        return Diagnosis(Kind.PCIE, numbers, "fewer bytes between GPUs: smaller TP, or a direct path (deploy doctor)")
    if memory is not None and memory >= MEMORY_BOUND:
        return Diagnosis(Kind.MEMORY, numbers, "a larger batch reads the weights no more often")
    if power is not None and power >= COMPUTE_POWER:
        return Diagnosis(Kind.COMPUTE, numbers)
    if use >= BUSY and power is not None and power <= LATENCY_POWER and (memory is None or memory <= LATENCY_MEMORY):
        return Diagnosis(
            Kind.LATENCY, numbers, "many tiny kernels one after another: a larger batch or fewer launches, not more GPU"
        )
    return Diagnosis(Kind.MIXED, numbers)


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _numbers(use: float, power: float | None, memory: float | None, link: float | None) -> str:
    parts = [f"{use:.0%} busy"]
    parts += [f"{value:.0%} of {name}" for name, value in (("power", power), ("PCIe", link)) if value is not None]
    parts += [f"{memory:.0%} memory utilisation"] if memory is not None else []
    return ", ".join(parts)


def _no_progress(window: Sequence[Sample]) -> bool:
    """Requests run, seconds pass, and the engine's tokens stand still. An engine that answers no more counts too."""
    if window[-1].at - window[0].at < STUCK_SECONDS:
        return False
    seen = [sample.engine for sample in window if sample.engine]
    if not seen:
        return True
    return seen[-1].running > 0 and seen[-1].tokens == seen[0].tokens


def _throttled(window: Sequence[Sample]) -> str:
    """Slowdowns that hardware or heat forced, in most of the samples; running at the power limit is none."""
    reasons: dict[tuple[int, str], int] = {}
    for sample in window:
        for gpu in sample.gpus:
            for reason in gpu.throttle:
                if reason != "software power cap" and _slow(gpu):
                    reasons[gpu.index, reason] = reasons.get((gpu.index, reason), 0) + 1
    lasting = sorted(key for key, count in reasons.items() if 2 * count > len(window))
    return ", ".join(f"GPU {index}: {reason}" for index, reason in lasting)


def _slow(gpu: GpuSample) -> bool:
    clock = _share(gpu.clock, gpu.clock_max)
    return clock is None or clock <= SLOW_CLOCK
