"""A window that is not valid says so: each rule on a run that is right but for one thing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.samples import Sample, Tick
from loadtest.scrape import GpuSample, Snapshot, parse_gpus, parse_metrics
from loadtest.validity import Evidence, accounts, foreign_since, judge, valid

BEGIN, END = 1000.0, 1060.0
USERS = 4
PER_REQUEST = 2.0
TOKENS = 20


def samples(begin: float = BEGIN - 10, end: float = END + 2) -> list[Sample]:
    """USERS users, one request of PER_REQUEST seconds after another, evenly shifted."""
    made: list[Sample] = []
    for user in range(USERS):
        at = begin + user * PER_REQUEST / USERS
        while at < end:
            sample = Sample(len(made), "local", at, PER_REQUEST, 64, TOKENS)
            sample.times = [0.1 * (k + 1) for k in range(TOKENS)]
            sample.counts = [k + 1 for k in range(TOKENS)]
            sample.headers, sample.first_token, sample.first_content = 0.05, 0.1, 0.1
            sample.prompt_tokens, sample.completion_tokens, sample.finish = 64, TOKENS, "length"
            made.append(sample)
            at += PER_REQUEST
    return made


def snapshots(ours: list[Sample], engine: str = "decode", stray_at: float | None = None) -> list[Snapshot]:
    """A server that counts each request when it ends, and one more at `stray_at`."""
    made: list[Snapshot] = []
    first, last = min(s.start for s in ours) - 1, max(s.finished for s in ours) + 1
    for step in range(int(last - first) + 2):
        at = first + step
        done = sum(1 for s in ours if s.finished <= at)
        stray = stray_at is not None and at >= stray_at
        values = {
            "requests": 100.0 + done + stray,
            "prompt_tokens": 5000.0 + 64 * done + 9 * stray,
            "generation_tokens": 7000.0 + TOKENS * done + 3 * stray,
            "running": float(USERS),
            "queued": 0.0,
        }
        made.append(Snapshot(at, engine, values))
    return made


def evidence(**changes: object) -> Evidence:
    ours = samples()
    ticks = [Tick(BEGIN + k / 2, "local", USERS, USERS, 0, 0, 0, 0, 0.001, 0.001, 0.1) for k in range(121)]
    good = Evidence(BEGIN, END, ours, ticks=ticks, snapshots=snapshots(ours), users=USERS)
    return replace(good, **changes)  # type: ignore[arg-type]


def change(snapshot: Snapshot, **values: float) -> Snapshot:
    return replace(snapshot, values={**(snapshot.values or {}), **values})


def served(snapshot: Snapshot) -> float:
    return TOKENS * ((snapshot.values or {})["requests"] - 100)


def rejected(found: Evidence) -> set[str]:
    return {finding.id for finding in judge(found) if finding.severity == "reject"}


def noted(found: Evidence) -> set[str]:
    return {finding.id for finding in judge(found) if finding.severity == "note"}


def test_a_right_run_has_no_findings() -> None:
    assert judge(evidence()) == [] and valid([])


def test_never_steady() -> None:
    assert rejected(evidence(steady=False)) == {"not-steady"}


def test_a_rate_that_moves_within_the_window() -> None:
    ours = samples()
    for sample in ours:
        if sample.start < (BEGIN + END) / 2:
            sample.completion_tokens, sample.asked_output = TOKENS // 2, TOKENS // 2
            sample.times, sample.counts = sample.times[::2], [k + 1 for k in range(TOKENS // 2)]
    assert rejected(evidence(samples=ours, snapshots=())) == {"drift"}


def test_too_few_requests_in_flight() -> None:
    ours = [sample for sample in samples() if sample.index % 8]
    assert "occupancy" in rejected(evidence(samples=ours, snapshots=snapshots(ours)))


def test_too_many_requests_in_flight() -> None:
    assert "occupancy" in rejected(evidence(users=USERS - 1))


def test_a_window_without_an_answer() -> None:
    assert "nothing-finished" in rejected(evidence(begin=BEGIN + 0.01, end=BEGIN + 0.02))


def fail(sample: Sample, kind: str) -> Sample:
    return replace(sample, error=kind, prompt_tokens=None, completion_tokens=None, times=[], counts=[], headers=None)  # type: ignore[arg-type]


def test_more_than_one_percent_of_errors() -> None:
    ours = [fail(s, "cut") if s.index % 20 == 0 else s for s in samples()]
    found = evidence(samples=ours, snapshots=snapshots([s for s in ours if s.ok]))
    assert "errors" in rejected(found)


def test_a_single_error_is_noted() -> None:
    ours = samples()
    ours[20] = fail(ours[20], "connect")
    found = evidence(samples=ours, snapshots=snapshots([s for s in ours if s.ok]))
    assert "errors" in noted(found) and not rejected(found)


def test_a_wrong_output_length() -> None:
    ours = samples()
    ours[20].completion_tokens = TOKENS - 1
    assert "output-length" in rejected(evidence(samples=ours))


def test_a_wrong_input_length() -> None:
    ours = samples()
    ours[20].prompt_tokens = 65
    assert "input-length" in rejected(evidence(samples=ours))


def test_a_stray_request_in_the_window_is_rejected() -> None:
    found = evidence(snapshots=snapshots(samples(), stray_at=BEGIN + 30))
    assert rejected(found) == {"foreign-work"}
    assert "+1 requests, +9 prompt tokens, +3 generation tokens" in judge(found)[0].text


@given(st.floats(BEGIN - 10, END))
def test_when_the_stray_request_came_is_known_to_two_seconds(stray_at: float) -> None:
    """Within one request's duration at most: until then our own next answer may hide it."""
    since = foreign_since(evidence(snapshots=snapshots(samples(), stray_at=stray_at)), "decode")
    assert since is not None and stray_at <= since


def test_a_stray_request_well_before_the_window_is_only_noted() -> None:
    ours = [s for s in samples() if not BEGIN - 8 < s.finished < BEGIN - 4]
    found = evidence(samples=ours, snapshots=snapshots(ours, stray_at=BEGIN - 8))
    assert noted(found) == {"foreign-before"} and not rejected(found)


def test_foreign_tokens_without_a_foreign_request() -> None:
    """Half an answer of someone's that began before us."""
    ours = samples()
    changed = [
        replace(
            s,
            values={
                **(s.values or {}),
                "generation_tokens": (s.values or {})["generation_tokens"] + 5 * (s.at > BEGIN),
            },
        )
        for s in snapshots(ours)
    ]
    assert rejected(evidence(snapshots=changed)) == {"foreign-work"}


def test_prefill_is_held_to_prompts_only() -> None:
    ours = samples()
    prefill = [
        replace(change(s, generation_tokens=(s.values or {})["requests"]), engine="prefill") for s in snapshots(ours)
    ]
    assert not rejected(evidence(snapshots=[*snapshots(ours), *prefill]))
    assert {book.role: set(book.ours) for book in accounts(evidence(snapshots=prefill))} == {
        "prefill": {"requests", "prompt_tokens"}
    }


def test_engines_of_one_role_share_our_requests() -> None:
    """Two replicas, each with half of the work."""
    ours = samples()
    assert not rejected(evidence(snapshots=divided(snapshots(ours))))
    strays = snapshots(ours, stray_at=BEGIN + 20)
    assert rejected(evidence(snapshots=divided(strays))) == {"foreign-work"}


def divided(served: list[Snapshot]) -> list[Snapshot]:
    """One engine's counters as those of two, which did a quarter and three quarters of it."""
    return [
        replace(s, engine=engine, values={name: value * share for name, value in (s.values or {}).items()})
        for s in served
        for engine, share in (("decode", 0.25), ("decode-2", 0.75))
    ]


def test_requests_that_we_cut_short_make_the_account_inexact() -> None:
    ours = samples()
    served = snapshots(ours)
    ours[-1] = replace(fail(ours[-1], "cancelled"), headers=0.1)
    assert "inexact-account" in noted(evidence(samples=ours, snapshots=served))
    assert "foreign-work" not in rejected(evidence(samples=ours, snapshots=served))


def test_a_restart_in_the_window() -> None:
    ours = samples()
    restarted = [
        replace(s, values={name: value / 10 for name, value in (s.values or {}).items()}) if s.at > BEGIN + 20 else s
        for s in snapshots(ours)
    ]
    assert "restart" in rejected(evidence(snapshots=restarted))


def test_an_engine_that_stops_answering() -> None:
    gone = [replace(s, values=None) if BEGIN + 5 < s.at < BEGIN + 9 else s for s in snapshots(samples())]
    assert "unreachable" in rejected(evidence(snapshots=gone))


def test_no_counters_at_all_is_noted() -> None:
    assert noted(evidence(snapshots=())) == {"no-counters"}


@pytest.mark.parametrize(
    ("field", "value", "id"), [("late", 0.3, "client-lag"), ("lag", 0.3, "client-lag"), ("cpu", 0.97, "client-cpu")]
)
def test_a_generator_that_is_the_bottleneck(field: str, value: float, id: str) -> None:
    ticks = [replace(tick, **{field: value}) if k % 10 == 0 else tick for k, tick in enumerate(evidence().ticks)]
    assert rejected(evidence(ticks=ticks)) == {id}
    once = [replace(tick, **{field: value}) if k == 30 else tick for k, tick in enumerate(evidence().ticks)]
    assert not rejected(evidence(ticks=once))


def test_a_generator_that_is_silent() -> None:
    assert rejected(evidence(ticks=evidence().ticks[:1], begin=BEGIN + 2)) >= {"client"}


def test_an_open_loop_that_sends_too_late() -> None:
    ours = [replace(s, scheduled=s.start - (0.2 if s.index % 10 == 0 else 0.0)) for s in samples()]
    assert rejected(evidence(samples=ours, users=None)) == {"schedule"}


def test_an_engine_that_is_not_the_locked_one() -> None:
    assert rejected(evidence(contradictions=("decode has tp_size = 2, the lock says 4",))) == {"identity"}
    assert not rejected(evidence(locked=False))
    assert "not-locked" in {finding.id for finding in judge(evidence(locked=False))}


def test_an_engine_that_does_not_say_what_it_is_is_noted() -> None:
    found = evidence(found_identity={"decode": None})
    assert not rejected(found) and "no-identity" in {finding.id for finding in judge(found)}


def test_an_engine_that_changed_during_the_run() -> None:
    found = evidence(found_identity={"decode": {"tp_size": 4}}, identity_after={"decode": {"tp_size": 2}})
    assert rejected(found) == {"identity-changed"}


NVIDIA_SMI = """\
GPU-aaaa1111-0000-0000-0000-000000000000, 190.52, 100, 0x0000000000000000
GPU-bbbb2222-0000-0000-0000-000000000000, 599.80, 99, 0x0000000000000004
GPU-cccc3333-0000-0000-0000-000000000000, [N/A], 97, 0x0000000000000040
"""


def test_a_throttled_gpu_is_rejected_and_a_power_cap_noted() -> None:
    gpus = parse_gpus(NVIDIA_SMI, BEGIN + 10)
    assert gpus[0] == GpuSample(BEGIN + 10, "GPU-aaaa1111-0000-0000-0000-000000000000", 190.52, 100.0, 0)
    assert gpus[2].power is None
    found = evidence(gpus=gpus)
    assert rejected(found) == {"gpu-throttled"} and "gpu-power-cap" in noted(found)
    assert not rejected(evidence(gpus=gpus[:2]))


def test_a_full_server_is_noted() -> None:
    waiting = [change(s, queued=3.0) for s in snapshots(samples())]
    assert noted(evidence(snapshots=waiting)) == {"server-queue"}


PAGE = """\
# HELP sglang:num_requests_total Number of requests processed.
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{is_streaming="true",model_name="m"} 3.0
sglang:num_requests_total{is_streaming="false",model_name="m"} 2.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m",tp_rank="0"} 0.25
sglang:token_usage{model_name="m",tp_rank="1"} 0.5
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{le="0.1"} 1.0
"""


def test_label_sets_are_joined() -> None:
    assert parse_metrics(PAGE) == {"": {"requests": 5.0, "kv_usage": 0.5}}


def test_the_routers_page_has_each_engine() -> None:
    lines = [
        "# TYPE sglang_num_requests_total counter",
        *(
            f'sglang_num_requests_total{{engine_type="{kind}",is_streaming="true",worker_addr="http://{kind}{k}"}} {k}'
            for kind, k in (("decode", 1), ("decode", 2), ("prefill", 3))
        ),
    ]
    found = parse_metrics("\n".join(lines))
    assert found == {"decode": {"requests": 1.0}, "decode-2": {"requests": 2.0}, "prefill": {"requests": 3.0}}


def test_engines_that_do_both_roles_have_the_names_of_their_services() -> None:
    lines = [
        "# TYPE sglang_num_requests_total counter",
        *(
            f'sglang_num_requests_total{{engine_type="unified",worker_addr="http://{name}:30000"}} {k}'
            for k, name in enumerate(("engine-2", "engine", "engine-3"))
        ),
    ]
    found = {name: values["requests"] for name, values in parse_metrics("\n".join(lines)).items()}
    assert found == {"engine": 1.0, "engine-2": 0.0, "engine-3": 2.0}
