"""The plots of `deploy gap`, as SVG text by file name. Pure."""

from collections.abc import Mapping, Sequence

from deploy.gap.measured import Measured
from deploy.gap.model import Pass, Setting, ceiling
from loadtest import plots

USERS = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXTS = (256, 1024, 4096, 16384, 65536, 131072)


def waterfall(title: str, step: Pass, budget: float | None, measured: float | None) -> str:
    """A predicted step, part after part, against what it may take and what was measured (seconds)."""
    parts = [(f"{part.name} ({part.bound})", part.seconds * 1e3) for part in step.parts]
    marks = {"budget": budget, "measured": measured}
    return plots.waterfall(title, "ms, predicted", parts, {n: v * 1e3 for n, v in marks.items() if v is not None})


def throughput(
    setting: Setting, context: int, target: tuple[float, int] | None, measured: Sequence[Measured]
) -> Mapping[str, str]:
    """Ceilings against requests in flight, and against context."""
    at = [target[1]] if target else []
    users: list[int] = sorted({*USERS, *(m.users for m in measured), *at})
    over_users = [ceiling(n, context, setting) for n in users]
    points = {"measured": ([m.users for m in measured], [m.tokens_per_second for m in measured])} if measured else {}
    if target:
        points["target"] = ([target[1]], [target[0]])
    series = {
        "predicted": (users, [c.tokens_per_second for c in over_users]),
        "memory and products alone": (users, [c.roofline_tokens_per_second for c in over_users]),
    }
    title = f"Ceiling at context {context} (predicted)"
    contexts = {
        f"C={n}": (list(CONTEXTS), [ceiling(n, length, setting).tokens_per_second for length in CONTEXTS])
        for n in sorted({1, 16, 64, *at})
    }
    return {
        "throughput.svg": plots.curves(title, "requests in flight (C)", "tokens/s", series, points),
        "context.svg": plots.curves("Ceiling over context (predicted)", "tokens of context", "tokens/s", contexts),
    }
