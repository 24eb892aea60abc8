"""Looks at the running containers closely enough to compare them with deploy.lock."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError
from python_on_whales import DockerClient
from python_on_whales.exceptions import DockerException

from deploy.lock.model import LockedRole
from deploy.spec.profiles import ALL_ENGINES
from deploy.stack.compose import RoleState, Stack
from deploy.stack.environment import ENGINE_PORT
from deploy.stack.roles import locked_role
from deploy.validation import first_mistake

INSIDE = Path(__file__).with_name("inside.py")
COMPILED = "/tmp/engine_runtime/jit.json"
MODEL_MOUNT = "/model"
PATIENCE_S = 30


class Compiled(BaseModel):
    """Compilations by compiler: until the engine served, and since (`engine_runtime.jit`)."""

    at_start: dict[str, int]
    since: dict[str, int]

    def words(self) -> str:
        """Both, for people: `compiled 3 at start (triton 3), 0 since`."""
        return f"compiled {_counts(self.at_start, ' at start')}, {_counts(self.since, ' since')}"


def _counts(counts: dict[str, int], when: str) -> str:
    some = ", ".join(f"{name} {number}" for name, number in counts.items() if number)
    return f"{sum(counts.values())}{when}" + (f" ({some})" if some else "")


def compiled(container: str) -> Compiled | None:
    """What one engine says it had to compile; None if it does not serve yet or is gone."""
    try:
        return Compiled.model_validate_json(str(DockerClient().container.execute(container, ["cat", COMPILED])))
    except (DockerException, ValidationError):
        return None


class Inside(BaseModel):
    """What `inside.py` printed.

    Attributes:
        files: sha256 by path, by tree.
        report: the engine's own arguments; None for the router, or with the reason in `silence`.
        hooks: functions of SGLang that the plug-in replaced.
        compiled: what had to be compiled; None for the router, and until an engine serves.
    """

    files: dict[str, dict[str, str]] = Field(default_factory=dict[str, dict[str, str]])
    report: dict[str, Any] | None = None
    silence: str = ""
    hooks: list[str] = Field(default_factory=list[str])
    compiled: Compiled | None = None


@dataclass(frozen=True)
class Observed:
    """One running container.

    Attributes:
        image: id of the image that it really runs.
        started: its arguments, and its environment beyond the image's own.
        model: the host's folder that it serves; None if nothing is mounted there.
        inside: None when it could not be looked at, with the reason in `blind`.
    """

    role: str
    image: str
    started: LockedRole
    model: Path | None
    inside: Inside | None = None
    blind: str = ""


def observe(stack: Stack, inside: bool = True) -> list[Observed]:
    """Look at each container of the stack that runs, all at once.

    Args:
        inside: also run `inside.py` in each of them.
    """
    states = [state for state in stack.roles() if state.status == "running"]
    with ThreadPoolExecutor(max(len(states), 1)) as pool:
        looks = [pool.submit(_observe, state, inside) for state in states]
        return [look.result() for look in looks]


def _observe(state: RoleState, inside: bool) -> Observed:
    docker = DockerClient()
    container = docker.container.inspect(state.container)
    own = _environment(docker.image.inspect(container.image).config.env)
    environment = {name: value for name, value in _environment(container.config.env).items() if own.get(name) != value}
    mounts = [mount for mount in container.mounts or () if str(mount.destination) == MODEL_MOUNT]
    seen, blind = _inside(state) if inside else (None, "")
    return Observed(
        role=state.role,
        image=container.image,
        started=locked_role(state.role, container.config.cmd or (), environment),
        model=Path(str(mounts[0].source)) if mounts else None,
        inside=seen,
        blind=blind,
    )


def _inside(state: RoleState) -> tuple[Inside | None, str]:
    port = str(ENGINE_PORT if state.role in ALL_ENGINES else 0)
    command = ["docker", "exec", "-i", state.container, "python", "-I", "-", port]
    try:
        done = subprocess.run(
            command, input=INSIDE.read_text(encoding="utf-8"), capture_output=True, text=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer from inside within {PATIENCE_S} s"
    if done.returncode != 0:
        return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    try:
        return Inside.model_validate_json(done.stdout), ""
    except ValidationError as error:
        return None, f"an answer that cannot be read: {first_mistake(error)}"


def _environment(lines: list[str] | None) -> dict[str, str]:
    pairs = (line.partition("=") for line in lines or ())
    return {name: value for name, _, value in pairs}
