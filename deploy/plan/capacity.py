"""The number of hosts: what one host carries within the limits, then all of them together. Pure but for the seed."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from deploy.plan.service import Service
from deploy.plan.simulate import Load, Seen, simulate

Profile = Literal["pd", "replicas"]
BISECTIONS = 9
LEAST_REQUESTS, MOST_REQUESTS = 1500, 150_000
LIFETIMES, FLEET_LIFETIMES = 8.0, 4.0
"""Simulated time, in lives of a request from arrival to its last token, at the least: of one host, of all."""
GROWING = 0.03
"""Share of the arrivals that stay in the system: above, the queue grows without end; below, it is chance."""
TRIES = 12


@dataclass(frozen=True)
class Limits:
    """What `share` percent of the requests must see at most, seconds; None: only that the queues stay finite."""

    ttft: float | None = None
    tpot: float | None = None
    share: float = 95.0


@dataclass(frozen=True)
class Option:
    """A way to use a host of 8 GPUs."""

    profile: Profile
    service: Service
    engines: int

    @property
    def apart(self) -> bool:
        return self.profile == "pd"

    @property
    def lifetime(self) -> float:
        """Seconds of a request that waits for nobody, with a full batch."""
        return self.service.prompt_seconds + self.service.answer * self.service.token_seconds(self.service.slots)

    @property
    def most(self) -> float:
        """Requests a second that one host can carry at all, its engines never idle."""
        decode = self.service.answer * self.service.token_seconds(self.service.slots) / self.service.slots
        if self.apart:
            return min(1 / self.service.prompt_seconds, 1 / decode)
        return self.engines / (self.service.prompt_seconds + decode)


@dataclass(frozen=True)
class Plan:
    """What an option needs.

    Attributes:
        host_rate: requests a second that one host carries within the limits; 0 if it cannot carry one.
        hosts: how many carry the wanted rate; 0 if no number does.
        headroom: share by which the rate could still grow.
        seen: what the requests of the whole fleet saw in the simulation; None without hosts.
        simulated: seconds of it.
    """

    option: Option
    host_rate: float
    hosts: int
    headroom: float
    seen: Seen | None
    simulated: float


def meets(seen: Seen, limits: Limits) -> bool:
    """Did the requests see what was promised, and did the queues stay finite?"""
    if not seen.finished or seen.growth > GROWING:
        return False
    pairs = (("ttft", limits.ttft), ("tpot", limits.tpot))
    return all(limit is None or seen.percentile(name, limits.share) <= limit for name, limit in pairs)


def host_rate(option: Option, limits: Limits) -> float:
    """The highest rate of Poisson arrivals that one host carries within the limits, by bisection."""
    low, high = 0.0, option.most
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        load = Load(middle, max(LEAST_REQUESTS / middle, LIFETIMES * option.lifetime))
        seen = simulate(option.service, load, 1, apart=option.apart, engines=option.engines)
        low, high = (middle, high) if meets(seen, limits) else (low, middle)
    return low


def plan(option: Option, rate: float, limits: Limits, say: Callable[[str], None] = lambda _: None) -> Plan:
    """Find the number of hosts for `rate` requests a second, and simulate all of them.

    Hosts chosen at random each get Poisson arrivals, as the one alone did; where the simulation of all says otherwise,
    more are tried.
    """
    alone = host_rate(option, limits)
    if alone <= 0:
        return Plan(option, 0.0, 0, 0.0, None, 0.0)
    hosts = math.ceil(rate / alone - 1e-9)
    seconds = max(FLEET_LIFETIMES * option.lifetime, min(LEAST_REQUESTS * hosts, MOST_REQUESTS) / rate)
    for _ in range(TRIES):
        say(f"{option.profile}: simulating {hosts} hosts, {rate * seconds:.0f} requests")
        seen = simulate(option.service, Load(rate, seconds), hosts, apart=option.apart, engines=option.engines)
        if meets(seen, limits):
            return Plan(option, alone, hosts, hosts * alone / rate - 1, seen, seconds)
        hosts += max(1, hosts // 20)
    return Plan(option, alone, 0, 0.0, None, seconds)
