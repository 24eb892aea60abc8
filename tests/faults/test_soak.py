"""Load with aborts on real engines for long: what they answer and hold at the end is what it was at the start."""

import os
import time
from pathlib import Path

import pytest
from harness import Controller, load, note
from test_engines import STACK, answers, ask, resident, served, text_of, used  # noqa: F401  # the fixtures too

ROLES = ("prefill", "decode", "router")
# Far from what two shared cores do, and nothing that hangs or stands still comes near it.
SLOWEST_S, LEAST_A_MINUTE = 60.0, 60


@pytest.mark.soak
def test_after_a_long_load_answers_kv_pools_and_memory_are_as_before(
    served: Controller,  # noqa: F811
    answers: dict[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    minutes = float(os.environ.get("SOAK_MINUTES", "30"))
    with load(served.url, answers, tmp_path, users=16, ABORTS="0.1"):
        time.sleep(60)
    before = {role: resident(served, role) for role in ROLES}
    with load(served.url, answers, tmp_path, users=16, ABORTS="0.1") as found:
        time.sleep(minutes * 60)
    assert found["failures"] == 0, found["errors"]
    assert found["slowest_s"] < SLOWEST_S and found["requests"] > LEAST_A_MINUTE * minutes, found
    deadline = time.monotonic() + 60
    while left := used(served):
        assert time.monotonic() < deadline, f"{left} tokens of the KV pools are still in use"
        time.sleep(1)
    grown = {role: (resident(served, role) - size) / 1024 for role, size in before.items()}
    assert {prompt: text_of(ask(served.url, prompt)) for prompt in answers} == answers
    what = ", ".join(f"{role} {size:+.0f} MiB" for role, size in grown.items())
    note(
        f"{minutes:.0f} minutes of load at 16 in flight, a tenth hung up",
        f"{found['requests']} requests: no wrong answer; slowest {found['slowest_s']:.1f} s",
        None,
        f"nothing; KV pools empty; resident memory {what}",
        STACK,
    )
    assert max(grown.values()) < 100, grown
