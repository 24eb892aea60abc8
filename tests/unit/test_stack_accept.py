"""Acceptance with stand-in counters; tests/docker has the real engines."""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import pytest

from deploy.stack import accept as acceptance
from deploy.stack.accept import NotAccepted, accept
from deploy.stack.client import Endpoint
from deploy.stack.events import Running
from loadtest.sse import Usage

PROMPT, ANSWER = 306, 48


@dataclass
class FakeStack:
    """Stands for running engines: their counters grow when the request is sent."""

    profile: str
    engines: tuple[str, ...]
    after: dict[str, str]
    transport: str = "isolated"
    healthy: int = 2
    asked: bool = field(default=False)

    def metrics(self, role: str, port: int = 30000) -> str:
        if role == "router":
            return "# TYPE smg_worker_health gauge\n" + "".join(
                f'smg_worker_health{{worker="{name}"}} {int(number < self.healthy)}\n'
                for number, name in enumerate(self.engines)
            )
        if port != 30000:
            sent = 5_000_000 if self.asked else 0
            return f"# TYPE agent_tx_bytes counter\nagent_tx_bytes_total {sent}\n"
        return self.after.get(role, "") if self.asked else ""

    def roles(self) -> list[Any]:
        return []

    def log(self, container: str) -> str:
        return ""


def finished(prompt: int, answer: int) -> str:
    return "".join(
        f'# TYPE sglang:{name} counter\nsglang:{name}_total{{is_streaming="true"}} {value}\n'
        for name, value in (("num_requests", 1), ("prompt_tokens", prompt), ("generation_tokens", answer))
    )


def computed(**modes: int) -> str:
    return "# TYPE sglang:realtime_tokens counter\n" + "".join(
        f'sglang:realtime_tokens_total{{mode="{mode}"}} {value}\n' for mode, value in modes.items()
    )


def ready(target: Endpoint) -> None:
    """The router of the stand-in is always ready."""


def run(stack: FakeStack, monkeypatch: pytest.MonkeyPatch) -> acceptance.Acceptance:
    def stream(*_: Any, **__: Any) -> Generator[str, None, Usage]:
        stack.asked = True
        yield "one"
        yield "two"
        return Usage(PROMPT, ANSWER)

    monkeypatch.setattr(acceptance, "stream", stream)
    monkeypatch.setattr(acceptance, "COUNTER_PATIENCE_S", 0.0)
    monkeypatch.setattr(acceptance, "READY_PATIENCE_S", 0.0)
    monkeypatch.setattr(acceptance, "_wait_ready", ready)
    target = Endpoint("http://127.0.0.1:1", "m")
    return accept(stack, target, Running("accept", lambda event: None))  # type: ignore[arg-type]


def test_replicas_are_accepted_when_one_engine_counted_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = FakeStack("replicas", ("engine", "engine-2"), {"engine-2": finished(PROMPT, ANSWER)})
    accepted = run(stack, monkeypatch)
    assert (accepted.engines, accepted.transferred) == (("engine-2",), 0)
    assert str(accepted) == f"{PROMPT} prompt and {ANSWER} answer tokens, counted by engine-2"


@pytest.mark.parametrize(
    ("after", "healthy", "words"),
    [
        ({}, 2, "counters do not account"),
        ({"engine": finished(PROMPT - 1, ANSWER)}, 2, "counters do not account"),
        ({"engine": finished(PROMPT, ANSWER)}, 1, "found 1 of 2 engines"),
    ],
)
def test_replicas_are_refused_when_tokens_or_engines_are_missing(
    after: dict[str, str], healthy: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotAccepted, match=words):
        run(FakeStack("replicas", ("engine", "engine-2"), after, healthy=healthy), monkeypatch)


def test_prefill_and_decode_are_accepted_when_the_request_crossed(monkeypatch: pytest.MonkeyPatch) -> None:
    after = {"prefill": computed(prefill_compute=PROMPT), "decode": computed(decode=ANSWER - 1)}
    accepted = run(FakeStack("pd", ("prefill", "decode"), after), monkeypatch)
    assert (accepted.engines, accepted.transferred) == (("prefill", "decode"), 5_000_000)
    assert "crossed from prefill to decode as 4.77 MiB" in str(accepted)


def test_a_decode_that_computed_the_prompt_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    after = {"prefill": computed(), "decode": computed(prefill_compute=PROMPT, decode=ANSWER - 1)}
    with pytest.raises(NotAccepted, match="did not cross"):
        run(FakeStack("pd", ("prefill", "decode"), after), monkeypatch)
