"""Where each argument and environment variable of a container comes from: file and line, and who set the variable."""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.stack.environment import Variable

LAUNCHER = "engine/engine_runtime/launch.py"
# What the launcher adds by itself to the arguments in the compose file.
LAUNCHER_ADDS = {role: (f"--disaggregation-mode={role}",) for role in ("prefill", "decode")}
_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")


@dataclass(frozen=True)
class Setting:
    """One argument (`kind="argument"`, `name` empty) or environment variable of a service."""

    service: str
    kind: str
    name: str
    value: str
    origin: str


def settings(config: Mapping[str, Any], files: Iterable[Path], variables: Iterable[Variable]) -> list[Setting]:
    """Name the origin of every argument and environment variable.

    Args:
        config: what `docker compose config --format json` prints.
        files: the compose files, in the order in which they override each other.
        variables: the env file.
    """
    raw = [(file.name, _services(file.read_text())) for file in files]
    known = {variable.name: variable for variable in variables}
    found: list[Setting] = []
    services: dict[str, Any] = config["services"]
    for service in sorted(services, key=lambda name: (name != "prefill", name)):
        effective: dict[str, Any] = services[service]
        found += _arguments(service, effective, raw, known)
        environment: dict[str, Any] = effective.get("environment") or {}
        for name, value in sorted(environment.items()):
            place = _place(service, name, raw)
            origin = _origin(*place, known) if place else "unknown"
            found.append(Setting(service, "environment", name, "" if value is None else _unescaped(str(value)), origin))
    return found


def variable_names(files: Iterable[Path]) -> set[str]:
    """Every variable that the compose files ask for."""
    return {match.group(1) for file in files for match in _VARIABLE.finditer(_without_comments(file.read_text()))}


def _arguments(
    service: str,
    effective: Mapping[str, Any],
    raw: list[tuple[str, dict[str, dict[str, yaml.Node]]]],
    known: Mapping[str, Variable],
) -> list[Setting]:
    file, nodes = "", list[yaml.Node]()
    for name, services in raw:
        if isinstance(node := services.get(service, {}).get("command"), yaml.SequenceNode):
            file, nodes = name, node.value
    raw_command: list[str] = effective.get("command") or []
    command = [_unescaped(item) for item in raw_command]
    found = [
        Setting(service, "argument", "", value, _origin(file, node, known))
        for value, node in zip(command, nodes, strict=True)
    ]
    found += [Setting(service, "argument", "", value, LAUNCHER) for value in LAUNCHER_ADDS.get(service, ())]
    return found + _extra(service, effective, raw, known)


def _extra(
    service: str,
    effective: Mapping[str, Any],
    raw: list[tuple[str, dict[str, dict[str, yaml.Node]]]],
    known: Mapping[str, Variable],
) -> list[Setting]:
    """The arguments that the launcher takes from EXTRA_ARGUMENTS: the compose file's own, then the person's."""
    environment: dict[str, Any] = effective.get("environment") or {}
    try:
        values = shlex.split(_unescaped(str(environment.get("EXTRA_ARGUMENTS") or "")))
        person = known.get(f"{service.upper()}_EXTRA_ARGUMENTS")
        last = len(shlex.split(person.value)) if person else 0
    except ValueError:
        # The launcher says so itself when the container starts.
        return []
    place = _place(service, "EXTRA_ARGUMENTS", raw)
    line = f"{place[0]}:{place[1].start_mark.line + 1}" if place else "unknown"
    origins = [line] * (len(values) - last) + [f"{person.origin} via {person.name}" if person else line] * last
    return [Setting(service, "argument", "", value, origin) for value, origin in zip(values, origins, strict=True)]


def _place(
    service: str, name: str, raw: list[tuple[str, dict[str, dict[str, yaml.Node]]]]
) -> tuple[str, yaml.Node] | None:
    """The file and node that decide an environment variable: the last file that has it."""
    for file, services in reversed(raw):
        if entry := _entries(services.get(service, {}).get("environment")).get(name):
            return file, entry
    return None


def _origin(file: str, node: yaml.Node, known: Mapping[str, Variable]) -> str:
    place = f"{file}:{node.start_mark.line + 1}"
    names = _VARIABLE.findall(str(node.value)) if isinstance(node, yaml.ScalarNode) else []
    set_by = [known[name] for name in dict.fromkeys(names) if name in known]
    if set_by:
        return ", ".join(f"{variable.origin} via {variable.name}" for variable in set_by)
    return f"{place} default" if names else place


def _unescaped(value: str) -> str:
    """Undo the doubling of $ with which Compose prints a value that it would read back."""
    return value.replace("$$", "$")


def _services(text: str) -> dict[str, dict[str, yaml.Node]]:
    document = _entries(yaml.compose(text))
    return {name: _entries(node) for name, node in _entries(document.get("services")).items()}


def _entries(node: yaml.Node | None) -> dict[str, yaml.Node]:
    """The keys of a mapping, those that it merges in with `<<` included."""
    if not isinstance(node, yaml.MappingNode):
        return {}
    merged: dict[str, yaml.Node] = {}
    own: dict[str, yaml.Node] = {}
    for key, value in node.value:
        if key.value == "<<":
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                merged = _entries(source) | merged
        else:
            own[key.value] = value
    return merged | own


def _without_comments(text: str) -> str:
    return re.sub(r"(^|\s)#.*", "", text)
