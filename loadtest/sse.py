"""Server-sent events and what a chat or generate event says about tokens. Pure: bytes in, observations out.

Line and event rules: https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from loadtest.plain import mapping, sequence

Endpoint = Literal["chat", "generate"]


class EventParser:
    """Splits a byte stream, cut anywhere, into the `data` of its events."""

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []
        self._after_cr = False

    def feed(self, block: bytes) -> list[bytes]:
        """Returns the data of every event that `block` completes, in order. Comments and other fields are skipped."""
        if self._after_cr and block[:1] == b"\n":
            block = block[1:]
        if block:
            self._after_cr = False
        events: list[bytes] = []
        lines = (self._tail + block).splitlines(keepends=True)
        self._tail = b""
        for line in lines:
            end = line[-1]
            if end == 10:
                text = line[:-2] if line[-2:-1] == b"\r" else line[:-1]
            elif end == 13:
                text = line[:-1]
                self._after_cr = True
            else:
                self._tail = line
                break
            if not text:
                if self._data:
                    events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                    self._data = []
            elif text.startswith(b"data:"):
                self._data.append(text[6:] if text[5:6] == b" " else text[5:])
        if lines and lines[-1][-1] != 13:
            self._after_cr = False
        return events


@dataclass(slots=True)
class Usage:
    """Token counts as the server reports them."""

    prompt: int
    completion: int
    cached: int | None = None
    reasoning: int | None = None


@dataclass(slots=True)
class Observation:
    """What one event says. `tokens` is the cumulative completion count, when the event carries one."""

    token: bool = False
    content: bool = False
    text: str = ""
    tokens: int | None = None
    usage: Usage | None = None
    finish: str | None = None
    error: str | None = None
    done: bool = False


def read_event(endpoint: Endpoint, data: bytes) -> Observation:
    """Interprets one event of `/v1/chat/completions` or `/generate`.

    A reasoning delta is a token but not content. ValueError is raised for what is no such event.
    """
    if data.strip() == b"[DONE]":
        return Observation(done=True)
    try:
        return _read(endpoint, data)
    except (KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not an event: {data[:80]!r}") from error


def _read(endpoint: Endpoint, data: bytes) -> Observation:
    loaded: Any = json.loads(data)
    if not isinstance(loaded, dict):
        raise ValueError(f"an event is not a JSON object: {data[:80]!r}")
    body = cast("dict[str, Any]", loaded)
    if body.get("error"):
        return Observation(error=_error_text(body["error"]))
    return _read_chat(body) if endpoint == "chat" else _read_generate(body)


def _read_chat(body: dict[str, Any]) -> Observation:
    seen = Observation()
    if body.get("object") == "error":
        seen.error = _error_text(body.get("message"))
        return seen
    for entry in sequence(body.get("choices")):
        choice = mapping(entry)
        delta = mapping(choice.get("delta"))
        content = delta.get("content")
        if content:
            seen.token = seen.content = True
            seen.text += str(content)
        elif delta.get("reasoning_content") or delta.get("reasoning"):
            seen.token = True
        if delta.get("tool_calls"):
            seen.token = seen.content = True
        if choice.get("finish_reason"):
            seen.finish = str(choice["finish_reason"])
    usage = mapping(body.get("usage"))
    if usage:
        details = mapping(usage.get("prompt_tokens_details"))
        seen.usage = Usage(
            prompt=int(usage["prompt_tokens"]),
            completion=int(usage.get("completion_tokens") or 0),
            cached=details.get("cached_tokens"),
            reasoning=usage.get("reasoning_tokens"),
        )
        if body.get("choices"):
            seen.tokens = seen.usage.completion
    return seen


def _read_generate(body: dict[str, Any]) -> Observation:
    seen = Observation(text=str(body.get("text") or ""))
    meta = mapping(body.get("meta_info"))
    if "completion_tokens" in meta:
        seen.tokens = int(meta["completion_tokens"])
        seen.usage = Usage(
            prompt=int(meta.get("prompt_tokens") or 0), completion=seen.tokens, cached=meta.get("cached_tokens")
        )
    seen.token = seen.content = bool(seen.tokens) or bool(seen.text)
    finish = meta.get("finish_reason")
    if finish:
        reason = mapping(finish)
        seen.finish = str(reason.get("type", finish))
        if seen.finish == "abort":
            seen.error = f"aborted by the server: {reason.get('message', '')}"
    return seen


def _error_text(error: object) -> str:
    return str(mapping(error).get("message") or error)


@dataclass
class StreamRecord:
    """Collects one response. Feed it each socket read with the time of that read.

    `times` and `counts` have one entry for each arrival that brought tokens: seconds on the caller's clock, and the
    cumulative completion tokens where the server says them (else None). Tokens that came in one read share its time.
    """

    endpoint: Endpoint
    keep_text: bool = False
    times: list[float] = field(default_factory=list[float])
    counts: list[int | None] = field(default_factory=list["int | None"])
    first_content: float | None = None
    usage: Usage | None = None
    finish: str | None = None
    error: str | None = None
    done: bool = False
    text: str = ""
    _parser: EventParser = field(default_factory=EventParser)

    def feed(self, now: float, block: bytes) -> int:
        """Takes the bytes of one read; returns how many arrivals it added. Raises ValueError for malformed data."""
        added = 0
        for data in self._parser.feed(block):
            seen = read_event(self.endpoint, data)
            if seen.done:
                self.done = True
                continue
            if seen.error is not None and self.error is None:
                self.error = seen.error
            if seen.finish is not None:
                self.finish = seen.finish
            if seen.usage is not None:
                self.usage = seen.usage
            known = self.counts[-1] if self.counts else 0
            grew = seen.tokens is not None and (known is None or seen.tokens > known)
            if grew or (seen.tokens is None and seen.token):
                self.times.append(now)
                self.counts.append(seen.tokens)
                added += 1
            if seen.content and self.first_content is None:
                self.first_content = now
            if self.keep_text:
                self.text = seen.text if self.endpoint == "generate" else self.text + seen.text
        return added
