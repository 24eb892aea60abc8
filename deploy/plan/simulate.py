"""Hosts under a load, with their queues: a discrete-event simulation (SimPy). No I/O; the same seed, the same result.

Requests arrive as a Poisson process. Each goes to a host at random, the least that any balancer does, and there to the
engines in turn, as the router sends them. A host of profile `pd` reads
prompts one after the other on one engine and decodes on another; an engine of `replicas` does both and reads first, so
that its decoding waits meanwhile. All requests that an engine decodes get tokens at the same pace, which depends on how
many they are; more than fit into the batch wait. All prompts and answers have the same length.
"""

import heapq
import random
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from deploy.plan.service import Service

WARM_SHARE = 0.3
"""Of the simulated time, before anything is counted: the queues fill first."""


@dataclass(frozen=True)
class Load:
    """`rate` requests a second, for so many simulated seconds."""

    rate: float
    seconds: float
    seed: int = 1


@dataclass(frozen=True)
class Seen:
    """What the requests saw that arrived after the warm-up, seconds.

    Attributes:
        ttft, tpot: time to the first token, and between tokens after it, of each request that got them.
        arrived, finished: requests after the warm-up; what did not finish was still in the system at the end.
        reading, decoding: share of the time in which an engine reads prompts, and has something to decode.
        batch: requests decoded together, mean over the time that an engine decodes.
        growth: how many more requests are in the system at the end than in the middle of the counted time, as a share
            of those that arrived since: a queue that grows without end keeps a share of them.
    """

    ttft: np.ndarray[Any, np.dtype[np.float64]]
    tpot: np.ndarray[Any, np.dtype[np.float64]]
    arrived: int
    finished: int
    reading: float
    decoding: float
    batch: float
    growth: float

    def percentile(self, name: str, share: float) -> float:
        """Of "ttft" or "tpot", seconds; infinite if no request got that far."""
        values = self.ttft if name == "ttft" else self.tpot
        return float(np.percentile(values, share)) if len(values) else float("inf")


class _Decoder:
    """The requests that one engine decodes, all at the same pace.

    `clock` counts the tokens that each of them has got since the start, so that one number carries all of them on; a
    request is done when the clock is where it was at its start plus its answer. Only who comes or goes changes the
    pace.
    """

    def __init__(self, env: simpy.Environment, service: Service) -> None:
        self.env, self.service = env, service
        self.clock = self.since = 0.0
        self.stopped = False
        self.ends: list[tuple[float, int, simpy.Event]] = []
        self.waiting: list[tuple[int, simpy.Event]] = []
        self.number = self.version = 0
        self.busy = self.served = 0.0

    def start(self, tokens: int) -> simpy.Event:
        """Decode that many tokens of one request; the event comes when they are done."""
        done = self.env.event()
        self._advance()
        if len(self.ends) < self.service.slots:
            self._enter(tokens, done)
        else:
            self.waiting.append((tokens, done))
        self._plan()
        return done

    def stop(self, stopped: bool) -> None:
        """Pause while the engine reads a prompt, or go on."""
        self._advance()
        self.stopped = stopped
        self._plan()

    def _enter(self, tokens: int, done: simpy.Event) -> None:
        self.number += 1
        heapq.heappush(self.ends, (self.clock + tokens, self.number, done))

    def _advance(self) -> None:
        """Bring the clock to now."""
        passed = self.env.now - self.since
        self.since = self.env.now
        if self.ends:
            self.busy += passed
            self.served += passed * len(self.ends)
            if not self.stopped:
                self.clock += passed / self.service.token_seconds(len(self.ends))

    def _plan(self) -> None:
        """Wake up when the first is done; a plan of before no longer counts."""
        self.version += 1
        if self.ends and not self.stopped:
            left = max(0.0, self.ends[0][0] - self.clock) * self.service.token_seconds(len(self.ends))
            wake: Any = self.env.timeout(left, self.version)
            wake.callbacks.append(self._wake)

    def _wake(self, event: Any) -> None:
        if event.value != self.version:
            return
        self._advance()
        # The first is done by construction; rounding must not say otherwise.
        self.clock = max(self.clock, self.ends[0][0])
        while self.ends and self.ends[0][0] <= self.clock + 1e-9:
            heapq.heappop(self.ends)[2].succeed()
        while self.waiting and len(self.ends) < self.service.slots:
            self._enter(*self.waiting.pop(0))
        self._plan()


class _Engine:
    """One engine that decodes, and the queue before whoever reads its prompts."""

    def __init__(self, env: simpy.Environment, service: Service, apart: bool) -> None:
        # SimPy does not say of what its queue is.
        self.reader: Any = simpy.Resource(env)
        self.decoder = _Decoder(env, service)
        self.apart = apart
        self.reading = 0.0


def simulate(service: Service, load: Load, hosts: int, *, apart: bool, engines: int = 1) -> Seen:
    """Run the hosts under the load.

    Args:
        service: of one engine.
        hosts: how many.
        apart: prompts are read on GPUs of their own (`pd`).
        engines: of a host that decode.
    """
    env = simpy.Environment()
    fleet = [[_Engine(env, service, apart) for _ in range(engines)] for _ in range(hosts)]
    pool = [engine for host in fleet for engine in host]
    first, last = WARM_SHARE * load.seconds, load.seconds
    ttft: list[float] = []
    tpot: list[float] = []
    counts = {"arrived": 0, "finished": 0, "inside": 0, "middle": 0, "before": 0}

    def request(engine: _Engine) -> Generator[simpy.Event, Any, None]:
        begun = env.now
        counted = begun >= first
        counts["arrived"] += counted
        counts["inside"] += 1
        turn: Any = engine.reader.request()
        with turn:
            yield turn
            started = env.now
            if not engine.apart:
                engine.decoder.stop(True)
            yield env.timeout(service.prompt_seconds)
            if not engine.apart and not engine.reader.queue:
                engine.decoder.stop(False)
            engine.reading += max(0.0, env.now - max(started, first))
        written = env.now
        if counted:
            ttft.append(written - begun)
        if service.answer > 1:
            yield engine.decoder.start(service.answer - 1)
            if counted:
                tpot.append((env.now - written) / (service.answer - 1))
        counts["finished"] += counted
        counts["inside"] -= 1

    def arrivals() -> Generator[simpy.Event, Any, None]:
        draw = random.Random(load.seed)
        turns = [0] * hosts
        while True:
            yield env.timeout(draw.expovariate(load.rate))
            host = draw.randrange(hosts)
            env.process(request(fleet[host][turns[host] % engines]))
            turns[host] += 1

    def look() -> Generator[simpy.Event, Any, None]:
        yield env.timeout(first + (last - first) / 2)
        counts["middle"], counts["before"] = counts["inside"], counts["arrived"]

    env.process(arrivals())
    env.process(look())
    env.run(until=last)
    for engine in pool:
        engine.decoder.stop(engine.decoder.stopped)
    counted_time = (last - first) * len(pool)
    busy = sum(engine.decoder.busy for engine in pool)
    return Seen(
        np.asarray(ttft),
        np.asarray(tpot),
        counts["arrived"],
        counts["finished"],
        min(1.0, sum(engine.reading for engine in pool) / counted_time),
        busy / (last * len(pool)),
        sum(engine.decoder.served for engine in pool) / busy if busy else 0.0,
        (counts["inside"] - counts["middle"]) / max(1, counts["arrived"] - counts["before"]),
    )
