"""Follows one request through the logs of all containers: front, router, prefill, decode."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from deploy.stack.phases import plain

_STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z) (.*)")
_ROUTER = re.compile(r"(started|finished) processing request|ERROR|WARN")
_ROUTER_FIELD = re.compile(r'(method|uri|status_code|latency|error)="?([^"\s}]+)"?')
_ENGINE = re.compile(r"\[[^]]+\] (\{.*\})")
_REQUEST_ID = "x-request-id"
_FINISHED = ("prompt_tokens", "completion_tokens", "cached_tokens", "e2e_latency", "queue_time", "finish_reason")
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
"""What the front takes over as a request's id; it gives others a new one."""


@dataclass(frozen=True)
class Step:
    """Something that one role logged of the request.

    Attributes:
        at: when Docker received the line, RFC 3339 in UTC.
        event: `request` (front), `started`, `finished`, `received`, or `mentioned` for a line in words.
        details: what the line says, by name.
    """

    at: str
    role: str
    event: str
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Trace:
    """The way of one request.

    Attributes:
        rooms: numbers under which prefill and decode exchanged its KV cache; their logs name errors by these.
    """

    request_id: str
    steps: tuple[Step, ...]
    rooms: tuple[int, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        """Who logged something of it, in the order of the first line."""
        return tuple(dict.fromkeys(step.role for step in self.steps))

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "roles": self.roles}


def trace(logs: Mapping[str, str], request_id: str) -> Trace:
    """Find a request in logs.

    Args:
        logs: by role, each line with Docker's own time before it (`docker logs --timestamps`).
        request_id: what `X-Request-Id` said.
    """
    steps: list[Step] = []
    rids: set[str] = set()
    rooms: set[int] = set()
    rest: list[tuple[str, str, str]] = []
    for role, log in logs.items():
        for at, line in _stamped(log):
            step = _step(role, at, line, request_id)
            if step is None:
                rest.append((role, at, line))
                continue
            steps.append(step)
            rids |= {rid for rid in [step.details.get("rid")] if isinstance(rid, str)}
            rooms |= {room for room in [step.details.get("bootstrap_room")] if isinstance(room, int)}
    # Lines in words name the engines' own id or the number of the transfer.
    names = [re.escape(name) for name in (*rids, *(f"{room}" for room in rooms))]
    if names:
        mentions = re.compile(rf"(?<![\w-])({'|'.join(names)})(?![\w-])")
        steps += [Step(at, role, "mentioned", {"line": line}) for role, at, line in rest if mentions.search(line)]
    return Trace(request_id, tuple(sorted(steps, key=lambda step: step.at)), tuple(sorted(rooms)))


def _stamped(log: str) -> Iterable[tuple[str, str]]:
    for line in log.splitlines():
        if found := _STAMP.fullmatch(line):
            yield found[1], plain(found[2]).rstrip()


def _step(role: str, at: str, line: str, request_id: str) -> Step | None:
    if request_id not in line:
        return None
    if role == "front":
        said = _json(line)
        if said.get("request_id") != request_id:
            return None
        return Step(at, role, "request", {name: value for name, value in said.items() if name not in ("event", "time")})
    if role == "router":
        if f'request_id="{request_id}"' not in line or not (event := _ROUTER.search(line)):
            return None
        details: dict[str, Any] = dict(_ROUTER_FIELD.findall(line))
        if event[1] is None:
            details["line"] = line
        return Step(at, role, event[1] or "mentioned", details)
    found = _ENGINE.search(line)
    said = _json(found[1]) if found else {}
    if _mapping(said.get("headers")).get(_REQUEST_ID) != request_id:
        return None
    return Step(at, role, str(said.get("event", "")).removeprefix("request."), _engine_details(said))


def _engine_details(said: Mapping[str, Any]) -> dict[str, Any]:
    details: dict[str, Any] = {"rid": said.get("rid")}
    asked = _mapping(said.get("obj"))
    details |= {name: asked[name] for name in ("bootstrap_room", "stream") if asked.get(name) is not None}
    told = _mapping(_mapping(said.get("out")).get("meta_info"))
    return details | {name: told[name] for name in _FINISHED if told.get(name) is not None}


def _json(text: str) -> dict[str, Any]:
    try:
        return _mapping(json.loads(text))
    except ValueError:
        return {}


def _mapping(value: Any) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}
