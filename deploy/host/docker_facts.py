"""What the host's Docker can do: parsers of its output, and the demands on it."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, ValidationError

from deploy.host.errors import HostError

# First engine with CDI devices and with start_interval in health checks; first Compose with !override and !reset.
MINIMUM_ENGINE = (25, 0)
MINIMUM_COMPOSE = (2, 24, 4)
INSTALL = "make docker"


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


class _Plugin(BaseModel):
    name: str = Field(alias="Name")
    version: str = Field("", alias="Version")


class _Client(BaseModel):
    version: str = Field("unknown", alias="Version")
    plugins: list[_Plugin] | None = Field(None, alias="Plugins")


class _Info(BaseModel):
    server: str = Field("", alias="ServerVersion")
    root: str = Field("", alias="DockerRootDir")
    cdi_folders: list[Path] | None = Field(None, alias="CDISpecDirs")
    errors: list[str] | None = Field(None, alias="ServerErrors")
    client: _Client | None = Field(None, alias="ClientInfo")


def parse_info(stdout: str, stderr: str = "") -> DockerFacts:
    """Read the output of `docker info --format '{{json .}}'`; garbage reads as an engine that does not answer."""
    try:
        info = _Info.model_validate_json(stdout.strip().partition("\n")[0])
    except ValidationError:
        return DockerFacts(client="unknown", failure=stderr.strip() or "docker info gave no JSON")
    found = (info.client.plugins if info.client else None) or []
    plugins = {plugin.name: plugin.version for plugin in found}
    return DockerFacts(
        client=info.client.version if info.client else "unknown",
        server=info.server or None,
        failure=stderr.strip() or "; ".join(info.errors or []),
        compose=plugins.get("compose"),
        buildx=plugins.get("buildx"),
        root=Path(info.root) if info.root else None,
        cdi_folders=tuple(info.cdi_folders or ()),
    )


def parse_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version such as `26.1.5+dfsg1` or `v2.26.1-4`; empty if there are none."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", text.strip())
    return tuple(map(int, match.group(1).split("."))) if match else ()


def parse_cdi(text: str) -> set[str]:
    """The device names (`kind=name`) of one CDI spec in YAML or JSON; empty if it is not one."""
    try:
        spec: Any = yaml.safe_load(text)
        return {f"{spec['kind']}={device['name']}" for device in spec["devices"]}
    except (yaml.YAMLError, TypeError, KeyError, ValueError):
        return set()


def require_docker(facts: DockerFacts, *, cdi: bool) -> None:
    """Check that this Docker can run the compose files.

    Args:
        cdi: the stack asks for GPUs through CDI.

    Raises:
        HostError: with the command that mends it.
    """
    if facts.client is None:
        raise HostError("Docker is not installed", "there is no `docker` command on the PATH", INSTALL)
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
