"""Output of `docker info --format json`, the daemon's configuration file, and CDI specifications."""

import json
import re
from typing import Any, cast

import yaml

from deploy.host.report import Docker


def _object(text: str) -> dict[str, Any]:
    """A JSON object, empty if the text is none. Very deep nesting counts as none."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(value: object) -> list[str]:
    return [item for item in cast(list[object], value) if isinstance(item, str)] if isinstance(value, list) else []


def _dicts(value: object) -> list[dict[str, Any]]:
    items = cast(list[object], value) if isinstance(value, list) else []
    return [cast(dict[str, Any], item) for item in items if isinstance(item, dict)]


def _dict(value: object) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def parse_version(text: str | None) -> tuple[int, ...]:
    """Leading numbers of a version: "26.1.5+dfsg1" is (26, 1, 5); empty if there are none."""
    found = re.match(r"v?(\d{1,6}(?:\.\d{1,6}){0,3})", text or "")
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def parse_docker_info(text: str, daemon_config: str = "") -> Docker:
    """The engine from `docker info --format json` (`{{json .}}` in old clients) and /etc/docker/daemon.json.

    Without a daemon the client still answers and lists the reason under ServerErrors.
    """
    info, config = _object(text), _object(daemon_config)
    client = _dict(info.get("ClientInfo"))
    server = _text(info.get("ServerVersion"))
    spec_dirs = _texts(info.get("CDISpecDirs"))
    switched = _dict(config.get("features")).get("cdi")
    live_restore = info.get("LiveRestoreEnabled")
    iptables = config.get("iptables")
    return Docker(
        client=_text(client.get("Version")),
        server=server,
        error=next(iter(_texts(info.get("ServerErrors"))), None if server else "no answer from the Docker daemon"),
        root=_text(info.get("DockerRootDir")),
        storage_driver=_text(info.get("Driver")),
        cgroup_driver=_text(info.get("CgroupDriver")),
        cgroup_version=_text(info.get("CgroupVersion")),
        live_restore=live_restore if isinstance(live_restore, bool) else None,
        runtimes=sorted(_dict(info.get("Runtimes"))),
        plugins={
            name: _text(plugin.get("Version")) or ""
            for plugin in _dicts(client.get("Plugins"))
            if (name := _text(plugin.get("Name")))
        },
        # The engine lists its CDI folders only while CDI is switched on.
        cdi_enabled=(bool(spec_dirs) or switched is True) if server else None,
        cdi_spec_dirs=spec_dirs,
        cdi_devices=sorted({id for device in _dicts(info.get("DiscoveredDevices")) if (id := _text(device.get("ID")))}),
        iptables=iptables if isinstance(iptables, bool) else None,
    )


def parse_cdi_spec(text: str) -> list[str]:
    """Fully qualified device names of a CDI specification, JSON or YAML (which contains JSON)."""
    try:
        # The base loader makes no dates and numbers of names such as "0".
        spec = _dict(yaml.load(text, Loader=yaml.CBaseLoader))
    except (yaml.YAMLError, ValueError, RecursionError, TypeError):
        return []
    kind = _text(spec.get("kind"))
    names = [name for device in _dicts(spec.get("devices")) if (name := _text(device.get("name")))]
    return [f"{kind}={name}" for name in names] if kind else []
