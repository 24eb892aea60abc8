"""Output of the probe programs in engine_runtime.probes: one JSON object a line, other words between them."""

import json
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ValidationError

from deploy.host.report import AllReduceResult, CopyResult, PeerResult, TransferResult
from deploy.stack.transport import remote_writes

Result = TypeVar("Result", bound=BaseModel)


def _objects(text: str, probe: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in text.split("\n"):
        try:
            value: object = json.loads(line) if line.startswith("{") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and cast(dict[str, Any], value).get("probe") == probe:
            found.append(cast(dict[str, Any], value))
    return found


def _valid(kind: type[Result], values: dict[str, Any]) -> Result | None:
    """The result made of those keys that it has; None if one of them cannot be."""
    try:
        return kind.model_validate({key: value for key, value in values.items() if key in kind.model_fields})
    except ValidationError:
        return None


def parse_all_reduce(text: str) -> AllReduceResult | None:
    """The last result of engine_runtime.probes.all_reduce."""
    found = [result for values in _objects(text, "all_reduce") if (result := _valid(AllReduceResult, values))]
    return found[-1] if found else None


def parse_copies(text: str) -> tuple[list[CopyResult], list[PeerResult]]:
    """Results of engine_runtime.probes.memory_copy; the copy at which it hung or failed carries the reason."""
    copies: list[CopyResult] = []
    peers: list[PeerResult] = []
    for values in _objects(text, "memory_copy"):
        if values.get("kind") == "ended":
            place: object = values.get("at")
            at = cast(dict[str, Any], place) if isinstance(place, dict) else {}
            values = {**at, "error": str(values.get("said") or values.get("outcome"))}
        if copy := _valid(CopyResult, values):
            copies.append(copy)
        elif peer := _valid(PeerResult, values):
            peers.append(peer)
    return copies, peers


def parse_transfer(
    text: str, log: str, transport: Literal["isolated", "p2p"], memory: Literal["cpu", "cuda"]
) -> TransferResult | None:
    """The last result of engine_runtime.probes.nixl_transfer.

    Args:
        text: standard output of the pair or of the initiator.
        log: UCX's words of the same process.
        transport: how the two were placed.
        memory: what was moved.
    """
    used = list(dict.fromkeys(name for write in remote_writes(log) for name in write.transports))
    asked = {"transport": transport, "memory": memory, "used": used}
    found = [
        result for values in _objects(text, "nixl_transfer") if (result := _valid(TransferResult, {**values, **asked}))
    ]
    return found[-1] if found else None
