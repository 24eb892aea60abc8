"""What a measurement lacks of the limit, and in which part. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from sm120_kernels.gpus import Gpu
from sm120_kernels.shapes import LAYERS

if TYPE_CHECKING:
    from deploy.gap.model import Pass
    from loadtest.result import Result

BUSY_PERCENT, IDLE_POWER = 90.0, 0.5
# The head is a linear like the others to a profiler; the draft's layer runs the same kernels as the model's.
TRACE_CATEGORIES = {"head": "linear", "draft": "linear"}


@dataclass(frozen=True)
class Measured:
    """One measured level.

    Attributes:
        users: requests in flight.
        tokens_per_second: of all of them.
        step: seconds between two tokens of a request, times the tokens it gets from a step.
        watts, utilisation: mean of the GPUs over the window, where it was recorded.
    """

    users: int
    tokens_per_second: float
    step: float
    watts: float | None = None
    utilisation: float | None = None


def of_throughput(tokens_per_second: float, users: int, accepted: float = 1.0) -> Measured:
    """A level of which only the throughput is known: the step is what all requests together leave for one."""
    return Measured(users, tokens_per_second, users * accepted / tokens_per_second)


def of_result(result: "Result", accepted: float = 1.0) -> list[Measured]:
    """The valid levels of a load test, repetitions averaged, ordered by requests in flight.

    The step is the mean time per output token, times the tokens that a request gets from a step.
    """
    found: list[Measured] = []
    valid = [level for level in result.levels if level.verdict == "valid" and level.metrics and level.users]
    for users in sorted({level.users for level in valid if level.users}):
        same = [level for level in valid if level.users == users]
        metrics = [level.metrics for level in same if level.metrics]
        steps = [m.tpot.mean for m in metrics if m.tpot]
        watts = [gpu.power for level in same for gpu in level.gpus if gpu.power is not None]
        busy = [gpu.utilisation for level in same for gpu in level.gpus if gpu.utilisation is not None]
        throughput = fmean(m.output_throughput for m in metrics)
        if steps and throughput > 0:
            found.append(
                Measured(
                    users,
                    throughput,
                    fmean(steps) * accepted,
                    fmean(watts) if watts else None,
                    fmean(busy) if busy else None,
                )
            )
    return found


@dataclass(frozen=True)
class Missing:
    """A measured step against the predicted one.

    Attributes:
        predicted: seconds of the modelled step.
        factor: measured over predicted.
        excess: seconds over the prediction.
        layer: seconds of a layer, all the step's time spread over the layers.
        launch: seconds for each launch, the same spread over the launches.
        budget: seconds a step may take for the target, if it is of this level.
        target_factor: measured over the budget.
        latency_bound: the GPUs say they are busy and draw little power; None where neither was recorded.
    """

    measured: Measured
    predicted: float
    factor: float
    excess: float
    layer: float
    launch: float
    budget: float | None = None
    target_factor: float | None = None
    latency_bound: bool | None = None


def missing(measured: Measured, predicted: "Pass", gpu: Gpu, budget: float | None = None) -> Missing:
    """Hold one level against its prediction and, if it is the target's, against the target's budget."""
    launches = sum(part.count for part in predicted.parts if part.name == "launches")
    bound = None
    if measured.watts is not None and measured.utilisation is not None:
        bound = measured.utilisation >= BUSY_PERCENT and measured.watts < IDLE_POWER * gpu.watts
    return Missing(
        measured=measured,
        predicted=predicted.seconds,
        factor=measured.step / predicted.seconds,
        excess=measured.step - predicted.seconds,
        layer=measured.step / LAYERS,
        launch=measured.step / launches,
        budget=budget,
        target_factor=measured.step / budget if budget else None,
        latency_bound=bound,
    )


@dataclass(frozen=True)
class Split:
    """Where the excess of the larger of two levels comes from.

    Attributes:
        small, large: requests in flight.
        batch: large over small.
        step: how many times longer the step of the large one is.
        fixed: seconds of its excess that the small one has as well: launches, latency, idle GPUs.
        growing: the rest, which came with the batch: work that is done more often than needed.
    """

    small: int
    large: int
    batch: float
    step: float
    fixed: float
    growing: float


def split(levels: Sequence[Missing]) -> Split | None:
    """Compare the smallest and the largest measured level; None for fewer than two."""
    ordered = sorted(levels, key=lambda one: one.measured.users)
    if len(ordered) < 2 or ordered[0].measured.users == ordered[-1].measured.users:
        return None
    low, high = ordered[0], ordered[-1]
    fixed = min(max(low.excess, 0.0), max(high.excess, 0.0))
    return Split(
        low.measured.users,
        high.measured.users,
        high.measured.users / low.measured.users,
        high.measured.step / low.measured.step,
        fixed,
        max(high.excess, 0.0) - fixed,
    )


@dataclass(frozen=True)
class CategoryGap:
    """One category of a profiled step: seconds measured and at the least, and its share of all excess."""

    name: str
    measured: float
    least: float
    share: float


def by_category(profiled: Mapping[str, float], predicted: "Pass") -> list[CategoryGap]:
    """Hold the seconds of a profiled step, by category, against the roofline; the largest excess first.

    Launches are not a category of a trace: they show as short kernels and as idle time, so their share of the
    prediction is left out and what they cost is part of each category's excess.
    """
    least: dict[str, float] = {}
    for part in predicted.parts:
        if part.name != "launches":
            name = TRACE_CATEGORIES.get(part.name, part.name)
            least[name] = least.get(name, 0.0) + part.seconds
    names = dict.fromkeys([*profiled, *least])
    excess = {name: max(0.0, profiled.get(name, 0.0) - least.get(name, 0.0)) for name in names}
    whole = sum(excess.values())
    found = [
        CategoryGap(name, profiled.get(name, 0.0), least.get(name, 0.0), excess[name] / whole if whole else 0.0)
        for name in names
    ]
    return sorted(found, key=lambda one: -one.share)
