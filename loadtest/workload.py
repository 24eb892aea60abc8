"""What is sent: request k is a pure function of the plan, the seed and k. No I/O, no clock.

Prompts are words that are one token each in the served model's vocabulary, so that their length in tokens is exact by
construction (and checked against the server's `usage` afterwards). Different k, different words: the prefix cache
helps only where a shared prefix is asked for.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from loadtest.plain import mapping, sequence
from loadtest.sse import Endpoint

ANCHOR = "Text:"
"""First word of each prompt; a template may trim before it, so only what follows is counted as words."""

TRACE_BLOCK = 512
"""Tokens behind one hash id of a Mooncake trace."""


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Length(Model):
    """A token length: fixed (`low == high`), uniform in [low, high], or log-normal with a median, cut to that range."""

    low: int = Field(ge=1)
    high: int = Field(ge=1)
    median: float | None = None
    sigma: float | None = None

    def draw(self, rng: random.Random) -> int:
        if self.low == self.high:
            return self.low
        if self.median is not None and self.sigma is not None:
            return min(self.high, max(self.low, round(rng.lognormvariate(math.log(self.median), self.sigma))))
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        if self.low == self.high:
            return str(self.low)
        if self.median is not None:
            return f"lognormal:{self.median:g}:{self.sigma:g}:{self.high}"
        return f"uniform:{self.low}:{self.high}"


class Synthetic(Model):
    """Random words. `shared_prefix` tokens are the same within each of `groups`; a session has `turns` requests."""

    kind: Literal["synthetic"] = "synthetic"
    input: Length
    output: Length
    shared_prefix: int = Field(default=0, ge=0)
    groups: int = Field(default=1, ge=1)
    turns: int = Field(default=1, ge=1)


class Prompts(Model):
    """One's own prompts: the lines of a JSONL file, taken in order and again from the start when they run out."""

    kind: Literal["prompts"] = "prompts"
    path: str
    output: Length


class Trace(Model):
    """Replay of a Mooncake trace (JSON lines: timestamp in ms, input_length, output_length, hash_ids), sped up."""

    kind: Literal["trace"] = "trace"
    path: str
    speed: float = Field(default=1.0, gt=0)


Workload = Annotated[Synthetic | Prompts | Trace, Field(discriminator="kind")]


class Vocabulary(Model):
    """Words of exactly one token after a space, and the prompt tokens of a request without any of them."""

    words: list[str]
    overhead: int
    source: str


class Plan(Model):
    """All a generator needs. The API key itself is never in it, only the file it is in."""

    url: str
    endpoint: Endpoint = "chat"
    model: str
    api_key_file: str | None = None
    ca_file: str | None = None
    seed: int = 1
    workload: Workload
    vocabulary: Vocabulary
    temperature: float = 0.0
    extra_body: dict[str, Any] = Field(default_factory=dict)
    rate: float | None = Field(default=None, gt=0, description="requests a second, Poisson; None is a closed loop")
    ramp: float = Field(default=0.0, ge=0, description="seconds until the full rate")
    generators: int = Field(default=1, ge=1)
    silence_timeout: float = 300.0
    request_timeout: float = 1800.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send. `asked_input` is None where its exact length cannot be known before it is sent."""

    index: int
    messages: list[dict[str, str]]
    asked_input: int | None
    asked_output: int | None


def parse_length(text: str) -> Length:
    """Reads `256`, `8K`, `uniform:LOW:HIGH` or `lognormal:MEDIAN:SIGMA[:MAX]`. Raises ValueError."""
    name, *parts = text.strip().split(":")
    try:
        match name.lower(), parts:
            case "uniform", [low, high]:
                length = Length(low=_tokens(low), high=_tokens(high))
                if length.low > length.high:
                    raise ValueError("the first bound is above the second")
                return length
            case "lognormal", [median, sigma]:
                return Length(low=1, high=16 * _tokens(median), median=_tokens(median), sigma=float(sigma))
            case "lognormal", [median, sigma, high]:
                return Length(low=1, high=_tokens(high), median=_tokens(median), sigma=float(sigma))
            case _, []:
                return Length(low=_tokens(name), high=_tokens(name))
            case _:
                raise ValueError("not a known form")
    except ValueError as error:
        raise ValueError(
            f"length {text!r}: {error}; allowed are 256, 8K, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MAX]"
        ) from None


def parse_lengths(text: str) -> tuple[Length, Length]:
    """Reads `INPUT/OUTPUT`, each as in `parse_length`. Raises ValueError."""
    if text.count("/") != 1:
        raise ValueError(f"lengths {text!r}: expected INPUT/OUTPUT, for example 1K/1K")
    given_input, given_output = text.split("/")
    return parse_length(given_input), parse_length(given_output)


def _tokens(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kK]?)", text.strip())
    if not match or int(match[1]) < 1:
        raise ValueError(f"{text!r} is not a number of tokens")
    return int(match[1]) * (1024 if match[2] else 1)


def words(vocabulary: Vocabulary, count: int, *key: object) -> list[str]:
    """`count` words, the same for the same key."""
    return random.Random(":".join(map(str, key))).choices(vocabulary.words, k=count)


def synthetic_request(plan: Plan, workload: Synthetic, index: int) -> Request:
    """Request `index` of single-turn synthetic load: exactly `asked_input` prompt tokens, template included."""
    rng = random.Random(f"{plan.seed}:{index}:shape")
    asked_input, asked_output = workload.input.draw(rng), workload.output.draw(rng)
    # Even the shortest prompt keeps four words of its own, else it would not be unique.
    own = max(4, asked_input - plan.vocabulary.overhead)
    shared = min(workload.shared_prefix, own - 4)
    text = words(plan.vocabulary, shared, plan.seed, "prefix", rng.randrange(workload.groups)) if shared else []
    text += words(plan.vocabulary, own - shared, plan.seed, index)
    return Request(index, [_user(text)], own + plan.vocabulary.overhead, asked_output)


def turn_request(
    plan: Plan, workload: Synthetic, session: int, turn: int, history: Sequence[dict[str, str]]
) -> Request:
    """Turn `turn` of a conversation: `history` holds the turns before it with the server's real answers."""
    index = session * workload.turns + turn
    first = synthetic_request(plan, workload, index)
    if turn == 0:
        return first
    return Request(index, [*history, *first.messages], None, first.asked_output)


def prompt_request(plan: Plan, workload: Prompts, lines: Sequence[list[dict[str, str]]], index: int) -> Request:
    """Request `index` of one's own prompts."""
    rng = random.Random(f"{plan.seed}:{index}:shape")
    return Request(index, lines[index % len(lines)], None, workload.output.draw(rng))


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace; `at` in seconds since its first."""

    at: float
    input: int
    output: int
    blocks: tuple[int, ...]


def trace_request(plan: Plan, rows: Sequence[TraceRow], index: int) -> Request:
    """Row `index` of the trace: equal hash ids give equal text, so the prefix cache finds what it found originally."""
    row = rows[index]
    own = max(1, row.input - plan.vocabulary.overhead)
    text: list[str] = []
    for block in row.blocks:
        text += words(plan.vocabulary, min(TRACE_BLOCK, own - len(text)), plan.seed, "block", block)
    text += words(plan.vocabulary, own - len(text), plan.seed, index)
    return Request(index, [_user(text)], own + plan.vocabulary.overhead, row.output)


def path(plan: Plan) -> str:
    """The endpoint's path."""
    return "/generate" if plan.endpoint == "generate" else "/v1/chat/completions"


def body(plan: Plan, request: Request) -> dict[str, Any]:
    """The JSON body. `ignore_eos` makes the output length what was asked."""
    if plan.endpoint == "generate":
        sampling = {"temperature": plan.temperature, "max_new_tokens": request.asked_output, "ignore_eos": True}
        text = "\n".join(message["content"] for message in request.messages)
        return {"text": text, "sampling_params": sampling, "stream": True, **plan.extra_body}
    return {
        "model": plan.model,
        "messages": request.messages,
        "max_tokens": request.asked_output,
        "temperature": plan.temperature,
        "ignore_eos": True,
        "stream": True,
        # The router in front drops what it does not know; a bare server then counts tokens in each chunk.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        **plan.extra_body,
    }


def _user(text: list[str]) -> dict[str, str]:
    return {"role": "user", "content": " ".join([ANCHOR, *text])}


def read_prompts(text: str, name: str) -> list[list[dict[str, str]]]:
    """Reads JSONL prompts: a JSON string, `{"prompt": …}` or `{"messages": [{"role", "content"}, …]}` a line.

    Raises ValueError that names file and line.
    """
    prompts: list[list[dict[str, str]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            value: Any = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON ({error})") from None
        if isinstance(value, str):
            prompts.append([{"role": "user", "content": value}])
            continue
        row = mapping(value)
        if isinstance(row.get("prompt"), str):
            prompts.append([{"role": "user", "content": row["prompt"]}])
        elif isinstance(row.get("messages"), list) and row["messages"]:
            messages = sequence(row["messages"])
            if not all(isinstance(mapping(m).get(name), str) for m in messages for name in ("role", "content")):
                raise ValueError(f"{where}: each message needs a text `role` and a text `content`")
            prompts.append([{"role": m["role"], "content": m["content"]} for m in messages])
        else:
            raise ValueError(f'{where}: expected a string, {{"prompt": …}} or {{"messages": […]}}')
    if not prompts:
        raise ValueError(f"{name}: no prompts in it")
    return prompts


def read_trace(text: str, name: str, speed: float) -> list[TraceRow]:
    """Reads a Mooncake trace (https://github.com/kvcache-ai/Mooncake), in order of time. Raises ValueError."""
    rows: list[TraceRow] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
            rows.append(
                TraceRow(
                    float(row["timestamp"]) / 1000 / speed,
                    int(row["input_length"]),
                    int(row["output_length"]),
                    tuple(int(block) for block in row.get("hash_ids", ())),
                )
            )
            if rows[-1].input < 1 or rows[-1].output < 1:
                raise ValueError("a length below 1")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{name}, line {number}: {error!r}; expected timestamp (ms), input_length, output_length, hash_ids"
            ) from None
    if not rows:
        raise ValueError(f"{name}: no requests in it")
    rows.sort(key=lambda row: row.at)
    return [TraceRow(row.at - rows[0].at, row.input, row.output, row.blocks) for row in rows]


def arrival(units: float, rate: float, ramp: float) -> float:
    """Time of the Poisson arrival at `units` = the sum of its unit-exponential gaps (time rescaling).

    The rate grows linearly from 0 to `rate` within `ramp` seconds: the expected count is rate·t²/(2·ramp) before and
    rate·(t - ramp/2) after it.
    """
    before = rate * ramp / 2
    if units < before:
        return math.sqrt(2 * ramp * units / rate)
    return units / rate + ramp / 2
