"""What runs, held against deploy.lock."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deploy.errors import DeployError
from deploy.host import probe
from deploy.image.layers import read_layers
from deploy.lock.model import Lock, ModelLock
from deploy.model.check import check_folder
from deploy.model.hashing import Progress
from deploy.spec.load import load
from deploy.spec.model import Profile
from deploy.stack import generations
from deploy.stack.compose import Stack
from deploy.stack.drift import Drift, role_drifts, version_drifts
from deploy.stack.observe import Compiled, Observed, observe
from deploy.stack.state import State


@dataclass(frozen=True)
class Verified:
    """What `verify` found.

    Attributes:
        roles: containers that were looked at.
        files: how many of the model were compared: all that are locked, if a container has them.
        full: byte by byte.
        drifts: everything that is not as locked; empty if all agrees.
        compiled: by engine, what it had to compile because neither the image nor the host's cache had it.
    """

    profile: str
    roles: tuple[str, ...]
    files: int
    full: bool
    seconds: float
    drifts: tuple[Drift, ...]
    compiled: Mapping[str, Compiled]

    def as_dict(self) -> dict[str, Any]:
        compiled = {role: counts.model_dump() for role, counts in self.compiled.items()}
        return {**asdict(self), "agrees": not self.drifts, "compiled": compiled}


def verify(
    stack: Stack, lock: Lock, state: State, *, full: bool = False, progress: Progress = lambda done, total: None
) -> Verified:
    """Compare the running stack, its model's files and this host with the lock.

    Args:
        full: hash every byte of the model instead of sizes, times and samples.
        progress: of `full`: bytes done and bytes in all.
    """
    begun = time.monotonic()
    observed = observe(stack)
    states = {role.role: role.status for role in stack.roles()}
    drifts = role_drifts(lock, stack.profile, observed, states)
    model = lock.tiny_model if stack.profile == "cpu" else lock.model
    drifts += _model_drifts(model, observed, state, full, progress)
    if lock.host:
        docker = probe.docker_facts()
        drifts += version_drifts("Docker engine", lock.host.docker_engine, docker.server)
        drifts += version_drifts("docker compose", lock.host.docker_compose, docker.compose)
        if stack.profile != "cpu":
            drifts += version_drifts(
                "NVIDIA driver", lock.host.driver, next((gpu.driver for gpu in probe.gpus()), None)
            )
    return Verified(
        profile=stack.profile,
        roles=tuple(item.role for item in observed),
        files=len(model.file) if model and any(item.model for item in observed) else 0,
        full=full,
        seconds=round(time.monotonic() - begun, 1),
        drifts=tuple(drifts),
        compiled={item.role: item.inside.compiled for item in observed if item.inside and item.inside.compiled},
    )


def meant_profile(state: State, spec: Path) -> Profile:
    """The profile that should run where nothing does: of the current or else the newest generation, or the spec's.

    Raises:
        DeployError: there is no generation, and the spec cannot be used.
    """
    # `up --profile` is written down nowhere but there.
    number = generations.current_number(state) or max(generations.numbers(state), default=None)
    with suppress(generations.Damaged):
        if number:
            return generations.read(state, number).profile
    return load(spec).spec.profile


def _model_drifts(
    model: ModelLock | None, observed: list[Observed], state: State, full: bool, progress: Progress
) -> list[Drift]:
    folders = {item.model for item in observed if item.model}
    if not folders:
        return []
    if model is None:
        named = ", ".join(map(str, sorted(folders)))
        return [Drift("model", "files", "none are locked (deploy lock --update model)", named)]
    drifts: list[Drift] = []
    for folder in sorted(folders):
        seen = check_folder(folder, model, full=full, memory=state.seen_models, progress=progress)
        drifts += [Drift("model", str(folder / item.path), item.expected, item.found) for item in seen]
    return drifts


def running_lock(stack: Stack, lock: Lock) -> tuple[Lock, Lock]:
    """What of a lock can be compared with the running stack at a glance, and the running stack in the same form.

    Args:
        lock: what to compare with.

    Returns:
        The lock with its image and the running profile's roles only, and the same as it runs.

    Raises:
        DeployError: nothing runs.
    """
    observed = observe(stack, inside=False)
    if not observed:
        raise DeployError("nothing runs", "there is no running container of this stack", "deploy up")
    known = {layer.diff_id: layer for layer in lock.image.layer} if lock.image else {}
    image = lock.image
    other = sorted({item.image for item in observed} - ({image.id, image.manifest} if image else set()))
    if image and other:
        # A registry's names for the layers are not to be seen here.
        layers = tuple(known.get(layer.diff_id, layer) for layer in read_layers(other[0]))
        image = image.model_copy(update={"id": other[0], "layer": layers})
    roles = {stack.profile: {item.role: item.started for item in observed}}
    locked = {name: found for name, found in lock.roles.items() if name == stack.profile}
    return Lock(image=lock.image, roles=locked), Lock(image=image, roles=roles)
