"""What engines and router count themselves: the proof of who did a request's work."""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_TOKENS = "sglang:realtime_tokens_total"
# SGLang writes these when a request ends; health probes are not in them.
_SERVED = {
    "sglang:num_requests_total": "requests",
    "sglang:prompt_tokens_total": "prompt",
    "sglang:generation_tokens_total": "answer",
}
_LOST_TRANSFERS = "sglang:num_transfer_failed_reqs_total"
_QUEUES = ("grammar", "paused", "retracted")
_WORKER_HEALTH = "smg_worker_health"


@dataclass(frozen=True)
class Counters:
    """Work of one engine since its start.

    Attributes:
        computed: prompt tokens whose KV cache it computed.
        decoded: tokens it wrote in decode batches.
    """

    computed: float = 0
    decoded: float = 0

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(self.computed - other.computed, self.decoded - other.decoded)


def parse_counters(text: str) -> Counters:
    """Read an engine's `/metrics` page (SGLang 0.5.23), summed over its ranks.

    Raises:
        ValueError: the text is not in Prometheus' format.
    """
    sums: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == _TOKENS:
                sums[sample.labels.get("mode", "")] += sample.value
    return Counters(computed=sums["prefill_compute"], decoded=sums["decode"])


@dataclass(frozen=True)
class Served:
    """Requests that an engine finished since its start, with their prompt and answer tokens."""

    requests: float = 0
    prompt: float = 0
    answer: float = 0

    def __sub__(self, other: "Served") -> "Served":
        return Served(self.requests - other.requests, self.prompt - other.prompt, self.answer - other.answer)


def parse_served(text: str) -> Served:
    """Read an engine's `/metrics` page (SGLang 0.5.23) for what it finished.

    Raises:
        ValueError: the text is not in Prometheus' format.
    """
    sums = dict.fromkeys(_SERVED.values(), 0.0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in _SERVED:
                sums[_SERVED[sample.name]] += sample.value
    return Served(**sums)


@dataclass(frozen=True)
class Load:
    """What an engine holds now.

    Attributes:
        requests: running and waiting, in any of its queues.
        used_tokens: of the KV pool, without what only the prefix cache keeps.
    """

    requests: int
    used_tokens: int


def parse_load(text: str) -> Load:
    """Read an engine's `/v1/loads` (SGLang 0.5.23), summed over its ranks. Unlike its metrics it is never old.

    Raises:
        ValueError: not what SGLang writes there.
    """
    requests = used = 0
    try:
        for load in json.loads(text)["loads"]:
            queues: dict[str, Any] = {**(load.get("queues") or {}), **(load.get("disaggregation") or {})}
            queues.pop("waiting", None)
            held = [int(value) for name, value in queues.items() if name.endswith("_reqs") or name in _QUEUES]
            requests += int(load["num_running_reqs"]) + int(load["num_waiting_reqs"]) + sum(held)
            used += int(load["num_used_tokens"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the load of an engine: {error!r}") from error
    return Load(requests, used)


def parse_lost_transfers(text: str) -> float:
    """Read an engine's `/metrics` page (SGLang 0.5.23) for the requests whose KV cache was lost between the roles.

    Raises:
        ValueError: the text is not in Prometheus' format.
    """
    families = text_string_to_metric_families(text)
    return sum(sample.value for family in families for sample in family.samples if sample.name == _LOST_TRANSFERS)


def healthy_workers(text: str) -> int:
    """To how many engines a router sends requests, from its own metrics page (sglang-router 0.3.2)."""
    families = text_string_to_metric_families(text)
    return sum(sample.value == 1 for family in families for sample in family.samples if sample.name == _WORKER_HEALTH)


def serving(gained: Mapping[str, Served], prompt_tokens: int, answer_tokens: int) -> list[str]:
    """Say what contradicts that these engines served one request between them, and counted all of it.

    Args:
        gained: what each engine's counters gained during the request.
        prompt_tokens: as the router's answer had it.
        answer_tokens: likewise.

    When other requests finished meanwhile the counters must hold at least this one.
    """
    requests = sum(served.requests for served in gained.values())
    if requests < 1:
        return [f"none of {', '.join(gained)} finished a request"]
    found: list[str] = []
    for what, expected, counted in (
        ("prompt", prompt_tokens, sum(served.prompt for served in gained.values())),
        ("answer", answer_tokens, sum(served.answer for served in gained.values())),
    ):
        if counted < expected or (requests == 1 and counted != expected):
            found.append(f"the engines counted {counted:.0f} {what} tokens for {requests:.0f} request, not {expected}")
    return found


def crossing(prefill: Counters, decode: Counters, sent: int, prompt_tokens: int, answer_tokens: int) -> list[str]:
    """Say what contradicts that one request was prefilled by one engine and decoded by the other.

    Args:
        prefill: what prefill's counters gained during the request.
        decode: what decode's gained.
        sent: bytes that NIXL sent from prefill during the request.
        prompt_tokens: how many tokens of the prompt at least no cache could know.
        answer_tokens: length of the answer. Prefill writes the first token, decode the others.
    """
    found: list[str] = []
    if prefill.computed < prompt_tokens:
        found.append(f"prefill computed {prefill.computed:.0f} of {prompt_tokens} prompt tokens")
    if prefill.decoded:
        found.append(f"prefill decoded {prefill.decoded:.0f} tokens itself")
    if decode.decoded < answer_tokens - 1:
        found.append(f"decode wrote {decode.decoded:.0f} of {answer_tokens} tokens")
    if decode.computed:
        found.append(f"decode computed {decode.computed:.0f} prompt tokens itself")
    if sent <= 0:
        found.append("NIXL sent no bytes from prefill")
    return found
