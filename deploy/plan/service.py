"""How long an engine takes for a prompt and for a decode step: measured where it was, else predicted. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from deploy.gap.measured import Measured
from deploy.gap.model import Setting, decode_step, prefill

EFFICIENCY = 0.66
"""Share of the predicted throughput that is expected where nothing was measured: the least of the public records that
`deploy gap --published` compares, 520 of 781 tok/s."""


@dataclass(frozen=True)
class Service:
    """Service times of one engine for requests of one size.

    Attributes:
        prompt, answer: tokens of a request.
        chunk: tokens of a prompt that are computed at once.
        slots: requests decoded together at most.
        measured: levels of a load test, whose steps count instead of predicted ones.
        prompt_factor: measured over predicted time of a prompt; None if it was not measured.
        efficiency: of the prediction, where it is used.
    """

    setting: Setting
    prompt: int
    answer: int
    chunk: int
    slots: int
    measured: tuple[Measured, ...] = ()
    prompt_factor: float | None = None
    efficiency: float = EFFICIENCY
    _steps: dict[int, float] = field(default_factory=dict[int, float], repr=False, compare=False)

    @cached_property
    def prompt_seconds(self) -> float:
        """Of reading one prompt alone."""
        predicted = sum(one.seconds for one in prefill(self.prompt, self.chunk, self.setting))
        return predicted * (self.prompt_factor or 1 / self.efficiency)

    def token_seconds(self, batch: int) -> float:
        """Between two tokens of a request, `batch` of them decoded together, half of the answer written."""
        if batch not in self._steps:
            context = self.prompt + max(1, self.answer // 2)
            step = decode_step(batch, context, self.setting).seconds * self._factor(batch)
            self._steps[batch] = step / self.setting.accepted
        return self._steps[batch]

    def _factor(self, batch: int) -> float:
        """Measured over predicted, between measured batches by the logarithm of the batch, outside as at the end."""
        if not self.measured:
            return 1 / self.efficiency
        context = self.prompt + max(1, self.answer // 2)
        points = [
            (math.log(one.users), one.step / decode_step(one.users, context, self.setting).seconds)
            for one in sorted(self.measured, key=lambda one: one.users)
        ]
        return _interpolate(points, math.log(batch))

    def sources(self) -> list[str]:
        """Where the times come from, a sentence each."""
        predicted = f"predicted by the roofline, {self.efficiency:.0%} of its throughput expected"
        steps = predicted
        if self.measured:
            steps = f"measured at C={', '.join(str(one.users) for one in self.measured)}, between them interpolated"
        prompts = predicted
        if self.prompt_factor is not None:
            prompts = f"measured: {self.prompt_factor:.2f} times the roofline's"
        return [f"steps {steps}", f"prompts {prompts}"]


def _interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0) if x1 > x0 else y1
    return points[0][1] if at < points[0][0] else points[-1][1]
