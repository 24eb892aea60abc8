"""One engine of several dies or hangs: stand-ins for engines, the real router and gate."""

import json
import os
import signal
import time

import pytest
from harness import PATIENCE_S, PROMPTS, SLOW, Controller, note
from standin_engine import words
from test_engines import TOKENS, observe, settled

ANSWERS = {prompt: "".join(words(prompt, TOKENS)) for prompt in PROMPTS}
STACK = "two stand-ins, real router"
# The router's probes give an engine up after two of 5 + 5 s, and the last request sent there waits as long as the gate.
SERVED_S = 35.0


@pytest.mark.long
def test_when_one_engine_of_two_hangs_the_other_serves_on(served: Controller) -> None:
    before = served.pid("engine-2")
    watcher = served.start("watch", "--json")
    try:
        process = served.child("engine-2", "python /standin_engine.py")
        seen = observe(served.url, ANSWERS, lambda: os.kill(process, signal.SIGSTOP))
        # Nobody waits for this.
        deadline = time.monotonic() + PATIENCE_S
        while served.pid("engine-2") == before:
            assert time.monotonic() < deadline, "deploy watch does not restart it"
            time.sleep(1)
    finally:
        watcher.terminate()
        output, _ = watcher.communicate(timeout=30)
    note(
        "SIGSTOP of one engine of two, with deploy watch", seen.words(), seen.service(), "what it had in flight", STACK
    )
    settled(seen)
    assert seen.service() < SERVED_S * SLOW, seen.words()
    after = [what for asked, _, what in seen.answers if asked > 0]
    assert after.count("200") > len(after) / 2, seen.words()
    incidents = [json.loads(line) for line in output.splitlines()]
    assert [(item["role"], item["remedy"]) for item in incidents] == [("engine-2", "restart")], output


def test_when_one_engine_of_two_dies_the_other_serves_on(served: Controller) -> None:
    process = served.child("engine-2", "python /standin_engine.py")
    seen = observe(served.url, ANSWERS, lambda: os.kill(process, signal.SIGKILL))
    note("SIGKILL of one engine of two", seen.words(), seen.service(), "what it had in flight", STACK)
    settled(seen)
