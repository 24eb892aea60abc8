"""How many streamed tokens a second can one generator process take? Measured against the test server."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from loadtest.run import Level, observe
from loadtest.scrape import Watcher
from loadtest.testserver import running
from loadtest.validity import CPU_LIMIT, LATE_LIMIT
from loadtest.workload import Plan, Synthetic, Vocabulary, parse_length

OUTPUT = 200


@dataclass(frozen=True)
class Capacity:
    """`per_core` is tokens a second for each core of CPU time the generator used, `rate` what it took here.

    `cpu` is its mean share of a core, `late` the longest that bytes waited for it in the middle interval (seconds).
    """

    rate: float
    cpu: float
    late: float
    per_core: float


def measure_capacity(users: int = 64, seconds: float = 5.0) -> Capacity:
    """Streams for some seconds, a token an event and 100 tokens/s a stream. Raises BenchError when that fails."""
    with running() as url, tempfile.TemporaryDirectory() as folder:
        kind = Synthetic(input=parse_length("64"), output=parse_length(str(OUTPUT)))
        vocabulary = Vocabulary(words=["a", "b", "c", "d"], overhead=6, source="capacity")
        plan = Plan(url=url, model="brisk", workload=kind, vocabulary=vocabulary)
        level = Level("capacity", users, seconds, warmup_limit=3.0, drain_limit=10.0)
        seen = observe(plan, level, Path(folder), Watcher({}))
    ticks = [tick for tick in seen.ticks if seen.begin <= tick.at <= seen.end]
    used = sum(tick.cpu for tick in ticks) / len(ticks)
    rate = (ticks[-1].arrivals - ticks[0].arrivals) / (ticks[-1].at - ticks[0].at)
    lates = sorted(tick.late for tick in ticks)
    return Capacity(rate=rate, cpu=used, late=lates[len(lates) // 2], per_core=rate / used)


def limits() -> str:
    """When a run says that the generator was the bottleneck."""
    return (
        f"a run is rejected when it uses more than {CPU_LIMIT:.0%} of a core or reads {LATE_LIMIT * 1000:.0f} ms late"
    )
