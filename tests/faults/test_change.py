"""Changes of a running stack under Locust's load: two stand-ins for engines, the real router, gate and controller."""

import time
from pathlib import Path

import pytest
from harness import PROMPTS, Controller, knocking, load, note
from standin_engine import words

TOKENS = 20
ANSWERS = {prompt: "".join(words(prompt, TOKENS)) for prompt in PROMPTS}
STACK = "two stand-ins, real router"


@pytest.mark.parametrize("verb", [("restart", "engine-2"), ("restart", "engine"), ("restart", "router")], ids=str)
def test_under_load_a_restart_fails_no_request(served: Controller, tmp_path: Path, verb: tuple[str, str]) -> None:
    with load(served.url, ANSWERS, tmp_path) as found:
        begun = time.monotonic()
        served.must(*verb)
        seconds = time.monotonic() - begun
    assert found["failures"] == 0, found["errors"]
    assert found["requests"] > 20
    assert found["slowest_s"] < 15
    seen = f"{found['requests']} answers in the {seconds:.0f} s, the slowest {found['slowest_s']:.1f} s"
    note(f"deploy {' '.join(verb)}", seen, None, "nothing", STACK)


def test_under_load_a_drained_engine_gets_nothing_and_no_request_fails(served: Controller, tmp_path: Path) -> None:
    with load(served.url, ANSWERS, tmp_path) as found:
        assert "nothing left to do" in served.must("drain", "http://engine-2:30000").stderr
        time.sleep(3)
        assert "nothing left to do" in served.must("drain", "engine-2", "--limit", "1").stderr
        served.must("drain", "engine-2", "--undo")
    assert found["failures"] == 0, found["errors"]


@pytest.mark.long
def test_under_load_an_upgrade_and_the_way_back(served: Controller, second_name: str, tmp_path: Path) -> None:
    before = served.images()
    for verb, wanted in (("upgrade", second_name), ("rollback", next(iter(before.values())))):
        with load(served.url, ANSWERS, tmp_path, RETRIES="3") as found:
            begun = time.monotonic()
            served.must(verb, STANDIN_IMAGE=second_name)
            seconds = time.monotonic() - begun
        assert set(served.images().values()) == {wanted}
        assert found["failures"] == 0, found["errors"]
        again = found.get("answer, asked again", {}).get("num_requests", 0)
        seen = f"{found['requests']} answers in the {seconds:.0f} s; {again} refused and asked again"
        note(f"deploy {verb} to another image", seen, None, "nothing", STACK)


def test_an_upgrade_that_fails_goes_back_by_itself_and_says_so(served: Controller, tmp_path: Path) -> None:
    before, text = served.images(), served.spec.read_text()
    served.spec.write_text(text + 'FAIL_AT_START = "yes"\n')
    try:
        with load(served.url, ANSWERS, tmp_path, RETRIES="3") as found:
            failed = served.run("upgrade")
    finally:
        served.spec.write_text(text)
    assert failed.returncode == 4
    assert "now: back to generation" in failed.stderr
    assert served.images() == before
    assert found["failures"] == 0, found["errors"]
    note("an upgrade whose engine does not start", "no request failed", None, "nothing: back by itself", STACK)


KEY = "sk-of-the-fault-test-0123456789"


@pytest.mark.long
@pytest.mark.parametrize("front", [False, True], ids=["router", "front"])
def test_while_the_published_port_moves_to_another_container_nothing_in_flight_is_cut(
    fresh: Controller, second_name: str, tmp_path: Path, front: bool
) -> None:
    headers: dict[str, str] = {}
    if front:
        (fresh.spec.parent / "keys").write_text(f"{KEY} tester\n")
        fresh.spec.write_text(fresh.spec.read_text().replace("[router]", '[router]\napi_key_file = "keys"'))
        headers = {"Authorization": f"Bearer {KEY}"}
    fresh.must("up")
    # Some answers take ten seconds, so at every moment there is one that would be cut.
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 500}
    with (
        knocking(fresh.url, headers, {**body, "max_tokens": 1}) as short,
        knocking(fresh.url, headers, body) as long,
    ):
        time.sleep(2)
        fresh.must("upgrade", STANDIN_IMAGE=second_name)
        time.sleep(2)
    assert {what for _, what in short + long} <= {"200", "503+", "none"}
    closed = [when for when, what in short if what == "none"]
    # A long one that got no answer came when the port was closed, not before.
    cut = [when for when, what in long if what == "none" and not min(closed) - 0.2 <= when <= max(closed) + 0.2]
    assert not cut
    away = max(closed) - min(closed) if closed else 0.0
    assert away < 5
    refused = [when for when, what in short if what != "200"]
    counts = ", ".join(f"{[w for _, w in short].count(what)} of {what}" for what in ("200", "503+", "none"))
    holder = "front" if front else "router"
    note(
        f"deploy upgrade to another image; the {holder} has the published port",
        f"{counts}; connections refused for {away:.1f} s (`+`: with Retry-After)",
        max(refused) - min(refused) if refused else None,
        "nothing",
        STACK,
    )
