"""What the two engines count themselves: the proof that a request crossed from one to the other."""

from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

_TOKENS = "sglang:realtime_tokens_total"
_MEGABYTES = "sglang:kv_transfer_total_mb_sum"
_TRANSFERS = "sglang:kv_transfer_total_mb_count"
MEGABYTE = 1024**2


@dataclass(frozen=True)
class Counters:
    """Work of one engine since its start.

    Attributes:
        computed: prompt tokens whose KV cache it computed.
        decoded: tokens it wrote in decode batches.
        transfers: KV transfers it finished.
        transferred: bytes of KV cache it sent.
    """

    computed: float = 0
    decoded: float = 0
    transfers: float = 0
    transferred: float = 0

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(
            self.computed - other.computed,
            self.decoded - other.decoded,
            self.transfers - other.transfers,
            self.transferred - other.transferred,
        )


def parse_counters(text: str) -> Counters:
    """Read an engine's `/metrics` page (SGLang 0.5.23), summed over its ranks.

    Raises:
        ValueError: the text is not in Prometheus' format.
    """
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[(sample.name, sample.labels.get("mode", ""))] += sample.value
    return Counters(
        computed=sums[(_TOKENS, "prefill_compute")],
        decoded=sums[(_TOKENS, "decode")],
        transfers=sums[(_TRANSFERS, "")],
        transferred=sums[(_MEGABYTES, "")] * MEGABYTE,
    )


def crossing(prefill: Counters, decode: Counters, prompt_tokens: int, answer_tokens: int) -> list[str]:
    """Say what contradicts that one request was prefilled by one engine and decoded by the other.

    Args:
        prefill: what prefill's counters gained during the request.
        decode: what decode's gained.
        prompt_tokens: length of the prompt by the server's count; nothing of it was cached.
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
    if not prefill.transferred or not prefill.transfers:
        found.append("prefill sent no KV cache")
    return found
