"""Events and tokens from bytes, however they were cut."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from loadtest.sse import Endpoint, EventParser, StreamRecord, read_event

KEYS = (
    *("choices", "delta", "content", "reasoning", "finish_reason", "usage", "prompt_tokens", "completion_tokens"),
    *("prompt_tokens_details", "error", "object", "message", "meta_info", "text"),
)


def chat(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def usage(prompt: int, completion: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion}


def event(data: dict[str, Any] | str) -> bytes:
    return b"data: " + (data if isinstance(data, str) else json.dumps(data)).encode() + b"\n\n"


STREAM = b"".join(
    [
        event(chat(role="assistant", content="")),
        b": keep-alive\n\n",
        event(chat(reasoning_content="hm")),
        event(chat(content="")),
        event(chat(content="one")),
        event(chat(content=" two three")),
        event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}),
        event({"choices": [], "usage": usage(12, 4)}),
        event("[DONE]"),
    ]
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=40).map(sorted), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_the_same_events_come_out_however_the_stream_is_cut(cuts: list[int], newline: bytes) -> None:
    stream = STREAM.replace(b"\n", newline)
    edges = [0, *cuts, len(stream)]
    pieces = EventParser()
    found = [data for begin, end in pairwise(edges) if begin <= end for data in pieces.feed(stream[begin:end])]
    whole = EventParser()
    # A lone carriage return at the very end might be half of a line break; the next byte settles it.
    assert found + pieces.feed(b"\n") == whole.feed(stream) + whole.feed(b"\n")
    assert len(found) >= 7


@given(st.lists(st.integers(0, len(STREAM)), max_size=20).map(sorted))
def test_times_are_those_of_the_read_that_completed_an_event(cuts: list[int]) -> None:
    record = StreamRecord("chat", keep_text=True)
    edges = sorted({0, *cuts, len(STREAM)})
    ends = [STREAM.index(b"\n\n", STREAM.index(mark)) + 2 for mark in (b"hm", b"one", b" two")]
    for begin, end in pairwise(edges):
        record.feed(float(end), STREAM[begin:end])
    assert record.times == [float(min(edge for edge in edges if edge >= end)) for end in ends]
    assert record.first_content == record.times[1]
    assert record.text == "one two three"
    assert record.usage is not None and (record.usage.prompt, record.usage.completion) == (12, 4)
    assert record.done and record.finish == "length" and record.error is None


def test_several_data_lines_are_one_event() -> None:
    assert EventParser().feed(b"event: x\ndata: a\ndata:b\nid: 7\n\n") == [b"a\nb"]


def test_a_running_count_tells_how_many_tokens_a_chunk_brought() -> None:
    record = StreamRecord("chat")
    for now, count in ((1.0, 3), (2.0, 3), (3.0, 6)):
        record.feed(now, event(chat(content="x") | {"usage": usage(5, count)}))
    assert record.times == [1.0, 3.0] and record.counts == [3, 6]


def test_generate_counts_by_meta_info() -> None:
    record = StreamRecord("generate")
    for now, count in ((1.0, 1), (2.0, 4)):
        record.feed(now, event({"text": "", "meta_info": {"prompt_tokens": 9, "completion_tokens": count}}))
    record.feed(3.0, event("[DONE]"))
    assert record.counts == [1, 4] and record.usage is not None and record.usage.completion == 4


def test_errors_inside_the_stream_are_seen() -> None:
    assert read_event("chat", b'{"error":{"message":"out of memory","code":500}}').error == "out of memory"
    assert read_event("chat", b'{"object":"error","message":"too long"}').error == "too long"
    aborted = b'{"text":"","meta_info":{"finish_reason":{"type":"abort","message":"gone"}}}'
    assert "gone" in (read_event("generate", aborted).error or "")


nasty = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
)


@given(st.sampled_from(["chat", "generate"]), st.binary() | nasty.map(lambda value: json.dumps(value).encode()))
@example("chat", b"[" * 100_000)
@example("chat", b'{"usage": {"completion_tokens": 1}}')
@example("chat", b'{"usage": {"prompt_tokens": 1, "completion_tokens": 1e999}}')
@example("generate", b'{"meta_info": {"completion_tokens": []}}')
def test_whatever_a_server_sends_is_an_event_or_refused(endpoint: Endpoint, data: bytes) -> None:
    with suppress(ValueError):
        read_event(endpoint, data)
