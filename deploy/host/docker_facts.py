"""The demands on the host's Docker."""

import re
from dataclasses import dataclass
from pathlib import Path

from deploy.host.errors import HostError
from deploy.host.parsers.docker import parse_docker_info, parse_version

# First engine with CDI devices and with start_interval in health checks; first Compose with !override and !reset.
MINIMUM_ENGINE = (25, 0)
MINIMUM_COMPOSE = (2, 24, 4)
INSTALL = "make docker"
JOIN_GROUP = "sudo usermod -aG docker $USER"
"""For a user who may not talk to the engine; counts from the next login on."""


@dataclass(frozen=True)
class DockerFacts:
    """Docker as seen by its client.

    Attributes:
        client: the client's version, None if there is no client.
        server: the engine's version, None if none answers.
        failure: the client's own words when no engine answers.
        compose: version of the compose plug-in, None if it is missing.
        buildx: version of the buildx plug-in, None if it is missing.
        root: the engine's data folder.
        cdi_folders: folders with CDI specs; empty if the engine has CDI switched off.
    """

    client: str | None = None
    server: str | None = None
    failure: str = ""
    compose: str | None = None
    buildx: str | None = None
    root: Path | None = None
    cdi_folders: tuple[Path, ...] = ()

    @property
    def forbidden(self) -> bool:
        """Is there an engine that this user may not talk to?"""
        return self.server is None and forbids(self.failure)


def forbids(failure: str) -> bool:
    """Do the client's words say that this user may not talk to the engine? It may run all the same."""
    return "permission denied while trying to connect" in failure.lower()


def parse_info(stdout: str, stderr: str = "") -> DockerFacts:
    """Read the output of `docker info --format '{{json .}}'`; garbage reads as an engine that does not answer."""
    seen = parse_docker_info(stdout)
    return DockerFacts(
        client=seen.client or "unknown",
        server=seen.server,
        failure=stderr.strip() or seen.error or "",
        compose=seen.plugins.get("compose"),
        buildx=seen.plugins.get("buildx"),
        root=Path(seen.root) if seen.root else None,
        cdi_folders=tuple(map(Path, seen.cdi_spec_dirs)),
    )


def forbidden(facts: DockerFacts) -> HostError:
    """The error for a user who may not talk to the engine: to install or start one would not help."""
    return HostError(
        "this user may not talk to Docker",
        facts.failure,
        f"with sudo, or join its group and log in again: {JOIN_GROUP}",
    )


def require_docker(facts: DockerFacts, *, cdi: bool) -> None:
    """Check that this Docker can run the compose files.

    Args:
        cdi: the stack asks for GPUs through CDI.

    Raises:
        HostError: with the command that mends it.
    """
    if facts.client is None:
        raise HostError("Docker is not installed", "there is no `docker` command on the PATH", INSTALL)
    if facts.forbidden:
        raise forbidden(facts)
    if facts.server is None:
        raise HostError("no Docker engine answers", facts.failure or "the engine is not running", INSTALL)
    if parse_version(facts.server) < MINIMUM_ENGINE:
        raise HostError(
            f"Docker engine {facts.server} is too old",
            f"GPUs by CDI and health checks with a start interval need {_dotted(MINIMUM_ENGINE)} or newer",
            "upgrade the engine (https://docs.docker.com/engine/install); deploy never replaces one that is there",
        )
    if facts.compose is None or parse_version(facts.compose) < MINIMUM_COMPOSE:
        raise HostError(
            f"docker compose {facts.compose or ''} is too old".replace("  is too old", " is missing"),
            f"the compose files need {_dotted(MINIMUM_COMPOSE)} or newer",
            "install the compose plug-in (docker-compose-plugin, docker-compose-v2 or docker-compose)",
        )
    if cdi and not facts.cdi_folders:
        raise HostError(
            f"CDI is switched off in Docker engine {facts.server}",
            "the containers get their GPUs as CDI devices",
            'put {"features": {"cdi": true}} into /etc/docker/daemon.json and restart the engine',
        )


def require_gpus(wanted: list[str], present: set[str], folders: tuple[Path, ...]) -> None:
    """Check that every wanted CDI device exists.

    Raises:
        HostError: names the unknown devices and lists those that exist.
    """
    unknown = [device for device in wanted if device not in present]
    if unknown and not present:
        raise HostError(
            f"this host has no GPU that Docker knows, {len(wanted)} are asked for",
            f"there is no CDI spec in {' or '.join(map(str, folders))}",
            "deploy doctor says whether GPU, driver or container toolkit is missing; without a GPU: --profile cpu",
        )
    if unknown:
        places = " and ".join(map(str, folders))
        raise HostError(
            f"this host has no {', '.join(unknown)}",
            f"the CDI specs in {places} name {', '.join(sorted(present, key=_natural)) or 'no device'}",
            "choose from these in deploy.toml, or write the specs anew: "
            "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
        )


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
