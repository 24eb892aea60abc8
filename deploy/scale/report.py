"""From so many hosts to what it takes: time until the last one serves, and what reaches its limit."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from deploy.lock.model import Lock
from deploy.scale.distribution import WAYS, Network, Way, spread
from deploy.spec.memory import LAYERS, TOKEN_BYTES, WINDOW, bytes_per_token, weight_bytes
from deploy.spec.model import Spec

GIGABIT = 1e9 / 8
# README, "Measured": the first push, compressed by Docker, and the image unpacked.
PACKED_BYTES, UNPACKED_BYTES = 4.86e9, 11.6e9
# README: start of prefill and decode without a GPU, to healthy.
START_S = 57
# README: one disk of the machine that measured, two readers.
DISK_RATE = 1.39e9
# docs/scale.md: gzip on one processor, in unpacked bytes a second. Layers are unpacked one after another.
UNPACK_RATE = 0.19e9
# Users report about 13 minutes for the first start, whose kernels are compiled (not measured here).
COMPILE_S = 780
PROBE_S = 5
"""--health-check-interval-secs of compose.yaml."""
ROUTER_REQUESTS = 256
"""--max-concurrent-requests of compose.yaml, of one router."""


@dataclass(frozen=True)
class Assumed:
    """What is not known here, all of it for the reader to replace. Rates in bytes a second, times in seconds."""

    network: Network
    disk: float = DISK_RATE
    unpack: float = UNPACK_RATE
    start: float = START_S
    compile: float = COMPILE_S


@dataclass(frozen=True)
class Fleet:
    """So many hosts.

    Attributes:
        image, model: seconds until the last host has it, by way.
        first: until the last host serves, from nothing; `later`: image, model and compiled kernels are there.
        requests: decoded at once by all engines; `routers` take so many.
        probes: a second, at each engine, from all routers.
        traffic: bytes a second between hosts, if each host computes prompts at `PROMPT_RATE`; only with pairs.
    """

    hosts: int
    image: dict[Way, float]
    model: dict[Way, float]
    first: dict[Way, float]
    later: float
    requests: int
    routers: int
    probes: float
    traffic: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


PROMPT_RATE = 10_000
"""Prompt tokens a second of one host; an assumption, since no such host has been measured."""


def fleets(spec: Spec, lock: Lock, hosts: Sequence[int], assumed: Assumed) -> list[Fleet]:
    """Simulate each number of hosts."""
    return [_fleet(spec, lock, count, assumed) for count in hosts]


def model_bytes(spec: Spec, lock: Lock) -> float:
    """Of the locked model, else computed from its shapes."""
    return float(lock.model.size) if lock.model else float(weight_bytes(spec.model.variant))


def image_bytes(lock: Lock) -> tuple[float, float]:
    """Of the image as a registry holds it and unpacked, as locked where it is, else as measured."""
    layers = lock.image.layer if lock.image else ()
    packed = float(sum(layer.blob_size for layer in layers)) or PACKED_BYTES
    return packed, float(sum(layer.size for layer in layers)) or UNPACKED_BYTES


def request_bytes(tokens: int, ranks: int) -> float:
    """KV cache that a prompt of so many tokens sends from prefill to decode, all ranks together.

    Every rank has the whole compressed cache, because the model has one KV head, and sends it to its counterpart.
    """
    windows = min(tokens, WINDOW) * LAYERS * TOKEN_BYTES
    return ranks * (tokens * bytes_per_token() + windows)


def _fleet(spec: Spec, lock: Lock, hosts: int, assumed: Assumed) -> Fleet:
    packed, unpacked = image_bytes(lock)
    size = model_bytes(spec, lock)
    image: dict[Way, float] = {way: spread(packed, hosts, assumed.network, way)[-1] for way in WAYS}
    model: dict[Way, float] = {way: spread(size, hosts, assumed.network, way)[-1] for way in WAYS}
    load = size / assumed.disk + assumed.start
    unpack = unpacked / assumed.unpack
    engines = max(1, len(spec.replica)) if spec.profile == "replicas" else 1
    batch = spec.decode.max_running_requests
    requests = hosts * engines * batch
    routers = max(2, ceil(requests / ROUTER_REQUESTS))
    # With pairs chosen at random all but one in `hosts` requests cross; prompts of 8192 tokens stand for all.
    crossing = (hosts - 1) / hosts if spec.profile == "pd" else 0.0
    per_token = request_bytes(8192, spec.gpus_per_engine or 1) / 8192
    return Fleet(
        hosts=hosts,
        image=image,
        model=model,
        # One line brings both: the image first, then the model while the image is unpacked.
        first={way: image[way] + max(model[way], unpack) + load + assumed.compile for way in WAYS},
        later=load,
        requests=requests,
        routers=routers,
        probes=routers / PROBE_S,
        traffic=crossing * PROMPT_RATE * per_token,
    )
