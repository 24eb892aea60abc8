"""Is a window valid? Each rule is a function from what was seen to findings. Pure; docs/metrics.md states the rules."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from loadtest import steady
from loadtest.metrics import error_kind, in_flight, timeline
from loadtest.samples import Sample, Tick
from loadtest.scrape import COUNTERS, GpuSample, Snapshot

OCCUPANCY_TOLERANCE = 0.05
LATE_LIMIT = 0.1
LAG_LIMIT = 0.1
BUSY_SHARE = 0.05
CPU_LIMIT = 0.9
DELAY_LIMIT = 0.05
ERROR_LIMIT = 0.01

# nvidia-smi, clocks_event_reasons (nvml.h, nvmlClocksEventReasons): hardware slowdown, software and hardware thermal
# slowdown, power brake. The software power cap is a GPU at its limit, which is a fact to note and no fault.
THROTTLED = {
    0x08: "hardware slowdown",
    0x20: "thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
POWER_CAPPED = 0x04


class Finding(BaseModel):
    """`reject`: the numbers are not shown. `note`: they are, with this beside them."""

    model_config = ConfigDict(frozen=True)

    id: str
    severity: Literal["reject", "note"]
    text: str


@dataclass(frozen=True)
class Evidence:
    """All that the rules look at. `users` is None in an open loop. Wall-clock seconds.

    `contradictions` between lock and engines, in words; `locked`: the lock describes a stack of this kind at all.
    """

    begin: float
    end: float
    samples: Sequence[Sample]
    ticks: Sequence[Tick] = ()
    snapshots: Sequence[Snapshot] = ()
    gpus: Sequence[GpuSample] = ()
    users: int | None = None
    steady: bool = True
    contradictions: Sequence[str] = ()
    locked: bool = True
    found_identity: Mapping[str, Mapping[str, Any] | None] = field(
        default_factory=dict[str, "Mapping[str, Any] | None"]
    )
    identity_after: Mapping[str, Mapping[str, Any] | None] | None = None


def judge(evidence: Evidence) -> list[Finding]:
    """All findings of all rules; the window is valid when none of them rejects."""
    rules = (
        _steadiness,
        _occupancy,
        _errors,
        _output_length,
        _input_length,
        _counters_backwards,
        _foreign_work,
        _client,
        _schedule,
        _identity,
        _gpus,
        _server_queue,
    )
    return [finding for rule in rules for finding in rule(evidence)]


def valid(findings: Iterable[Finding]) -> bool:
    return all(finding.severity != "reject" for finding in findings)


def _reject(id: str, text: str) -> Finding:
    return Finding(id=id, severity="reject", text=text)


def _note(id: str, text: str) -> Finding:
    return Finding(id=id, severity="note", text=text)


def _inside(evidence: Evidence, at: float) -> bool:
    return evidence.begin <= at < evidence.end


def _steadiness(evidence: Evidence) -> Iterable[Finding]:
    if not evidence.steady:
        yield _reject("not-steady", "the token rate never became steady within the warm-up limit")
    if evidence.users is not None and evidence.end > evidence.begin:
        rates = timeline(evidence.samples, evidence.begin, evidence.end)["output"]
        whole = int(evidence.end - evidence.begin)
        if steady.drifts(rates[:whole], errors=3.0):
            half = whole // 2
            first, second = sum(rates[:half]) / max(1, half), sum(rates[half:whole]) / max(1, whole - half)
            yield _reject("drift", f"the token rate moved within the window: {first:.1f}/s, then {second:.1f}/s")


def _occupancy(evidence: Evidence) -> Iterable[Finding]:
    if evidence.users is None:
        return
    mean = in_flight(evidence.samples, evidence.begin, evidence.end)
    if abs(mean - evidence.users) > OCCUPANCY_TOLERANCE * evidence.users:
        yield _reject("occupancy", f"{mean:.2f} requests were in flight on average, not {evidence.users}")


def _errors(evidence: Evidence) -> Iterable[Finding]:
    ended = [s for s in evidence.samples if _inside(evidence, s.finished) and s.error != "cancelled"]
    failed = [s for s in ended if not s.ok]
    if not ended:
        yield _reject("nothing-finished", "no request ended within the window: it is too short for this load")
    if failed:
        kinds = ", ".join(sorted({error_kind(s) for s in failed}))
        text = f"{len(failed)} of {len(ended)} requests failed ({kinds}); first: {failed[0].detail}"
        yield _reject("errors", text) if len(failed) > ERROR_LIMIT * len(ended) else _note("errors", text)


def _output_length(evidence: Evidence) -> Iterable[Finding]:
    done = [s for s in evidence.samples if s.ok and _inside(evidence, s.finished) and s.asked_output is not None]
    wrong = [s for s in done if s.completion_tokens != s.asked_output]
    if wrong:
        first = wrong[0]
        yield _reject(
            "output-length",
            f"{len(wrong)} of {len(done)} answers did not have the length asked for, "
            f"for example {first.completion_tokens} instead of {first.asked_output} tokens (finish: {first.finish})",
        )


def _input_length(evidence: Evidence) -> Iterable[Finding]:
    done = [s for s in evidence.samples if s.ok and _inside(evidence, s.finished) and s.asked_input is not None]
    wrong = [s for s in done if s.prompt_tokens != s.asked_input]
    if wrong:
        yield _reject(
            "input-length",
            f"{len(wrong)} of {len(done)} prompts did not have the length asked for, "
            f"for example {wrong[0].prompt_tokens} instead of {wrong[0].asked_input} tokens",
        )


def _by_engine(evidence: Evidence) -> dict[str, list[Snapshot]]:
    engines: dict[str, list[Snapshot]] = {}
    for snapshot in sorted(evidence.snapshots, key=lambda s: s.at):
        engines.setdefault(snapshot.engine, []).append(snapshot)
    return engines


def _counters_backwards(evidence: Evidence) -> Iterable[Finding]:
    if not evidence.snapshots:
        yield _note("no-counters", "no engine's metrics were read: foreign work and restarts cannot be seen")
    for engine, snapshots in _by_engine(evidence).items():
        known = [s for s in snapshots if s.values is not None]
        if not known:
            yield _note("no-counters", f"{engine} did not show its metrics: foreign work and restarts cannot be seen")
            continue
        for before, after in pairwise(known):
            fell = [n for n in COUNTERS if (after.values or {}).get(n, 0.0) < (before.values or {}).get(n, 0.0)]
            if fell and after.at >= evidence.begin and before.at < evidence.end:
                yield _reject("restart", f"{engine} restarted in the window: its counters went backwards ({fell[0]})")
                break
        missing = [s for s in snapshots if s.values is None and _inside(evidence, s.at)]
        if missing:
            yield _reject("unreachable", f"{engine} did not answer {len(missing)} times within the window")


@dataclass(frozen=True)
class Account:
    """What the engines of a role counted together from before the run to after it, and what we sent."""

    role: str
    served: dict[str, float]
    ours: dict[str, float]
    cancelled: int

    @property
    def difference(self) -> dict[str, float]:
        return {name: self.served[name] - self.ours[name] for name in self.ours if name in self.served}


def accounts(evidence: Evidence) -> list[Account]:
    """Counters against ours, by role: engines of the same role (decode, decode-2) share our requests.

    A prefill engine is held to prompts only; its answers are one token each.
    """
    ours_ok = [s for s in evidence.samples if s.ok]
    # These reached the engines, perhaps, and may or may not be in the counters.
    uncertain = sum(1 for s in evidence.samples if not s.ok and s.error not in ("connect", "tls", "http"))
    served: dict[str, dict[str, float]] = {}
    for engine, snapshots in _by_engine(evidence).items():
        known = [s.values for s in snapshots if s.values is not None]
        if len(known) < 2:
            continue
        total = served.setdefault(role_of(engine), dict.fromkeys(COUNTERS, 0.0))
        for name in COUNTERS:
            total[name] += known[-1].get(name, 0.0) - known[0].get(name, 0.0)
    books: list[Account] = []
    for role, counted in served.items():
        ours = {
            "requests": float(len(ours_ok)),
            "prompt_tokens": float(sum(s.prompt_tokens or 0 for s in ours_ok)),
        }
        if role != "prefill":
            ours["generation_tokens"] = float(sum(s.completion_tokens or 0 for s in ours_ok))
        books.append(Account(role, counted, ours, uncertain))
    return books


def role_of(engine: str) -> str:
    """`decode` of `decode-2`."""
    return engine.partition("-")[0]


def _foreign_work(evidence: Evidence) -> Iterable[Finding]:
    for book in accounts(evidence):
        difference = {name: value for name, value in book.difference.items() if value}
        if not difference or any(value < 0 for value in book.served.values()):
            continue
        if book.cancelled and 0 <= book.difference["requests"] <= book.cancelled:
            text = f"{book.role} counted {_show(difference)} beyond our whole answers; {book.cancelled} were cut short"
            yield _note("inexact-account", text)
            continue
        when = foreign_since(evidence, book.role)
        if when is not None and when < evidence.begin:
            yield _note(
                "foreign-before", f"{book.role} did work that is not ours before the window: {_show(difference)}"
            )
            continue
        word = "less" if any(value < 0 for value in difference.values()) else "more"
        yield _reject("foreign-work", f"{book.role} did {word} than our requests: {_show(difference)}")


def _show(difference: Mapping[str, float]) -> str:
    return ", ".join(f"{value:+.0f} {name.replace('_', ' ')}" for name, value in difference.items())


def foreign_since(evidence: Evidence, role: str) -> float | None:
    """Since when a role's engines have served more requests than we sent and saw answered; None when it is not known.

    Our own answers near a snapshot may or may not be in it, so a snapshot counts only what is beyond all of ours that
    ended until a second after it. The time returned is that of the last snapshot at which the excess grew.
    """
    ends = sorted(s.finished for s in evidence.samples if s.ok)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    since, most = None, 0.0
    for snapshot in sorted(evidence.snapshots, key=lambda s: s.at):
        if snapshot.values is None or role_of(snapshot.engine) != role:
            continue
        last[snapshot.engine] = snapshot.values.get("requests", 0.0)
        first.setdefault(snapshot.engine, last[snapshot.engine])
        served = sum(last.values()) - sum(first.values())
        excess = served - bisect_right(ends, snapshot.at + 1.0)
        if excess > most:
            since, most = snapshot.at, excess
    return since


def _client(evidence: Evidence) -> Iterable[Finding]:
    inside = [t for t in evidence.ticks if _inside(evidence, t.at)]
    if not inside:
        if evidence.ticks:
            yield _reject("client", "the generator did not report within the window")
        return
    late = [t for t in inside if t.late > LATE_LIMIT or t.lag > LAG_LIMIT]
    if len(late) > BUSY_SHARE * len(inside):
        worst = max(max(t.late, t.lag) for t in late)
        yield _reject(
            "client-lag",
            f"the generator was late by more than {LATE_LIMIT * 1000:.0f} ms in {len(late)} of {len(inside)} intervals "
            f"(worst {worst * 1000:.0f} ms): give it a free core or --processes",
        )
    busy = [t for t in inside if t.cpu > CPU_LIMIT]
    if len(busy) > BUSY_SHARE * len(inside):
        yield _reject("client-cpu", f"the generator used more than {CPU_LIMIT:.0%} of a core: use --processes")


def _schedule(evidence: Evidence) -> Iterable[Finding]:
    delays = sorted(
        s.start - s.scheduled for s in evidence.samples if s.scheduled is not None and _inside(evidence, s.start)
    )
    if delays and delays[int(0.99 * (len(delays) - 1))] > DELAY_LIMIT:
        yield _reject("schedule", f"requests left late: 1 % by more than {DELAY_LIMIT * 1000:.0f} ms")


def _identity(evidence: Evidence) -> Iterable[Finding]:
    for text in evidence.contradictions:
        yield _reject("identity", text)
    if not evidence.locked:
        yield _note("not-locked", "deploy.lock describes no stack that serves this model with these roles")
    for engine, found in evidence.found_identity.items():
        if found is None:
            yield _note("no-identity", f"{engine} did not say what it is: it was not held against the lock")
        after = (evidence.identity_after or {}).get(engine)
        if found is not None and after is not None and found != after:
            changed = sorted(name for name in {*found, *after} if found.get(name) != after.get(name))
            yield _reject("identity-changed", f"{engine} is not what it was before the run: {', '.join(changed)}")


def _gpus(evidence: Evidence) -> Iterable[Finding]:
    inside = [g for g in evidence.gpus if _inside(evidence, g.at)]
    for bit, name in THROTTLED.items():
        gpus = sorted({g.gpu for g in inside if g.reasons & bit})
        if gpus:
            yield _reject("gpu-throttled", f"{name} on {', '.join(gpus)}")
    capped = sorted({g.gpu for g in inside if g.reasons & POWER_CAPPED})
    if capped:
        yield _note("gpu-power-cap", f"{len(capped)} GPUs ran at their power limit")


def _server_queue(evidence: Evidence) -> Iterable[Finding]:
    if evidence.users is None:
        return
    for engine, snapshots in _by_engine(evidence).items():
        inside = [s.values for s in snapshots if s.values is not None and _inside(evidence, s.at)]
        queued = [values["queued"] for values in inside if "queued" in values]
        if queued and sum(queued) / len(queued) >= 1:
            mean = sum(queued) / len(queued)
            yield _note("server-queue", f"{engine} had {mean:.1f} requests waiting on average: its batch was below C")
