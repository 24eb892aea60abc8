"""Changes what runs, so that it is afterwards what it was before or what it should be, whatever happens in between."""

import signal
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from python_on_whales import DockerClient
from python_on_whales.exceptions import DockerException

from deploy.errors import DeployError
from deploy.spec.profiles import ALL_ENGINES, BEHIND_ROUTER, FRONT, ROUTER
from deploy.stack import gate, generations, journal
from deploy.stack.accept import Acceptance, accept
from deploy.stack.client import endpoint
from deploy.stack.compose import Stack, running_stack, words
from deploy.stack.events import Event, Report, step
from deploy.stack.exposition import write_accepted
from deploy.stack.generations import COMPOSE, ENVIRONMENT, Damaged, Generation
from deploy.stack.healthy import wait_healthy
from deploy.stack.state import State

# The longest answer that a drained engine may finish before it is taken away.
DRAIN_LIMIT_S = 300.0
ROUTER_PATIENCE_S = 60.0


class ImageGone(DeployError):
    """A generation's image is not on this host."""


@dataclass(frozen=True)
class RolledBack:
    """The generation that serves now, with its acceptance."""

    generation: Generation
    acceptance: Acceptance
    changed: bool
    seconds: float


@contextmanager
def journaled(root: Path, state: State, verb: str, report: Report) -> Generator[None]:
    """Change the stack in the body; what fails or is interrupted there is undone, what is cut off is healed later.

    Undone means: the containers are those of the current generation again, or none if there is none. The failure's
    `aftermath` says so.
    """
    stack = running_stack(root, state.environment)
    before, volumes = identities(stack), stack.volumes()
    journal.begin(state, verb)
    try:
        yield
    except BaseException as error:
        aftermath = _undo(root, state, before, volumes, report)
        if isinstance(error, DeployError):
            error.aftermath = aftermath
        raise
    journal.end(state)


def back(root: Path, state: State, volumes: Iterable[str], report: Report) -> str:
    """Bring the current generation's containers back after something else ran; returns what was done, in words.

    Call it in the body of `journaled`.

    Args:
        volumes: that were there before, and stay if nothing ran.

    Raises:
        DeployError: they cannot be started.
    """
    with step("clean", report) as running:
        running.outcome = _restore(root, state, volumes, report)
    generations.sweep(state)
    return running.outcome


def heal(root: Path, state: State, report: Report) -> None:
    """Bring the stack back to the current generation if the last command was cut off in the middle of a change.

    Raises:
        DeployError: that generation cannot be started.
    """
    entry = journal.cut_off(state)
    if entry:
        with step("heal", report) as running:
            running.progress(f"`deploy {entry.verb}` of {entry.since} was cut off")
            running.outcome = f"`deploy {entry.verb}` of {entry.since} was cut off: {_restore(root, state, (), report)}"
    generations.sweep(state)
    journal.end(state)


def _undo(root: Path, state: State, before: set[str], volumes: set[str], report: Report) -> str:
    """Undo a change; returns what is so now, in words."""
    stack = running_stack(root, state.environment)
    if identities(stack) == before:
        if before:
            with suppress(DeployError):
                gate.restore(stack, gate.view(stack).drained)
        elif stack.leftovers():
            # Docker refused to start what it had already made.
            with _no_interruption():
                stack.remove(keep_volumes=volumes, at_once=True)
        generations.sweep(state)
        journal.end(state)
        return "what ran before runs on" if before else "nothing was started"
    try:
        with step("clean", report) as running:
            running.outcome = _restore(root, state, volumes, report)
    except DeployError as error:
        # The journal stays: the next command tries again.
        return f"what ran before could not be brought back ({error.message}); deploy rollback, or deploy down"
    generations.sweep(state)
    journal.end(state)
    return running.outcome


def _restore(root: Path, state: State, volumes: Iterable[str], report: Report) -> str:
    """Make the containers those of the current generation; returns what was done, in words."""
    try:
        now = generations.current(state)
    except Damaged as error:
        return f"{error.message}, so the containers stay as they are"
    if now is None:
        with _no_interruption():
            running_stack(root, state.environment).remove(keep_volumes=volumes, at_once=True)
        return "removed what was started"
    start(generation_stack(root, state, now), state, report)
    return f"back to generation {now.number}, which serves again"


def generation_stack(root: Path, state: State, generation: Generation) -> Stack:
    """The stack as a generation describes it.

    Raises:
        Damaged: its files are not what was written.
        ImageGone: its image is not here.
    """
    generations.check(state, generation)
    try:
        here = DockerClient().image.exists(generation.image_id)
        tagged = DockerClient().image.list(filters={"reference": generation.image})
        if here and generation.image_id not in [image.id for image in tagged]:
            DockerClient().image.tag(generation.image_id, generation.image)
    except DockerException as error:
        raise DeployError("Docker does not say which images it has", words(error), "docker info") from error
    if not here:
        raise ImageGone(
            f"the image of generation {generation.number} is not on this host",
            f"it was {generation.image}, {generation.image_id}",
            "deploy pull or deploy import with that generation's deploy.lock, or deploy build",
        )
    place = generations.folder(state, generation.number)
    return Stack(
        root,
        place / ENVIRONMENT,
        generation.profile,
        generation.transport,
        generation.gpus_per_engine,
        front=generation.front,
        metrics_page=generation.metrics_page,
        kept=place / COMPOSE,
    )


def rollback(root: Path, state: State, number: int | None, report: Report) -> RolledBack:
    """Go back to a generation with what is on this host, and return once a request has crossed it.

    Args:
        number: None for the one before the current one.

    Raises:
        DeployError: there is no such generation, its image is gone, or it does not serve; the current one stays.
    """
    begun = time.monotonic()
    with state.lock("rollback"):
        heal(root, state, report)
        wanted = generations.previous(state) if number is None else number
        if wanted is None:
            raise DeployError("there is nothing to roll back to", "no earlier generation is kept", "deploy generations")
        generation = generations.read(state, wanted)
        stack = generation_stack(root, state, generation)
        with journaled(root, state, "rollback", report):
            with step("start", report) as running:
                changed = start(stack, state, report)
                running.outcome = "" if changed else "already running, nothing changed"
            with step("accept", report) as running:
                acceptance = accept(stack, endpoint(stack.config()), running)
                running.outcome = str(acceptance)
            write_accepted(state, stack, acceptance, generation.image)
            generations.switch(state, wanted)
    return RolledBack(generation, acceptance, changed, time.monotonic() - begun)


def restart(root: Path, state: State, role: str, limit_s: float, report: Report) -> int:
    """Restart one role without dropping requests: drain it, restart it, send it requests again.

    Args:
        limit_s: how long requests in flight may go on.

    Returns:
        Requests that were still in flight when the limit was reached, and so were cut.

    Raises:
        DeployError: there is no such role, or it does not come back.
    """
    with state.lock("restart"):
        heal(root, state, report)
        stack = running_stack(root, state.environment)
        container = require_role(stack, role)
        with journaled(root, state, "restart", report):
            if role == ROUTER:
                _replace_router(stack, container)
                return 0
            with step("drain", report) as running:
                left = gate.drain(stack, [role], limit_s, running.progress)
                running.outcome = f"{left} requests were cut at the limit" if left else "nothing in flight"
            with step("start", report):
                DockerClient().container.restart(container)
                wait_healthy(stack, (role,), state, report)
                gate.restore(stack, [role])
    return left


def require_role(stack: Stack, role: str) -> str:
    """The container of a role.

    Raises:
        DeployError: the stack has no such role.
    """
    found = {state.role: state.container for state in stack.roles()}
    if role not in found:
        raise DeployError(
            f"there is no {role} in this stack", f"there is {', '.join(found) or 'nothing'}", "deploy status"
        )
    return found[role]


def _replace_router(stack: Stack, container: str) -> None:
    """Let the gate start the router anew while it holds the port and the requests."""
    wanted = gate.view(stack).routed
    DockerClient().container.kill(container, signal="SIGHUP")
    # The gate lets requests in flight finish first.
    deadline = time.monotonic() + DRAIN_LIMIT_S + ROUTER_PATIENCE_S
    time.sleep(1)
    while not (seen := gate.view(stack)).routed >= wanted or seen.replacing:
        if time.monotonic() > deadline:
            raise DeployError("the new router does not find its engines", "it logs why", "deploy logs router")
        time.sleep(0.5)


def start(stack: Stack, state: State, report: Report) -> bool:
    """Make the containers those that the stack describes, and wait until all are healthy.

    Engines that must be replaced are drained first; of several that do the same, one is replaced after the other. What
    holds the published port is replaced when nothing is in flight.

    Returns:
        Whether any container was started.
    """
    before = identities(stack)
    services: dict[str, Any] = stack.config()["services"]
    running = {role.role for role in stack.roles() if role.status == "running"}
    outdated = stack.outdated()
    routed = ROUTER in running
    leaving = [role for role in running - set(services) if role in ALL_ENGINES]
    if routed and leaving:
        _drain(stack, leaving, report)
    stack.retire()
    behind = tuple(name for name in BEHIND_ROUTER if name in services)
    others = tuple(sorted(set(services) - {*stack.engines, ROUTER, *behind}))
    if others:
        stack.start(others)
        wait_healthy(stack, others, state, report)
    old = [role for role in stack.engines if role in running & outdated]
    new = tuple(role for role in stack.engines if role not in old)
    if new:
        stack.start(new)
        wait_healthy(stack, new, state, report)
    one_by_one = stack.profile == "replicas" and len(stack.engines) > 1
    for group in [(role,) for role in old] if one_by_one else [tuple(old)] if old else []:
        if routed:
            _drain(stack, group, report)
        stack.start(group)
        wait_healthy(stack, group, state, report)
        if routed:
            # A router that is about to be replaced may not know them.
            with suppress(DeployError):
                gate.restore(stack, group)
    if routed and FRONT in running & outdated & set(services):
        # A front that ends refuses connections until its last answer is out, up to half a minute. The router's gate
        # says 503 meanwhile, so the answers end there first, and the front is away for a second.
        DockerClient().container.stop(require_role(stack, ROUTER))
        stack.start((FRONT,))
    for group in ((ROUTER,), behind) if behind else ((ROUTER,),):
        stack.start(group)
        wait_healthy(stack, group, state, report)
    if routed and (drained := gate.view(stack).drained):
        gate.restore(stack, drained)
    return identities(stack) != before


def _drain(stack: Stack, roles: Iterable[str], report: Report) -> None:
    names = tuple(roles)

    def progress(detail: str) -> None:
        for role in names:
            report(Event("start", "progress", f"draining: {detail}", role))

    # A router that is dead or of an older release holds nothing back, and must not stop its own replacement.
    with suppress(gate.NoGate):
        gate.drain(stack, names, DRAIN_LIMIT_S, progress)


def identities(stack: Stack) -> set[str]:
    """The containers that run."""
    return {container.container for container in stack.roles() if container.status == "running"}


@contextmanager
def _no_interruption() -> Generator[None]:
    """Let a second Ctrl-C not cut the clean-up short; it is bounded in time."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
