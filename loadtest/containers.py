"""Finds the engines of a running stack on this machine, to read their metrics: only the router's port is published."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from loadtest.plain import mapping, sequence

# compose.yaml, compose.replicas.yaml, and what others call it; a number may follow (`engine-2`).
ROLES = ("prefill", "decode", "engine", "server")
ENGINE_PORT = 30000


@dataclass(frozen=True)
class Stack:
    """Base URL and container of each engine by role, and the image they run.

    The host cannot reach the engines of our own compose files: what they say of themselves is asked for inside.
    """

    engines: dict[str, str] = field(default_factory=dict[str, str])
    containers: dict[str, str] = field(default_factory=dict[str, str])
    image: str | None = None


def find_stack(url: str) -> Stack:
    """The compose project that publishes the URL's port on this machine; empty when there is none."""
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
        return Stack()
    from python_on_whales import DockerClient
    from python_on_whales.exceptions import DockerException, NoSuchContainer

    port = str(parts.port or (443 if parts.scheme == "https" else 80))
    client = DockerClient()
    try:
        containers = client.container.list(filters={"label": "com.docker.compose.project"})
        projects: dict[str, dict[str, str]] = {}
        members: dict[str, dict[str, str]] = {}
        published: str | None = None
        image: str | None = None
        for container in containers:
            labels = container.config.labels or {}
            project = labels["com.docker.compose.project"]
            service = labels.get("com.docker.compose.service", "")
            ports = mapping(getattr(container.network_settings, "ports", None))
            if any(str(mapping(b).get("HostPort")) == port for bound in ports.values() for b in sequence(bound)):
                published, image = project, container.image
            address = next(
                (n.ip_address for n in (container.network_settings.networks or {}).values() if n.ip_address), None
            )
            if address and service.startswith(ROLES):
                projects.setdefault(project, {})[service] = f"http://{address}:{ENGINE_PORT}"
                members.setdefault(project, {})[service] = container.id
    except (DockerException, NoSuchContainer, OSError):
        return Stack()
    return Stack(projects.get(published or "", {}), members.get(published or "", {}), image)


def server_info(container: str) -> dict[str, Any] | None:
    """`/server_info` of the engine in a container; None when it does not answer."""
    from python_on_whales import DockerClient
    from python_on_whales.exceptions import DockerException

    fetch = (
        "import urllib.request as r; print(r.urlopen('http://127.0.0.1:%d/server_info', timeout=20).read().decode())"
    )
    try:
        answer = DockerClient().container.execute(container, ["python", "-c", fetch % ENGINE_PORT])
        return mapping(json.loads(str(answer)))
    except (DockerException, ValueError):
        return None
