"""Talks to the gate in the router's container (engine/engine_runtime/gate.py): takes engines out and back in."""

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from python_on_whales import DockerClient
from python_on_whales.exceptions import DockerException

from deploy.errors import DeployError
from deploy.spec.profiles import ROUTER
from deploy.stack.compose import Stack, words
from deploy.stack.counters import parse_load
from deploy.stack.environment import ENGINE_PORT

CONTROL_PORT = 30002
LOOK_S = 0.5
# Requests of clients that have not come to the engine yet when it looks idle for the first time.
QUIET_LOOKS = 3
RESTORE_PATIENCE_S = 60.0
_ASK = (
    "import sys, urllib.request as r; "
    "print(r.urlopen(r.Request(sys.argv[2], method=sys.argv[1]), timeout=15).read().decode())"
)


class NoGate(DeployError):
    """The router's gate does not answer."""

    exit_code = 4


@dataclass(frozen=True)
class View:
    """What the gate sees.

    Attributes:
        in_flight: requests that the router has and has not answered to the end.
        waiting: requests that wait for an engine.
        drained: roles that get no new requests.
        routed: roles that the router sends requests to.
        hanging: roles that have shown no sign of life for too long.
        compiling: roles that answer nothing because they compile.
        replacing: the router is being replaced.
    """

    in_flight: int
    waiting: int
    drained: frozenset[str]
    routed: frozenset[str]
    hanging: frozenset[str]
    compiling: frozenset[str]
    replacing: bool


def view(stack: Stack) -> View:
    """Ask the gate.

    Raises:
        NoGate: it does not answer.
    """
    found = _ask(stack, "GET", "/")
    engines: dict[str, Any] = found["engines"]
    return View(
        in_flight=int(found["in_flight"]),
        waiting=int(found["waiting"]),
        drained=frozenset(_role(url) for url, engine in engines.items() if engine["drained"]),
        routed=frozenset(_role(url) for url in found["router_knows"]),
        # A gate of an image before this one does not say.
        hanging=frozenset(_role(url) for url, engine in engines.items() if engine.get("hangs")),
        compiling=frozenset(_role(url) for url, engine in engines.items() if engine.get("compiles")),
        replacing=bool(found["replacing"]),
    )


def drain(stack: Stack, roles: Iterable[str], limit_s: float, progress: Callable[[str], None]) -> int:
    """Let the router send nothing more to these roles and wait until they have nothing left to do.

    Args:
        limit_s: how long to wait.
        progress: told what is still in flight.

    Returns:
        Requests still in flight when the limit was reached; 0 if all have ended.

    Raises:
        NoGate: the gate does not answer.
    """
    wanted = tuple(roles)
    for role in wanted:
        _ask(stack, "POST", f"/drain?url=http://{role}:{ENGINE_PORT}")
    deadline, quiet = time.monotonic() + limit_s, 0
    while True:
        left = _in_flight(stack, wanted)
        quiet = 0 if left else quiet + 1
        if quiet >= QUIET_LOOKS:
            return 0
        if time.monotonic() > deadline:
            return left
        if left:
            progress(f"{left} requests in flight")
        time.sleep(LOOK_S)


def restore(stack: Stack, roles: Iterable[str]) -> None:
    """Let the router send requests to these roles again, and wait until it does.

    Raises:
        NoGate: the gate does not answer, or the router does not take them back.
    """
    wanted = set(roles)
    deadline = time.monotonic() + RESTORE_PATIENCE_S
    asked = 0.0
    while True:
        seen = view(stack)
        missing = wanted - seen.routed | wanted & seen.drained
        if not missing:
            return
        if time.monotonic() > deadline:
            raise NoGate(
                f"the router does not take {', '.join(sorted(missing))} back", "it logs why", "deploy logs router"
            )
        # Asked again now and then: the router may have been starting.
        if time.monotonic() - asked > 5:
            asked = time.monotonic()
            for role in missing:
                _ask(stack, "POST", f"/restore?url=http://{role}:{ENGINE_PORT}")
        time.sleep(LOOK_S)


def _in_flight(stack: Stack, roles: tuple[str, ...]) -> int:
    """Requests that would be lost with these roles."""
    if stack.profile != "replicas" or set(roles) >= set(stack.engines):
        # One engine of each kind: whatever is in flight needs it.
        return view(stack).in_flight
    left = 0
    for role in roles:
        try:
            left += parse_load(stack.metrics(role, path="/v1/loads")).requests
        except (DeployError, ValueError):
            # It has died since, and its requests with it.
            continue
    return left


def _ask(stack: Stack, method: str, path: str) -> dict[str, Any]:
    container = next((state.container for state in stack.roles() if state.role == ROUTER), None)
    if container is None:
        raise NoGate("there is no router", "nothing runs", "deploy up")
    try:
        answer = DockerClient().container.execute(
            container, ["python", "-S", "-c", _ASK, method, f"http://127.0.0.1:{CONTROL_PORT}{path}"]
        )
        found: dict[str, Any] = json.loads(str(answer))
    except (DockerException, ValueError) as error:
        why = words(error) if isinstance(error, DockerException) else str(error)
        raise NoGate("the router's gate does not answer", why, "deploy logs router, deploy restart router") from error
    return found


def _role(url: str) -> str:
    return url.partition("://")[2].partition(":")[0]
