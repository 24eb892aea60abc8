"""What the two engines count themselves: the proof that a request crossed from one to the other."""

from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_TOKENS = "sglang:realtime_tokens_total"


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
