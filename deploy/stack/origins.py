"""Where each argument and environment variable of a container comes from: file and line, and who set the variable."""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.spec.profiles import ALL_ROLES
from deploy.stack.environment import Variable

LAUNCHER = "engine/engine_runtime/launch.py"
# What the launcher adds by itself to the arguments in the compose file.
LAUNCHER_ADDS = {role: (f"--disaggregation-mode={role}",) for role in ("prefill", "decode")}
_VARIABLE = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")
_WORD = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*):-([^}]*)\}")
# A file's name, and the nodes of its services.
Layer = tuple[str, dict[str, dict[str, yaml.Node]]]


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
    raw = [layer for file in files for layer in _layers(file)]
    known = {variable.name: variable for variable in variables}
    found: list[Setting] = []
    services: dict[str, Any] = config["services"]
    for service in sorted(services, key=_order):
        effective: dict[str, Any] = services[service]
        found += _arguments(service, effective, raw, known)
        environment: dict[str, Any] = effective.get("environment") or {}
        for name, value in sorted(environment.items()):
            place = _place(service, name, raw)
            origin = _origin(*place, known) if place else "unknown"
            found.append(Setting(service, "environment", name, "" if value is None else unescaped(str(value)), origin))
    return found


def variable_names(files: Iterable[Path]) -> set[str]:
    """Every variable that the compose files ask for, in what they take from another file too."""
    paths = list(files)
    found = {match.group(1) for file in paths for match in _VARIABLE.finditer(_without_comments(file.read_text()))}
    for file in paths:
        try:
            below = _layers(file)[:-1]
        except yaml.YAMLError:
            # Compose says so itself, with the line.
            continue
        for _, services in below:
            nodes = [node for entries in services.values() for key, node in entries.items() if key != "command"]
            found |= {name for node in nodes for text in _texts(node) for name in _VARIABLE.findall(text)}
    return found


def _arguments(
    service: str,
    effective: Mapping[str, Any],
    raw: list[Layer],
    known: Mapping[str, Variable],
) -> list[Setting]:
    file, nodes = "", list[yaml.Node]()
    for name, services in raw:
        if isinstance(node := services.get(service, {}).get("command"), yaml.SequenceNode):
            file, nodes = name, node.value
    raw_command: list[str] = effective.get("command") or []
    command = [unescaped(item) for item in raw_command]
    found = [
        Setting(service, "argument", "", value, _origin(file, node, known))
        for value, node in zip(command, nodes, strict=True)
    ]
    found += [Setting(service, "argument", "", value, LAUNCHER) for value in LAUNCHER_ADDS.get(service, ())]
    return found + _extra(service, effective, raw, known)


def _extra(
    service: str, effective: Mapping[str, Any], raw: list[Layer], known: Mapping[str, Variable]
) -> list[Setting]:
    """The arguments that the launcher takes from EXTRA_ARGUMENTS, each with the variable that it came in."""
    environment: dict[str, Any] = effective.get("environment") or {}
    place = _place(service, "EXTRA_ARGUMENTS", raw)
    if place is None:
        return []
    file, node = place
    line = f"{file}:{node.start_mark.line + 1}"
    found: list[tuple[str, str]] = []
    try:
        values = shlex.split(unescaped(str(environment.get("EXTRA_ARGUMENTS") or "")))
        for word in str(node.value).split():
            variable = _WORD.fullmatch(word)
            person = known.get(variable[1]) if variable else None
            if person:
                origin = f"{person.origin} via {person.name}"
                found += [(value, origin) for value in shlex.split(person.value)]
            elif variable:
                found += [(value, f"{line} default") for value in shlex.split(variable[2])]
            else:
                found.append((word, line))
    except ValueError:
        # The launcher says so itself when the container starts.
        return []
    origins = [origin for _, origin in found] if len(found) == len(values) else [line] * len(values)
    return [Setting(service, "argument", "", value, origin) for value, origin in zip(values, origins, strict=True)]


def _place(service: str, name: str, raw: list[Layer]) -> tuple[str, yaml.Node] | None:
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


def unescaped(value: str) -> str:
    """Undo the doubling of $ with which Compose prints a value that it would read back."""
    return value.replace("$$", "$")


def _order(service: str) -> tuple[int, str]:
    return (ALL_ROLES.index(service) if service in ALL_ROLES else len(ALL_ROLES), service)


def _layers(file: Path) -> list[Layer]:
    """A compose file's services, after what they extend of other files."""
    services = _services(file.read_text())
    below: list[Layer] = []
    for name, entries in services.items():
        source = {key: str(node.value) for key, node in _entries(entries.get("extends")).items()}
        if source:
            base = _services((file.parent / source["file"]).read_text())
            below.append((source["file"], {name: base[source["service"]]}))
    return [*below, (file.name, services)]


def _texts(node: yaml.Node) -> Iterable[str]:
    """All scalars of a node."""
    if isinstance(node, yaml.ScalarNode):
        yield str(node.value)
    elif isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            yield from _texts(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _texts(value)


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
