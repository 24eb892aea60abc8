"""What the shell offers for an argument: from files alone, so that a press of Tab does not wait for Docker."""

import json
import os
from pathlib import Path
from typing import Any

import typer

from deploy.command_line import SPEC, STATE
from deploy.errors import DeployError
from deploy.spec.load import load
from deploy.spec.profiles import ALL_ENGINES, ENGINES, EXPORTER, FRONT, PROMETHEUS, ROUTER
from deploy.stack import generations
from deploy.stack.generations import RENDERED
from deploy.stack.state import State


def roles(context: typer.Context) -> list[str]:
    """The roles of the stack that runs or is being started, else those that deploy.toml describes."""
    rendered = _state(context).environment.parent / RENDERED
    try:
        services: dict[str, Any] = json.loads(rendered.read_bytes())["services"]
        return list(services)
    except (OSError, ValueError, KeyError, TypeError):
        return _described()


def engines(context: typer.Context) -> list[str]:
    """Those of `roles` that run SGLang."""
    return [name for name in roles(context) if name in ALL_ENGINES]


def numbers(context: typer.Context) -> list[tuple[str, str]]:
    """The generations, the newest first, with what tells them apart."""
    state = _state(context)
    return [(str(number), _words(state, number)) for number in reversed(generations.numbers(state))]


def _described() -> list[str]:
    try:
        spec = load(Path(os.environ.get("DEPLOY_SPEC") or SPEC)).spec
    except DeployError:
        return list(ALL_ENGINES)
    added = {FRONT: spec.router.front, EXPORTER: spec.metrics.port, PROMETHEUS: spec.metrics.prometheus_image}
    running = tuple(spec.roles) if spec.profile == "replicas" else ENGINES[spec.profile]
    return [*running, ROUTER, *(name for name, wanted in added.items() if wanted)]


def _words(state: State, number: int) -> str:
    try:
        found = generations.read(state, number)
    except DeployError:
        return "damaged"
    return f"{found.profile}, {found.time}"


def _state(context: typer.Context) -> State:
    return State(Path(context.params.get("state") or os.environ.get("DEPLOY_STATE") or STATE))
