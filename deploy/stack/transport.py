"""Which transport carried the KV cache, and how many bytes: read from what UCX and NIXL print themselves.

docs/transport.md says where these texts come from and what each transport means.
"""

import re
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

# A line of UCX's protocol table. Other lines of the log may stand between two of them, or break one in half.
_CONNECTION = re.compile(r"\| \S+ (self|intra-node|inter-node) cfg#(\d+) +\|")
_OPERATION = re.compile(r"\| remote memory write by ucp_put\S* from (\S+) memory to (\S+) +\|")
_ROW = re.compile(r"\| +\S+\.\.inf \|([^|]+)\|([^|]+)\|")
_LANE = re.compile(r"([a-z][a-z0-9_]*)/([A-Za-z0-9_.:-]+)")
_BYTES_SENT = "agent_tx_bytes_total"


@dataclass(frozen=True, order=True)
class RemoteWrite:
    """How UCX writes large blocks into a peer's memory.

    Attributes:
        source: kind of memory read, such as `host` or `cuda/GPU0`.
        destination: kind of memory written.
        method: UCX's words for it, such as `zero-copy`.
        lanes: transports with their devices, such as `tcp/eth0`, in UCX's order.
    """

    source: str
    destination: str
    method: str
    lanes: tuple[str, ...]

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports alone, such as `tcp`."""
        return tuple(dict.fromkeys(lane.split("/")[0] for lane in self.lanes))


def remote_writes(log: str) -> list[RemoteWrite]:
    """Every way in which the engine that wrote this log writes into a peer, each once.

    Args:
        log: prefill's log, with UCX_PROTO_INFO as in compose.yaml.

    Returns:
        Empty when no peer was connected yet. UCX configuration 0 is the engine's connection to itself and left out.
    """
    found: dict[RemoteWrite, None] = {}
    to_peer = False
    memories: tuple[str, str] | None = None
    for line in log.splitlines():
        if connection := _CONNECTION.search(line):
            to_peer, memories = connection[1] != "self" and connection[2] != "0", None
        elif operation := _OPERATION.search(line):
            memories = (operation[1], operation[2]) if to_peer else None
        elif memories and (row := _ROW.search(line)):
            lanes = tuple(f"{transport}/{device}" for transport, device in _LANE.findall(row[2]))
            if lanes:
                found[RemoteWrite(*memories, row[1].strip(), lanes)] = None
    return list(found)


def describe(writes: list[RemoteWrite]) -> str:
    """One line for people: `tcp (tcp/eth0, host to host)`; `unknown` when there is nothing to tell."""
    if not writes:
        return "unknown"
    names = dict.fromkeys(name for write in writes for name in write.transports)
    ways = [f"{' + '.join(write.lanes)}, {write.source} to {write.destination}" for write in writes]
    return f"{' + '.join(names)} ({'; '.join(ways)})"


def bytes_sent(metrics: str) -> int:
    """Bytes that NIXL sent since the engine started, over all ranks.

    Args:
        metrics: the page of NIXL's own exporter (NIXL_TELEMETRY_PROMETHEUS_PORT in compose.yaml).

    Raises:
        ValueError: the text is not in Prometheus' format, or is not NIXL's page.
    """
    samples = [
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == _BYTES_SENT
    ]
    if not samples:
        raise ValueError(f"the page has no {_BYTES_SENT}")
    return round(sum(samples))
