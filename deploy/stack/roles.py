"""What a container is started with, from Compose's configuration or from the container itself."""

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from deploy.lock.model import LockedRole
from deploy.stack.origins import LAUNCHER_ADDS, unescaped


def locked_roles(config: Mapping[str, Any]) -> dict[str, LockedRole]:
    """Every service of an effective compose configuration (`docker compose config --format json`)."""
    found: dict[str, LockedRole] = {}
    services: dict[str, Any] = config["services"]
    for service, effective in services.items():
        command = [unescaped(item) for item in effective.get("command") or ()]
        variables: dict[str, Any] = effective.get("environment") or {}
        environment = {name: "" if value is None else unescaped(str(value)) for name, value in variables.items()}
        found[service] = locked_role(service, command, environment)
    return found


def locked_role(service: str, command: Iterable[str], environment: Mapping[str, str]) -> LockedRole:
    """The arguments and environment of one service.

    Args:
        command: of the container; the launcher adds its own to it and takes more from EXTRA_ARGUMENTS.
        environment: what is set beyond the image's.
    """
    extra = _split(environment.get("EXTRA_ARGUMENTS", ""))
    arguments = [*command, *extra, *LAUNCHER_ADDS.get(service, ())]
    variables = dict(sorted(environment.items()))
    sha256 = hashlib.sha256(json.dumps([arguments, variables]).encode()).hexdigest()
    return LockedRole(sha256=sha256, arguments=tuple(arguments), environment=variables)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # the launcher refuses it; here it is only shown
        return [text]
