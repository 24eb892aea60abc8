"""The published points for this model on this GPU, and how far the roofline is from each. Pure."""

from dataclasses import dataclass

from sm120_kernels.gpus import RTX_PRO_6000

from deploy.gap.model import VERIFIED, AllReduce, Setting, ceiling

CONTEXT = 2048
"""Assumed: no record says its prompts' length."""


@dataclass(frozen=True)
class Point:
    """A public record: `ranks` GPUs, `users` in flight."""

    source: str
    ranks: int
    users: int
    tokens_per_second: float
    speculation: bool = False


POINTS = (
    Point("SGLang", 4, 1, 183.5),
    Point("SGLang", 2, 16, 520),
    Point("SGLang", 4, 64, 2126),
    Point("SGLang", 4, 1, 301, speculation=True),
    Point("SGLang", 2, 16, 1395, speculation=True),
    Point("vLLM, lowest", 2, 16, 1049, speculation=True),
    Point("vLLM, highest", 2, 16, 1097, speculation=True),
)
"""For C=64 the record does not say whether it speculates; it is taken not to."""


@dataclass(frozen=True)
class Check:
    """A record against the model.

    Attributes:
        predicted: tokens a second of the model, SGLang's launches and its PCIe IPC all-reduce.
        roofline: the same from memory and products alone: a record above it would refute the model.
        error: predicted over published, less 1. None with speculation, whose acceptance nobody published.
        accepted: tokens a request must have got from each step, by engine of speculation, for the record to agree with
            the model; possible if no more than are verified at once.
    """

    point: Point
    predicted: float
    roofline: float
    error: float | None
    accepted: dict[str, float]


def check(point: Point, all_reduce: AllReduce = "ipc") -> Check:
    """Hold the model against one record."""
    plain = Setting(RTX_PRO_6000, point.ranks, all_reduce=all_reduce)
    if not point.speculation:
        found = ceiling(point.users, CONTEXT, plain)
        error = found.tokens_per_second / point.tokens_per_second - 1
        return Check(point, found.tokens_per_second, found.roofline_tokens_per_second, error, {})
    needed: dict[str, float] = {}
    best = roofline = 0.0
    for way in ("eagle", "dspark"):
        one = Setting(RTX_PRO_6000, point.ranks, all_reduce=all_reduce, speculation=way, accepted=1.0)
        found = ceiling(point.users, CONTEXT, one)
        needed[way] = point.tokens_per_second / found.tokens_per_second
        best = max(best, found.tokens_per_second * VERIFIED[way])
        roofline = max(roofline, found.roofline_tokens_per_second * VERIFIED[way])
    return Check(point, best, roofline, None, needed)
