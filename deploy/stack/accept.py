"""Acceptance: the proof that the running stack serves a request the way its profile says. HTTP 200 is not enough."""

import random
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from deploy.errors import DeployError
from deploy.spec.profiles import DECODE, PREFILL, ROUTER
from deploy.stack.client import Endpoint, stream
from deploy.stack.compose import Stack
from deploy.stack.counters import (
    Counters,
    Served,
    crossing,
    healthy_workers,
    parse_counters,
    parse_served,
    serving,
)
from deploy.stack.environment import NIXL_PORT, ROUTER_METRICS_PORT
from deploy.stack.events import Running
from deploy.stack.transport import bytes_sent, describe, remote_writes
from loadtest.sse import Usage

MEBIBYTE = 1024**2
READY_PATIENCE_S = 60.0
COUNTER_PATIENCE_S = 10.0
# Longer than the model's 128-token attention window, so that every kind of KV state has to cross.
PROMPT_WORDS = 300
ANSWER_TOKENS = 48
Check = Callable[[Usage], "Work"]
T = TypeVar("T")
_WORDS = [
    "time",
    "list",
    "word",
    "key",
    "cache",
    "page",
    "block",
    "table",
    "first",
    "last",
    "long",
    "short",
    "small",
    "large",
    "open",
    "close",
    "read",
    "write",
]


class NotAccepted(DeployError):
    """The stack runs, but a request did not go the way it must."""

    exit_code = 4


@dataclass(frozen=True)
class Acceptance:
    """What the accepting request showed.

    Attributes:
        engines: those that did the work, in its order.
        transferred: bytes that NIXL sent from prefill during the request; 0 if one engine does both.
        transport: how they travelled.
        first_token_s: seconds from the request to the first piece of the answer.
        total_s: seconds to the end of the answer.
        pieces: in how many pieces the answer arrived.
        needs_key: clients must send an API key.
    """

    url: str
    model: str
    prompt_tokens: int
    answer_tokens: int
    engines: tuple[str, ...]
    transferred: int
    transport: str
    first_token_s: float
    total_s: float
    pieces: int
    needs_key: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.transferred:
            return (
                f"{self.prompt_tokens} prompt tokens crossed from prefill to decode as "
                f"{self.transferred / MEBIBYTE:.2f} MiB of KV cache over {self.transport}"
            )
        return f"{self.prompt_tokens} prompt and {self.answer_tokens} answer tokens, counted by {self.engines[0]}"


@dataclass(frozen=True)
class Work:
    """What the engines say that they did for the accepting request."""

    engines: tuple[str, ...]
    transferred: int
    transport: str


@dataclass(frozen=True)
class Snapshot:
    """What both engines have counted so far; `sent` is NIXL's own count of bytes that left prefill."""

    prefill: Counters
    decode: Counters
    sent: int

    def __sub__(self, other: "Snapshot") -> "Snapshot":
        return Snapshot(self.prefill - other.prefill, self.decode - other.decode, self.sent - other.sent)


def accept(stack: Stack, target: Endpoint, running: Running) -> Acceptance:
    """Send a request that no cache can know and check what the engines counted meanwhile.

    Raises:
        NotAccepted: the router does not become ready, or the counters contradict what the profile promises.
        RequestFailed: the request itself failed.
    """
    running.progress("waiting for the router")
    _wait_ready(target)
    running.progress("asking a question that no cache can know")
    check = _replicas_check(stack) if stack.profile == "replicas" else _crossing_check(stack)
    begun = time.monotonic()
    first: float | None = None
    pieces = 0
    answer = stream(target, unique_prompt(uuid.uuid4().hex), max_tokens=ANSWER_TOKENS, ignore_end=True)
    while True:
        try:
            next(answer)
        except StopIteration as end:
            usage = end.value
            break
        first = first or time.monotonic() - begun
        pieces += 1
    total = time.monotonic() - begun
    if first is None or pieces < 2:
        raise NotAccepted(
            "the answer was not streamed", f"{usage.completion} tokens came in {pieces} pieces", "deploy logs router"
        )
    running.progress("comparing what the engines counted")
    work = check(usage)
    return Acceptance(
        url=target.url,
        model=target.model,
        prompt_tokens=usage.prompt,
        answer_tokens=usage.completion,
        engines=work.engines,
        transferred=work.transferred,
        transport=work.transport,
        first_token_s=round(first, 3),
        total_s=round(total, 3),
        pieces=pieces,
        needs_key=target.api_key_file is not None,
    )


def unique_prompt(seed: str) -> str:
    """A prompt of PROMPT_WORDS words that starts with `seed`, so that no prefix of it is in a cache."""
    choose = random.Random(seed)
    return f"{seed} " + " ".join(choose.choices(_WORDS, k=PROMPT_WORDS))


def _wait_ready(target: Endpoint) -> None:
    deadline = time.monotonic() + READY_PATIENCE_S
    while not target.ready():
        if time.monotonic() > deadline:
            raise NotAccepted(
                f"the router on {target.url} is not ready after {READY_PATIENCE_S:.0f} s",
                "it has not found its engines",
                "deploy logs router",
            )
        time.sleep(0.5)


def _crossing_check(stack: Stack) -> Check:
    """From now on: did a request cross from prefill to decode?"""
    before = _snapshot(stack)

    def check(usage: Usage) -> Work:
        gained = _settled(
            lambda: _snapshot(stack) - before,
            lambda seen: crossing(seen.prefill, seen.decode, seen.sent, PROMPT_WORDS, usage.completion),
            "the request did not cross from prefill to decode",
            "deploy logs prefill decode",
        )
        return Work((PREFILL, DECODE), gained.sent, _transport(stack))

    return check


def _replicas_check(stack: Stack) -> Check:
    """From now on: did the engines together count exactly one request's tokens?"""
    _wait_found(stack)
    before = _served(stack)

    def check(usage: Usage) -> Work:
        gained = _settled(
            lambda: {name: now - before[name] for name, now in _served(stack).items()},
            lambda seen: serving(seen, usage.prompt, usage.completion),
            "the engines' counters do not account for the request",
            "deploy logs",
        )
        return Work(tuple(name for name, served in gained.items() if served.requests), 0, "none: one engine does both")

    return check


def _wait_found(stack: Stack) -> None:
    """Wait until the router sends requests to every engine and not only to the first that it found.

    Raises:
        NotAccepted: it does not find all of them.
    """
    deadline = time.monotonic() + READY_PATIENCE_S
    while (found := healthy_workers(stack.metrics(ROUTER, ROUTER_METRICS_PORT))) < len(stack.engines):
        if time.monotonic() > deadline:
            raise NotAccepted(
                f"the router has found {found} of {len(stack.engines)} engines",
                "the others would stand idle",
                "deploy logs router",
            )
        time.sleep(0.5)


def _settled(look: Callable[[], T], judge: Callable[[T], list[str]], refusal: str, fix: str) -> T:
    """Wait until the counters, which the engines write a moment later, show what they must.

    Raises:
        NotAccepted: `refusal`, with what contradicts it.
    """
    deadline = time.monotonic() + COUNTER_PATIENCE_S
    while True:
        seen = look()
        contradictions = judge(seen)
        if not contradictions:
            return seen
        if time.monotonic() > deadline:
            raise NotAccepted(refusal, "; ".join(contradictions), fix)
        time.sleep(0.5)


def _served(stack: Stack) -> dict[str, Served]:
    return {name: parse_served(stack.metrics(name)) for name in stack.engines}


def _snapshot(stack: Stack) -> Snapshot:
    return Snapshot(
        parse_counters(stack.metrics(PREFILL)),
        parse_counters(stack.metrics(DECODE)),
        bytes_sent(stack.metrics(PREFILL, NIXL_PORT)),
    )


def _transport(stack: Stack) -> str:
    """Name the transport; a stack that should copy from GPU to GPU and does not is refused.

    Raises:
        NotAccepted: transport is p2p, and UCX chose something else, as it does in silence.
    """
    prefill = next((state.container for state in stack.roles() if state.role == PREFILL), "")
    writes = remote_writes(stack.log(prefill))
    if stack.transport == "p2p" and not any("cuda_ipc" in write.transports for write in writes):
        raise NotAccepted(
            "the KV cache does not go from GPU to GPU",
            f"UCX chose {describe(writes)}",
            'set transport = "isolated", or see docs/transport.md',
        )
    return describe(writes)
