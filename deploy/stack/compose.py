"""The stack as Docker sees it: the compose files of a profile, their containers, and their removal."""

import os
import subprocess
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from python_on_whales import Container, DockerClient
from python_on_whales.exceptions import DockerException

from deploy.errors import DeployError
from deploy.spec.model import Spec, Transport
from deploy.spec.profiles import (
    ALL_ROLES,
    BEHIND_ROUTER,
    ENGINES,
    FRONT_FILE,
    METRICS_FILE,
    ROUTER,
    Profile,
    compose_files,
)
from deploy.stack.environment import ENGINE_PORT
from deploy.stack.origins import variable_names

_FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=10).read().decode())"
_PROJECT = "com.docker.compose.project"
_SERVICE = "com.docker.compose.service"
_FOLDER = "com.docker.compose.project.working_dir"
_FILES = "com.docker.compose.project.config_files"
_CONFIG = "com.docker.compose.config-hash"
KEPT = "compose"
"""Folder beside an env file with the compose files that belong to it."""


@dataclass(frozen=True)
class RoleState:
    """One container of the stack.

    Attributes:
        status: Docker's word: created, running, restarting, exited, …
        health: starting, healthy, unhealthy, or empty if the service has no health check.
        pid: process id of the container's first process on the host, 0 if it does not run.
        ports: ports of the host that it publishes.
        folder: the repository that started it.
        files: names of the compose files that it was started with.
        config: Compose's hash of what the service asked for.
        image_id: what the image's name stood for.
    """

    role: str
    container: str
    name: str
    image: str
    status: str
    health: str
    exit_code: int
    out_of_memory: bool
    restarts: int
    started_at: datetime | None
    pid: int
    ports: frozenset[int]
    folder: str
    files: tuple[str, ...]
    config: str = ""
    image_id: str = ""

    @property
    def serving(self) -> bool:
        return self.status == "running" and self.health in ("healthy", "")

    def as_dict(self) -> dict[str, Any]:
        """For programs; times in ISO 8601."""
        started = self.started_at.isoformat() if self.started_at else None
        return asdict(self) | {"ports": sorted(self.ports), "started_at": started}


@dataclass(frozen=True)
class Stack:
    """A repository's compose files with an env file, in the Docker engine of the current context.

    Attributes:
        root: the repository.
        environment: the env file; needed only to start or to show the configuration.
        gpus_per_engine: of profile replicas, whose compose files depend on it.
        front: HAProxy stands before the router.
        metrics_page: there is a page with the metrics of all roles.
        kept: folder of the compose files if they are not the repository's own, which may have changed since.
    """

    root: Path
    environment: Path
    profile: Profile = "pd"
    transport: Transport = "isolated"
    gpus_per_engine: int = 0
    front: bool = False
    metrics_page: bool = False
    kept: Path | None = None

    @cached_property
    def files(self) -> list[Path]:
        names = compose_files(
            self.profile,
            p2p=self.transport == "p2p",
            gpus_per_engine=self.gpus_per_engine,
            front=self.front,
            metrics=self.metrics_page,
        )
        return [(self.kept or self.root) / name for name in names]

    @cached_property
    def engines(self) -> tuple[str, ...]:
        """The services that run SGLang: those of the profile that the configuration switches on."""
        services: dict[str, Any] = self.config()["services"]
        return tuple(name for name in ENGINES[self.profile] if name in services)

    @property
    def expected(self) -> tuple[str, ...]:
        """The services without which the stack does not serve."""
        services: dict[str, Any] = self.config()["services"]
        return (*self.engines, ROUTER, *(name for name in BEHIND_ROUTER if name in services))

    @cached_property
    def project(self) -> str:
        """The compose project: COMPOSE_PROJECT_NAME if set, as `docker compose` has it, else compose.yaml's name."""
        if name := os.environ.get("COMPOSE_PROJECT_NAME"):
            return name
        return str(yaml.safe_load((self.root / "compose.yaml").read_text())["name"])

    @cached_property
    def docker(self) -> DockerClient:
        """Compose with exactly our files and env file: variables of the shell that the files know are taken out."""
        for name in (*variable_names(self.files), "COMPOSE_PROFILES"):
            os.environ.pop(name, None)
        return self._client(self.environment)

    def _client(self, environment: Path) -> DockerClient:
        return DockerClient(
            compose_files=list(self.files),
            compose_env_files=[environment],
            compose_project_name=self.project,
            compose_project_directory=self.root,
        )

    def config(self) -> dict[str, Any]:
        """The effective compose configuration."""
        config: Any = self.docker.compose.config(return_json=True)
        return config

    def outdated(self) -> set[str]:
        """The services whose container Compose would make anew, or that have none that runs."""
        command: list[object] = list(self.docker.client_config.docker_compose_cmd)
        done = subprocess.run([*map(str, command), "config", "--hash", "*"], capture_output=True, text=True)
        if done.returncode:
            raise DeployError("Compose refuses the configuration", done.stderr.strip(), "deploy config")
        wanted = dict(line.split() for line in done.stdout.splitlines() if line.strip())
        running = {state.role: state for state in self.roles() if state.status == "running"}
        services: dict[str, Any] = self.config()["services"]
        images = {name: _image_id(str(services[name]["image"])) for name in wanted}
        return {
            name
            for name, wish in wanted.items()
            if name not in running or (running[name].config, running[name].image_id) != (wish, images[name])
        }

    def start(self, services: Iterable[str]) -> None:
        """Create and start services without waiting for their health; running ones that did not change stay.

        Raises:
            DeployError: Compose's own last words.
        """
        try:
            self.docker.compose.up(
                list(services), detach=True, dependencies=False, no_build=True, remove_orphans=True, quiet=True
            )
        except DockerException as error:
            raise DeployError(
                "Docker could not start the containers", words(error), "deploy config shows what was asked for"
            ) from error

    def retire(self) -> None:
        """Remove the containers of services that the configuration does not have: they hold GPUs.

        Compose's own `--remove-orphans` leaves those that only a switched-off Compose profile has.

        Raises:
            DeployError: Docker does not let go of one.
        """
        services: dict[str, Any] = self.config()["services"]
        old = [state.container for state in self.roles() if state.role not in services]
        try:
            for container in old:
                DockerClient().container.stop(container)
            DockerClient().container.remove([*old], force=True, volumes=True)
        except DockerException as error:
            raise DeployError("an engine of before cannot be removed", words(error), "deploy down") from error

    def roles(self) -> list[RoleState]:
        """All containers of the project: the engines in their order, the router, others."""
        containers = DockerClient().container.list(all=True, filters={"label": f"{_PROJECT}={self.project}"})
        states = [state for container in containers if (state := _state(container))]
        order = {role: place for place, role in enumerate(ALL_ROLES)}
        return sorted(states, key=lambda state: (order.get(state.role, len(order)), state.name))

    def log(self, container: str, tail: int | None = None, since: datetime | None = None) -> str:
        """A container's output so far, empty if the container is gone."""
        try:
            return str(DockerClient().container.logs(container, tail=tail, since=since))
        except DockerException:
            return ""

    def stamped_log(self, container: str, since: str) -> str:
        """A container's output with Docker's own time before each line, empty if the container is gone.

        Args:
            since: not older than, for example 10m.
        """
        command = ["docker", "logs", "--timestamps", "--since", since, container]
        done = subprocess.run(command, capture_output=True, check=False)
        return (done.stdout + b"\n" + done.stderr).decode(errors="replace")

    def metrics(self, role: str, port: int = ENGINE_PORT, path: str = "/metrics") -> str:
        """An engine's metrics page, or another, asked for inside its container: no engine port is published.

        Raises:
            DeployError: the container or its server does not answer.
        """
        container = next((state.container for state in self.roles() if state.role == role), role)
        try:
            return str(
                DockerClient().container.execute(
                    container, ["python", "-S", "-c", _FETCH, f"http://127.0.0.1:{port}{path}"]
                )
            )
        except DockerException as error:
            raise DeployError(f"{role} does not show its {path[1:]}", words(error), f"deploy logs {role}") from error

    def probe(self, engine: RoleState) -> bool:
        """Whether an engine passes its health check now."""
        try:
            DockerClient().container.execute(engine.container, ["python", "-m", "engine_runtime.health", "engine"])
        except DockerException:
            return False
        return True

    def volumes(self) -> set[str]:
        """Names of the project's volumes."""
        found = DockerClient().volume.list(filters={"label": f"{_PROJECT}={self.project}"})
        return {volume.name for volume in found}

    def leftovers(self) -> list[str]:
        """What Docker still has of the project, in words."""
        docker, label = DockerClient(), {"label": f"{_PROJECT}={self.project}"}
        containers = [f"container {state.name}" for state in self.roles()]
        networks = [f"network {network.name}" for network in docker.network.list(filters=label)]
        return containers + networks + [f"volume {name}" for name in sorted(self.volumes())]

    def remove(self, *, keep_volumes: Iterable[str] = (), at_once: bool = False, patience_s: float = 60) -> None:
        """Remove the project's containers, networks and volumes.

        The engine may still finish a request of a Compose that was just stopped, so this looks again until nothing
        is left.

        Args:
            keep_volumes: names of volumes that stay.
            at_once: kill the containers instead of letting requests in flight finish.

        Raises:
            DeployError: something could not be removed.
        """
        docker, label = DockerClient(), {"label": f"{_PROJECT}={self.project}"}
        kept = set(keep_volumes)
        deadline = time.monotonic() + patience_s
        quiet_looks = 0
        last_words = ""
        while quiet_looks < 2:
            try:
                states = self.roles()
                if states and not at_once:
                    self._client(self.environment if self.environment.exists() else Path(os.devnull)).compose.down(
                        remove_orphans=True, quiet=True
                    )
                    states = self.roles()
                docker.container.remove([state.container for state in states], force=True, volumes=True)
                networks = [network.id for network in docker.network.list(filters=label)]
                docker.network.remove([*networks])
                volumes = sorted(self.volumes() - kept)
                docker.volume.remove([*volumes])
                quiet_looks = 0 if states or networks or volumes else quiet_looks + 1
            except DockerException as error:
                last_words = words(error)
            if time.monotonic() > deadline:
                raise DeployError(
                    f"could not remove {', '.join(self.leftovers())}", last_words, "deploy down once more"
                )
            time.sleep(0.2)


def running_stack(root: Path, environment: Path) -> Stack:
    """The stack as it was started: the profile and transport of the containers that there are.

    Args:
        environment: its env file; without one the compose files' own defaults hold.
    """
    present = environment if environment.exists() else Path(os.devnull)
    files = {name for state in Stack(root, present).roles() for name in state.files}
    profile: Profile = "pd"
    if "compose.cpu.yaml" in files:
        profile = "cpu"
    elif "compose.replicas.yaml" in files:
        profile = "replicas"
    transport: Transport = "p2p" if "compose.p2p.yaml" in files else "isolated"
    size = 4 if "compose.replicas-tp4.yaml" in files else 0
    kept = environment.parent / KEPT
    return Stack(
        *(root, present, profile, transport, size),
        front=FRONT_FILE in files,
        metrics_page=METRICS_FILE in files,
        kept=kept if kept.is_dir() else None,
    )


def stack_of(root: Path, environment: Path, spec: Spec) -> Stack:
    """The stack that a spec describes."""
    return Stack(
        root,
        environment,
        spec.profile,
        spec.transport,
        spec.gpus_per_engine,
        spec.router.front,
        bool(spec.metrics.port),
    )


def words(error: DockerException) -> str:
    """What Docker itself said, without the command line that python-on-whales puts before it."""
    text = (error.stderr or str(error)).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "denied" in line or "invalid" in line]
    return "; ".join((telling or lines)[-3:]) or f"exit code {error.return_code}"


def _image_id(name: str) -> str:
    """What an image's name stands for on this host, empty if it is not here."""
    found = DockerClient().image.list(filters={"reference": name}) if not name.startswith("sha256:") else []
    return found[0].id if found else name if name.startswith("sha256:") else ""


def _state(container: Container) -> RoleState | None:
    try:
        state, config = container.state, container.config
        labels = config.labels or {}
        return RoleState(
            role=labels.get(_SERVICE, ""),
            container=container.id,
            name=container.name,
            image=config.image or "",
            status=state.status or "",
            health=(state.health.status or "") if state.health else "",
            exit_code=state.exit_code or 0,
            out_of_memory=bool(state.oom_killed),
            restarts=container.restart_count or 0,
            started_at=state.started_at,
            pid=state.pid or 0,
            ports=frozenset(
                int(binding.host_port or 0)
                for bindings in (container.host_config.port_bindings or {}).values()
                for binding in bindings or []
            ),
            folder=labels.get(_FOLDER, ""),
            files=tuple(Path(file).name for file in labels.get(_FILES, "").split(",") if file),
            config=labels.get(_CONFIG, ""),
            image_id=container.image or "",
        )
    except DockerException:
        # Removed between listing and looking.
        return None
