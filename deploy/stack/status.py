"""What runs now, as plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from deploy.spec.profiles import ALL_ENGINES, FRONT, ROUTER
from deploy.stack import phases
from deploy.stack.client import Endpoint, endpoint
from deploy.stack.compose import RoleState, Stack
from deploy.stack.observe import Compiled, compiled

Json = dict[str, Any]


@dataclass(frozen=True)
class Status:
    """The stack at one moment.

    Attributes:
        url: None unless the router's container exists.
        ready: the router's own word.
        expected: the services without which it does not serve.
        compiled: by engine that serves, what it had to compile.
    """

    project: str
    url: str | None
    ready: bool
    roles: tuple[RoleState, ...]
    phases: dict[str, str]
    expected: tuple[str, ...]
    compiled: Mapping[str, Compiled] = field(default_factory=dict[str, Compiled])

    @property
    def serving(self) -> bool:
        up = {state.role for state in self.roles if state.serving}
        return self.ready and up >= set(self.expected)

    def as_dict(self) -> Json:
        roles: list[Json] = []
        for state in self.roles:
            shown: Json = state.as_dict() | {"phase": self.phases.get(state.role, "")}
            seen = self.compiled.get(state.role)
            shown["compiled"] = seen.model_dump() if seen else None
            roles.append(shown)
        return {
            "project": self.project,
            "url": self.url,
            "ready": self.ready,
            "serving": self.serving,
            "roles": roles,
        }


def status(stack: Stack, ask: bool = True) -> Status:
    """Look at the containers, the router's readiness, and the start phase of each role that is not healthy yet.

    Args:
        ask: also ask each engine that serves what it had to compile (a tenth of a second each).
    """
    roles = tuple(stack.roles())
    target = running_endpoint(stack, roles)
    reached = {
        state.role: phases.phase(stack.log(state.container, tail=2000))
        for state in roles
        if state.status == "running" and state.health == "starting"
    }
    url, ready = (target.url, target.ready()) if target else (None, False)
    asked = [state for state in roles if ask and state.serving and state.role in ALL_ENGINES]
    found = {state.role: counts for state in asked if (counts := compiled(state.container))}
    return Status(stack.project, url, ready, roles, reached, stack.expected if roles else (), found)


def running_endpoint(stack: Stack, roles: tuple[RoleState, ...]) -> Endpoint | None:
    """Where the stack answers, None if it has no router."""
    ports = {state.role: state.ports for state in roles if state.role in (ROUTER, FRONT)}
    if ROUTER not in ports:
        return None
    target = endpoint(stack.config())
    address, _, port = target.url.rpartition(":")
    published = ports.get(FRONT, ports[ROUTER])
    # Started by hand, it may have another port than this repository's settings say.
    return replace(target, url=f"{address}:{min(published)}") if published and int(port) not in published else target


def uptime(state: RoleState, now: datetime | None = None) -> str:
    """How long a container has been running, in words; empty if it is not."""
    if state.status != "running" or not state.started_at:
        return ""
    seconds = int(((now or datetime.now(UTC)) - state.started_at).total_seconds())
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds % 60} s" if minutes else f"{seconds} s"
