"""How long it takes until every host has a file, simulated piece by piece.

A source has so many upload slots, a host so many download slots, each with its share of the line; a piece moves at the
slower of the two. Loss, protocol and disks that are slower than the line are not in it.
"""

import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import simpy

Way = Literal["origin", "caches", "peers"]
WAYS: tuple[Way, ...] = ("origin", "caches", "peers")
PIECES = 64
SLOTS = 4
# Sources of which a host asks at a time, as a peer-to-peer client does.
ASKED = 6


@dataclass(frozen=True)
class Network:
    """Bytes a second.

    Attributes:
        origin: what the registry or the hub sends in all; `cache` likewise for each cache.
        host: of one host, each way.
        hosts_per_cache: of `caches`.
    """

    origin: float
    cache: float
    host: float
    hosts_per_cache: int = 16


class _Source:
    """Whoever sends: the origin, a cache, or a host that has pieces."""

    def __init__(self, environment: simpy.Environment, rate: float, slots: int, pieces: set[int]) -> None:
        self.slots = simpy.Resource(environment, slots)
        self.rate = rate / slots
        self.pieces = pieces
        self.on_the_way: dict[int, simpy.Event] = {}

    @property
    def free(self) -> bool:
        return self.slots.count < self.slots.capacity


def spread(size: float, hosts: int, network: Network, way: Way, seed: int = 1) -> list[float]:
    """When each host has all of a file.

    Args:
        size: bytes.
        way: `origin`: every host from the origin; `caches`: from a cache that fetches each piece once; `peers`: from
            each other, and what no peer has from the origin.

    Returns:
        Seconds, sorted.
    """
    environment = simpy.Environment()
    chance = random.Random(seed)
    everything = set(range(PIECES))
    # The origin is never short of connections, only of bandwidth.
    fast = max(SLOTS, round(network.origin / network.host * SLOTS))
    origin = _Source(environment, network.origin, fast, everything)
    caches: list[_Source] = []
    if way == "caches":
        count = -(-hosts // network.hosts_per_cache)
        slots = max(SLOTS, round(network.cache / network.host * SLOTS))
        caches = [_Source(environment, network.cache, slots, set()) for _ in range(count)]
    peers = [_Source(environment, network.host, SLOTS, set()) for _ in range(hosts)]
    finished: list[float] = []

    def move(source: _Source, rate: float) -> Generator[Any, Any, None]:
        with source.slots.request() as slot:  # pyright: ignore[reportUnknownVariableType]
            yield slot
            yield environment.timeout(size / PIECES / min(source.rate, rate))

    def cached(cache: _Source, piece: int) -> Generator[Any, Any, None]:
        """Have a piece in a cache, fetched once however many ask for it."""
        if piece in cache.pieces:
            return
        if piece not in cache.on_the_way:
            cache.on_the_way[piece] = environment.event()
            yield from move(origin, network.cache / SLOTS)
            cache.pieces.add(piece)
            cache.on_the_way[piece].succeed()
        else:
            yield cache.on_the_way[piece]

    def choose(host: int, wanted: set[int]) -> tuple[_Source, int] | None:
        """A source with a free slot and a piece of it: of few peers asked, else the origin, else none now."""
        if way != "peers":
            source = caches[host // network.hosts_per_cache] if caches else origin
            return source, chance.choice(tuple(wanted))
        for other in chance.sample(range(hosts), min(ASKED, hosts)):
            peer = peers[other]
            if other != host and peer.free and (common := wanted & peer.pieces):
                return peer, chance.choice(tuple(common))
        return (origin, chance.choice(tuple(wanted))) if origin.free else None

    def download(host: int, wanted: set[int]) -> Generator[Any, Any, None]:
        """One of a host's download slots."""
        share = network.host / SLOTS
        while wanted:
            chosen = choose(host, wanted)
            if chosen is None:
                # Ask again when about a quarter of a piece could have moved.
                yield environment.timeout(size / PIECES / share / 4 * chance.uniform(0.8, 1.2))
                continue
            source, piece = chosen
            wanted.discard(piece)
            if caches:
                yield from cached(source, piece)
            yield from move(source, share)
            peers[host].pieces.add(piece)

    def run(host: int) -> Generator[Any, Any, None]:
        wanted = set(everything)
        yield environment.all_of([environment.process(download(host, wanted)) for _ in range(SLOTS)])
        finished.append(environment.now)

    for host in range(hosts):
        environment.process(run(host))
    environment.run()
    return sorted(finished)
