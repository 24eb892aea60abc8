"""The lines are those of a real stack (SGLang 0.5.23, router 0.3.2), shortened."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.observe_verbs import in_words
from deploy.stack.trace import trace

ROOM = 7641857896340556932
DAY = "2026-11-30T01:34"


def router(second: str, request_id: str, words: str, more: str = "") -> str:
    return (
        f"{DAY}:{second}Z \x1b[2m2026-11-30 01:34:24\x1b[0m \x1b[32m INFO\x1b[0m "
        f"\x1b[1mhttp_request\x1b[0m\x1b[1m{{\x1b[0m"
        f"\x1b[3mmethod\x1b[0m\x1b[2m=\x1b[0mPOST \x1b[3muri\x1b[0m\x1b[2m=\x1b[0m/v1/chat/completions "
        f'\x1b[3mrequest_id\x1b[0m\x1b[2m=\x1b[0m"{request_id}"{more}\x1b[1m}}\x1b[0m: middleware.rs:310: {words} '
        "processing request"
    )


def engine(second: str, event: str, request_id: str, rid: str, room: int = ROOM, **more: object) -> str:
    said = {
        "event": f"request.{event}",
        "rid": rid,
        "obj": {"rid": rid, "bootstrap_room": room, "stream": False},
        "headers": {"x-request-id": request_id},
        **more,
    }
    return f"{DAY}:{second}Z [2026-11-30 01:34:24] {json.dumps(said)}"


def front(second: str, request_id: str) -> str:
    said = {
        "time": "t",
        "event": "request",
        "request_id": request_id,
        "client": "alice",
        "status": 200,
        "total_ms": 893,
    }
    return f"{DAY}:{second}Z {json.dumps(said)}"


OUT = {"meta_info": {"prompt_tokens": 30, "completion_tokens": 8, "e2e_latency": 0.7, "id": "148a958364cc41fe"}}
LOGS = {
    "front": "\n".join(
        [front("25.684", "order-66"), front("25.9", "order-667"), f"{DAY}:26.0Z Connect from 127.0.0.1"]
    ),
    "router": "\n".join(
        [
            router("24.792", "order-66", "started"),
            router("24.793", "order-667", "started"),
            router("25.683", "order-66", "finished", " status_code=200 latency=890161"),
        ]
    ),
    "prefill": "\n".join(
        [
            engine("24.840", "received", "order-66", "467a1e471020414e"),
            f"{DAY}:25.100Z [2026-11-30 01:34:25] Prefill transfer failed for bootstrap_room={ROOM}",
            f"{DAY}:25.101Z [2026-11-30 01:34:25] Prefill transfer failed for bootstrap_room={ROOM}1",
        ]
    ),
    "decode": "\n".join(
        [
            engine("25.032", "received", "order-66", "148a958364cc41fe"),
            engine("25.033", "received", "order-6", "other", 17),
            engine("25.680", "finished", "order-66", "148a958364cc41fe", out=OUT),
            f"{DAY}:25.681Z not a line of JSON {{ order-66",
        ]
    ),
}


def test_a_request_is_followed_through_all_roles_in_the_order_of_time() -> None:
    found = trace(LOGS, "order-66")
    assert [(step.role, step.event) for step in found.steps] == [
        ("router", "started"),
        ("prefill", "received"),
        ("decode", "received"),
        ("prefill", "mentioned"),
        ("decode", "finished"),
        ("router", "finished"),
        ("front", "request"),
    ]
    assert found.roles == ("router", "prefill", "decode", "front")
    assert found.rooms == (ROOM,)
    details = {(step.role, step.event): step.details for step in found.steps}
    assert details["decode", "finished"]["completion_tokens"] == 8
    assert details["router", "finished"]["status_code"] == "200"
    assert details["front", "request"]["client"] == "alice"


def test_an_id_that_is_the_beginning_of_another_is_not_confused_with_it() -> None:
    assert [step.role for step in trace(LOGS, "order-667").steps] == ["router", "front"]
    assert [step.details["rid"] for step in trace(LOGS, "order-6").steps if "rid" in step.details] == ["other"]


def test_an_id_that_nobody_logged_gives_nothing() -> None:
    assert trace(LOGS, "order").steps == ()


@given(st.dictionaries(st.sampled_from(["front", "router", "prefill"]), st.text()), st.from_regex(r"[\w.-]{1,20}"))
def test_no_log_breaks_it(logs: dict[str, str], request_id: str) -> None:
    trace({role: f"{DAY}:01.0Z {log}" for role, log in logs.items()}, request_id)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("e2e_latency", 0.01414904199987177, "14.1ms"),
        ("latency", "182018", "182.0ms"),
        ("finish_reason", {"type": "stop", "matched": 2}, "stop"),
        ("finish_reason", {"type": "abort", "message": "prefill died"}, "{'type': 'abort', 'message': 'prefill died'}"),
        ("prompt_tokens", 30, "30"),
    ],
)
def test_details_have_units_for_people_and_keep_an_aborts_reason(name: str, value: object, words: str) -> None:
    assert in_words(name, value) == words
