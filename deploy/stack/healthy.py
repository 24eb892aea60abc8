"""Waits until containers serve, and says why one does not."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from deploy.errors import DeployError
from deploy.spec.profiles import ALL_ENGINES, ROUTER
from deploy.stack import phases
from deploy.stack.compose import RoleState, Stack
from deploy.stack.events import Event, Report
from deploy.stack.state import State, write

LOOK_S = 1.0
ROUTER_S = 60.0
"""How long a router may take to notice that its engines are there; without them its health check fails."""


class RoleFailed(DeployError):
    """A container died or became unhealthy while starting; `lines` are the telling ones of its log."""

    exit_code = 4

    def __init__(self, role: str, message: str, lines: list[str], log: Path) -> None:
        super().__init__(f"{role} failed to start: {message}", "\n".join(lines) or "it logged nothing", f"less {log}")
        self.role = role
        self.lines = lines


def wait_healthy(stack: Stack, roles: tuple[str, ...], state: State, report: Report) -> None:
    """Watch roles until all are healthy, reporting each one's own phase.

    Raises:
        RoleFailed: one died, restarted, vanished or became unhealthy.
    """
    begun = time.monotonic()
    seen = {role: phases.PHASES[0][0] for role in roles}
    restarts: dict[str, int] = {}
    since = datetime.now(UTC) - timedelta(hours=1)
    finished: set[str] = set()
    incomplete = begun
    while finished != set(roles):
        looked = datetime.now(UTC)
        now = {container.role: container for container in stack.roles()}
        # Docker ends "starting" by itself, so this does not wait for an engine that is broken and not asked for.
        if any(container.health == "starting" for name, container in now.items() if name in ALL_ENGINES):
            incomplete = time.monotonic()
        for role in roles:
            container = now.get(role)
            if container is None:
                raise RoleFailed(role, "its container was removed", [], state.folder)
            restarts.setdefault(role, container.restarts)
            excused = role == ROUTER and time.monotonic() - incomplete < ROUTER_S
            if failure := _failure(container, restarts[role], excused):
                raise _role_failed(stack, container, failure, seen[role], state)
            if role in finished:
                continue
            if container.serving:
                finished.add(role)
                report(Event("start", "finished", "healthy", role, seconds=time.monotonic() - begun))
                continue
            reached = phases.later(seen[role], phases.phase(stack.log(container.container, since=since)))
            seen[role] = reached
            report(Event("start", "progress", reached, role))
        since = looked - timedelta(seconds=2)
        if finished != set(roles):
            time.sleep(LOOK_S)


def _failure(container: RoleState, restarts: int, may_be_unhealthy: bool) -> str | None:
    if container.out_of_memory:
        return "the kernel killed it for lack of memory"
    if container.status in ("exited", "dead", "restarting", "removing"):
        return f"it ended with exit code {container.exit_code}"
    if container.restarts > restarts:
        return "it died and was started again"
    if container.health == "unhealthy" and not may_be_unhealthy:
        return "its health check fails"
    return None


def _role_failed(stack: Stack, container: RoleState, failure: str, phase: str, state: State) -> RoleFailed:
    log = phases.plain(stack.log(container.container))
    file = state.folder / "failed" / f"{container.role}.log"
    write(file, log)
    return RoleFailed(container.role, f"{failure} while {phase}", phases.relevant(log), file)
