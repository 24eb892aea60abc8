"""Watches the running stack: restarts a role that is stuck, stops one that dies again and again, records incidents.

Docker itself starts a process again that has ended. What it does not do: restart one that is unhealthy, give up one
that never gets well, tell the router, and keep what was logged around it.
"""

import json
import math
import shutil
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from python_on_whales import DockerClient
from python_on_whales.exceptions import DockerException

from deploy.errors import DeployError
from deploy.spec.profiles import ALL_ENGINES, DECODE, PREFILL, ROUTER
from deploy.stack import change, gate, journal
from deploy.stack.client import RequestFailed, endpoint, stream
from deploy.stack.compose import RoleState, Stack, running_stack, words
from deploy.stack.counters import parse_load, parse_lost_transfers
from deploy.stack.events import Report
from deploy.stack.exposition import write_roles
from deploy.stack.state import LockHeld, NoStateFolder, State, write

Kind = Literal["died", "stuck", "unrouted", "leaks", "stopped", "left"]
Remedy = Literal["none", "restart", "replace router", "stop", "start"]

# Deaths or restarts of one role within the window before it is given up. An engine needs minutes to start, so a
# shorter window would never see a loop.
LOOP = 4
LOOP_WINDOW_S = 3600.0
# An engine that hangs as the gate sees it, a healthy one that the router does not use, one that does not answer our
# probe either, a container that has ended, an idle engine that holds KV cache: for how long that may be. The gate waits
# for ENGINE_SILENCE before it says so; with its least, 10 s, that is SGLang's own limit for a stuck scheduler.
HANGING_S = 10.0
UNROUTED_S = 60.0
SILENT_S = 30.0
ENDED_S = 30.0
LEAK_S = 120.0
# A prefill whose KV cache does not reach decode although both are well. NIXL 1.5.1 never opens a connection again that
# TCP has given up.
UNDELIVERED_S = 10.0
QUESTION_S = 5.0
KEPT_INCIDENTS = 50
ROLE_LOG_LINES, OTHER_LOG_LINES = 2000, 200


@dataclass(frozen=True)
class Seen:
    """One role at one look.

    Attributes:
        routed: the router sends it requests; None if that is not known or not wanted.
        answers: an engine that the router does not use, our own probe; the router, its gate. None if nobody asked.
        hanging: an engine that shows the gate no sign of life.
        delivers: prefill, whether its KV cache reached decode for a question of ours. None if nobody asked.
        requests: it has in work; None if it does not say.
        used_tokens: of its KV pool.
    """

    role: str
    status: str
    health: str
    restarts: int
    container: str
    routed: bool | None = None
    answers: bool | None = None
    hanging: bool = False
    delivers: bool | None = None
    requests: int | None = None
    used_tokens: int = 0


@dataclass(frozen=True)
class Incident:
    """Something that should not be, and what is done about it."""

    role: str
    kind: Kind
    what: str
    remedy: Remedy


@dataclass
class Memory:
    """What earlier looks have shown.

    Attributes:
        restarts: Docker's count at the last look, by container.
        ends: when a role died or was restarted for being stuck.
        since: since when a condition holds, by role and condition.
        given_up: containers that were stopped.
        lost_transfers: that decode had counted when last there was no doubt.
    """

    restarts: dict[str, int] = field(default_factory=dict[str, int])
    ends: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    since: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    given_up: set[str] = field(default_factory=set[str])
    lost_transfers: float = math.inf


def judge(memory: Memory, seen: Iterable[Seen], now: float) -> list[Incident]:
    """Say what is wrong and what to do about it; `memory` takes up this look.

    Args:
        now: seconds of a clock that never jumps.
    """
    found: list[Incident] = []
    for role in seen:
        died = role.restarts - memory.restarts.setdefault(role.container, role.restarts)
        memory.restarts[role.container] = role.restarts
        serving = role.status == "running" and role.health == "healthy"
        # Docker's probes are slow to give an engine up. Where the gate, or the router's and ours, see more there is no
        # need to wait.
        hanging = serving and role.hanging
        silent = serving and not hanging and role.routed is False and role.answers is False
        # Unhealthy is a router without its engines too. What is wrong with the router itself its gate mends.
        stuck = role.status == "running" and role.health == "unhealthy" and not (role.role == ROUTER and role.answers)
        stuck = _lasts(memory, role.role, "hanging", hanging, now, HANGING_S) or stuck
        stuck = _lasts(memory, role.role, "silent", silent, now, SILENT_S) or stuck
        undelivered = serving and role.delivers is False
        stuck = _lasts(memory, role.role, "undelivered", undelivered, now, UNDELIVERED_S) or stuck
        # Docker starts nothing that has ended when it comes back after having been killed.
        over = role.status == "exited" and role.container not in memory.given_up
        ended = _lasts(memory, role.role, "ended", over, now, ENDED_S)
        ends = memory.ends.setdefault(role.role, [])
        ends[:] = [when for when in ends if now - when < LOOP_WINDOW_S] + [now] * (died + stuck + ended)
        if (died or stuck or ended) and len(ends) >= LOOP:
            memory.given_up.add(role.container)
            minutes = LOOP_WINDOW_S / 60
            found.append(
                Incident(role.role, "stopped", f"it ended or stuck {len(ends)} times in {minutes:.0f} minutes", "stop")
            )
        elif stuck:
            if undelivered:
                what = "its KV cache does not reach decode"
            else:
                what = "it does not answer" if silent or hanging else "its health check fails"
            found.append(Incident(role.role, "stuck", what, "restart"))
        elif ended:
            found.append(Incident(role.role, "left", "it has ended and nobody has started it again", "start"))
        elif died:
            found.append(Incident(role.role, "died", "it ended, and Docker started it again", "none"))
        if role.container in memory.given_up:
            continue
        unrouted = serving and role.routed is False and not silent and not hanging
        if _lasts(memory, role.role, "unrouted", unrouted, now, UNROUTED_S):
            found.append(
                Incident(role.role, "unrouted", "it is healthy and the router does not use it", "replace router")
            )
        idle_and_full = role.requests == 0 and role.used_tokens > 0
        if _lasts(memory, role.role, "leaks", idle_and_full, now, LEAK_S):
            what = f"it is idle and {role.used_tokens} tokens of its KV pool are in use"
            found.append(Incident(role.role, "leaks", what, "none"))
    return found


def _lasts(memory: Memory, role: str, condition: str, holds: bool, now: float, limit: float) -> bool:
    """Whether a condition has just lasted for `limit` seconds; it is reported once, and again as long after that."""
    if not holds:
        memory.since.pop((role, condition), None)
        return False
    if now - memory.since.setdefault((role, condition), now) < limit:
        return False
    memory.since[role, condition] = now
    return True


def watch(
    root: Path,
    state: State,
    interval_s: float,
    report: Report,
    told: Callable[[Incident, Path], None],
    trouble: Callable[[Exception], None],
    once: bool,
) -> None:
    """Look again and again; returns after one look if `once`.

    Args:
        told: called with each incident and the folder of its record.
        trouble: called with what kept a look from being finished, such as a Docker engine that is away; the next look
            comes all the same.

    Raises:
        NoStateFolder: the state folder is somebody else's.
        DeployError, DockerException, OSError: the one look of `once` could not be finished.
    """
    memory = Memory()
    while True:
        try:
            with state.lock("watch"):
                if journal.cut_off(state):
                    change.heal(root, state, report)
                stack = running_stack(root, state.environment)
                with _tolerant(trouble):
                    write_roles(state, stack.roles(), datetime.now(UTC))
                for incident in judge(memory, look(stack, memory), time.monotonic()):
                    with _tolerant(trouble):
                        told(incident, record(stack, state, incident))
                    _remedy(stack, incident)
        except LockHeld:
            # Another command is changing the stack: whatever is so now is its doing.
            pass
        except NoStateFolder:
            # A wrong name on the command line: no later look would find it otherwise.
            raise
        except (DeployError, DockerException, OSError) as error:
            if once:
                raise
            trouble(error)
        if once:
            return
        time.sleep(interval_s)


@contextmanager
def _tolerant(trouble: Callable[[Exception], None]) -> Generator[None]:
    """What cannot be written, on a full disk, must not keep a role stuck."""
    try:
        yield
    except OSError as error:
        trouble(error)


def look(stack: Stack, memory: Memory) -> list[Seen]:
    """Look at every container, at all at once: one that hangs may take long. What cannot be asked is left out."""
    states = stack.roles()
    try:
        view = gate.view(stack)
    except DeployError:
        view = None

    def one(state: RoleState) -> Seen:
        return _seen(stack, state, view, memory)

    with ThreadPoolExecutor(max(len(states), 1)) as pool:
        return list(pool.map(one, states))


def _seen(stack: Stack, state: RoleState, view: gate.View | None, memory: Memory) -> Seen:
    routed: bool | None = None
    answers = view is not None if state.role == ROUTER else None
    hanging = view is not None and state.role in view.hanging
    delivers, requests, used = None, None, 0
    if state.role in ALL_ENGINES and state.serving and not hanging:
        # The router gives an engine up that compiles, and takes it back by itself.
        if view and not view.replacing and state.role not in view.drained | view.compiling:
            routed = state.role in view.routed
            answers = routed or stack.probe(state)
            if state.role == PREFILL and {PREFILL, DECODE} <= view.routed - view.hanging:
                delivers = _delivers(stack, memory)
        try:
            load = parse_load(stack.metrics(state.role, path="/v1/loads"))
            requests, used = load.requests, load.used_tokens
        except (DeployError, ValueError):
            pass
    return Seen(
        state.role,
        state.status,
        state.health,
        state.restarts,
        state.container,
        routed,
        answers,
        hanging,
        delivers,
        requests,
        used,
    )


def _delivers(stack: Stack, memory: Memory) -> bool | None:
    """Ask a question where decode has counted transfers that failed; None without a reason, or if that was not why."""
    try:
        lost = parse_lost_transfers(stack.metrics(DECODE))
        memory.lost_transfers = min(memory.lost_transfers, lost)
        if lost == memory.lost_transfers:
            return None
        try:
            for _ in stream(endpoint(stack.config()), uuid.uuid4().hex, max_tokens=1, silence_s=QUESTION_S):
                pass
        except RequestFailed:
            return False if parse_lost_transfers(stack.metrics(DECODE)) > lost else None
    except (DeployError, ValueError):
        return None
    memory.lost_transfers = lost
    return True


def _remedy(stack: Stack, incident: Incident) -> None:
    docker = DockerClient()
    container = {state.role: state.container for state in stack.roles()}.get(incident.role)
    if container is None:
        return
    try:
        match incident.remedy:
            case "restart":
                # It is stuck: there is nothing to wait for.
                docker.container.restart(container, time=1)
            case "start":
                docker.container.start(container)
            case "stop":
                docker.container.stop(container, time=5)
            case "replace router":
                docker.container.kill(change.require_role(stack, ROUTER), signal="SIGHUP")
            case "none":
                pass
    except DockerException as error:
        raise DeployError(f"Docker does not {incident.remedy} {incident.role}", words(error), "docker info") from error


def record(stack: Stack, state: State, incident: Incident) -> Path:
    """Keep what is known about an incident: the logs around it and Docker's account of the containers.

    Returns:
        The folder it is kept in.
    """
    when = datetime.now(UTC)
    folder = state.incidents / f"{when:%Y%m%dT%H%M%S.%fZ}-{incident.role}-{incident.kind}"
    states = stack.roles()
    facts: Mapping[str, object] = {
        "time": when.isoformat(timespec="seconds"),
        **asdict(incident),
        "roles": [asdict(role) for role in states],
    }
    write(folder / "incident.json", json.dumps(facts, indent=2, default=_plain) + "\n")
    for role in states:
        lines = ROLE_LOG_LINES if role.role == incident.role else OTHER_LOG_LINES
        write(folder / f"{role.role}.log", stack.log(role.container, tail=lines))
    for old in sorted(state.incidents.iterdir())[:-KEPT_INCIDENTS]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, frozenset) else str(value)  # pyright: ignore
