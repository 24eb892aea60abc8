"""What each container is, read from Compose's effective configuration: compose.yaml stays the one owner of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.errors import DeployError, WrongInput
from deploy.spec.model import Spec
from deploy.spec.profiles import ENGINES, ROUTER
from deploy.stack.origins import unescaped
from deploy.stack.roles import locked_roles

# Services of one host alone, whose part an ingress and a Prometheus of the cluster have.
ONE_HOST = ("front", "exporter", "prometheus")
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_SIZES = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Health:
    """A health check: its command, and times in seconds.

    Attributes:
        start_interval: between two probes until the first succeeds or `start_period` is over.
        retries: failures in a row after which the container no longer counts as healthy.
    """

    command: tuple[str, ...]
    interval: float
    start_interval: float
    start_period: float
    timeout: float
    retries: int


@dataclass(frozen=True)
class Role:
    """One service of the compose files.

    Attributes:
        command: the entry point; `arguments` follow it.
        capabilities: added to none.
        tmp_bytes: size of the writable /tmp, which lies in memory.
        shm_bytes: size of /dev/shm, 0 for the runtime's own.
        grace_s: from SIGTERM to SIGKILL.
        gpus: how many.
        numa_node: on which all of them hang.
        mounts: folders that a volume or a folder of the host is mounted on; True for one that is only read.
        secrets: names of files below /run/secrets.
    """

    name: str
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    user: int
    group: int
    capabilities: tuple[str, ...]
    read_only: bool
    tmp_bytes: int
    shm_bytes: int
    grace_s: int
    health: Health
    gpus: int
    numa_node: int
    mounts: Mapping[str, bool]
    secrets: tuple[str, ...]


def read_roles(config: Mapping[str, Any], spec: Spec) -> dict[str, Role]:
    """Every service, the engines in their order and the router last.

    Args:
        config: what `docker compose config --format json` prints.
        spec: where the GPUs of each engine hang.

    Raises:
        WrongInput: deploy.toml asks for what only one host can do.
        DeployError: a service has what no manifest is written for, so that leaving it out would change its meaning.
    """
    services: dict[str, Any] = config["services"]
    known = [*(name for name in ENGINES[spec.profile] if name in services), ROUTER]
    if other := sorted(set(services) - {*known, *ONE_HOST}):
        what = f"the compose files have a service that no manifest is written for: {', '.join(other)}"
        if spec.transport == "p2p":
            why = 'transport = "p2p" adds one: it needs both engines in one process namespace, and pods have one each'
            raise WrongInput(what, why, 'set transport = "isolated" in deploy.toml')
        why = "leaving it out would make another system of it"
        raise DeployError(what, why, "teach deploy/kubernetes/roles.py what it is")
    return {name: _role(name, services[name], spec) for name in known}


def _role(name: str, service: Mapping[str, Any], spec: Spec) -> Role:
    user, _, group = str(service["user"]).partition(":")
    if service.get("cap_drop") != ["ALL"] or "no-new-privileges:true" not in service.get("security_opt", ()):
        raise DeployError(
            f"compose.yaml gives {name} more rights than a manifest says",
            "it neither drops all capabilities nor forbids new privileges",
            "git diff compose.yaml",
        )
    health: dict[str, Any] = service["healthcheck"]
    reservations: dict[str, Any] = service.get("deploy", {}).get("resources", {}).get("reservations", {})
    volumes: list[dict[str, Any]] = service.get("volumes") or []
    placed = spec.roles.get(name)
    return Role(
        name=name,
        command=tuple(map(unescaped, service["entrypoint"])),
        arguments=tuple(map(unescaped, service["command"])),
        environment=locked_roles({"services": {name: service}})[name].environment,
        user=int(user),
        group=int(group or user),
        capabilities=tuple(service.get("cap_add") or ()),
        read_only=bool(service["read_only"]),
        tmp_bytes=_tmp(service["tmpfs"]),
        shm_bytes=int(service.get("shm_size") or 0),
        grace_s=round(seconds(service["stop_grace_period"])),
        health=Health(
            command=tuple(map(unescaped, health["test"][1:])),
            interval=seconds(health["interval"]),
            start_interval=seconds(health.get("start_interval", health["interval"])),
            start_period=seconds(health.get("start_period", "0s")),
            timeout=seconds(health["timeout"]),
            retries=int(health["retries"]),
        ),
        gpus=sum(len(device.get("device_ids") or ()) for device in reservations.get("devices", ())),
        numa_node=placed.numa_node if placed else 0,
        mounts={volume["target"]: bool(volume.get("read_only")) for volume in volumes},
        secrets=tuple(secret["source"] for secret in service.get("secrets") or ()),
    )


def seconds(duration: str) -> float:
    """A duration as Compose prints it, such as `30m0s`.

    Raises:
        ValueError: it is none.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)(h|ms|m|s)", duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise ValueError(f"{duration!r} is no duration")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def size(text: str) -> int:
    """A size as compose files write it, such as `8g`, in bytes.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"(\d+)([bkmg]?)b?", text.lower())
    if not match:
        raise ValueError(f"{text!r} is no size")
    return int(match[1]) * _SIZES[match[2]]


def _tmp(mounts: list[str]) -> int:
    """Size of /tmp, the one folder in memory that the compose files give."""
    ((folder, options),) = (mount.split(":", 1) for mount in mounts)
    if folder != "/tmp":
        raise DeployError(
            f"compose.yaml has {folder} in memory", "manifests know /tmp alone", "teach deploy/kubernetes/pods.py it"
        )
    given = {name: value for name, _, value in (option.partition("=") for option in options.split(","))}
    return size(given["size"])
