"""Output of df, lsblk and dd: filesystems, what they lie on, and how fast a file reads."""

import json
import re
from typing import Any, cast

from deploy.host.parsers.text import lines
from deploy.host.report import Filesystem


def parse_lsblk(text: str) -> dict[str, tuple[bool | None, bool]]:
    """For each device path of `lsblk --json`: rotational, and whether it lies on NVMe alone.

    A device on top of others (RAID, LVM, encryption) is rotational if one of them is.
    """
    try:
        tree: object = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    devices: dict[str, tuple[bool | None, bool]] = {}
    pending: list[tuple[Any, bool]] = []
    if isinstance(tree, dict):
        pending = [(child, False) for child in _children(cast(dict[str, Any], tree).get("blockdevices"))]
    while pending:
        entry, below_nvme = pending.pop()
        name, transport = entry.get("path") or entry.get("name"), entry.get("tran")
        nvme = transport == "nvme" or below_nvme
        if isinstance(name, str):
            name = name if name.startswith("/") else f"/dev/{name}"
            # A virtual disk calls itself rotational whatever lies below it.
            virtual = name.startswith("/dev/vd")
            rotational = (
                None
                if virtual
                else {"true": True, "1": True, "false": False, "0": False}.get(str(entry.get("rota")).lower())
            )
            before = devices.get(name)
            if before:
                rotational, nvme = (before[0] or rotational), (before[1] and nvme)
            devices[name] = (rotational, nvme)
        pending.extend((child, nvme) for child in _children(entry.get("children")))
    return devices


def _children(value: object) -> list[dict[str, Any]]:
    items = cast(list[object], value) if isinstance(value, list) else []
    return [cast(dict[str, Any], item) for item in items if isinstance(item, dict)]


def parse_df(text: str, disks: dict[str, tuple[bool | None, bool]]) -> list[Filesystem]:
    """Filesystems of `df --block-size=1 --output=source,fstype,size,avail,target`, with what lsblk knows."""
    found_all: list[Filesystem] = []
    for line in lines(text):
        found = re.match(r"(\S{1,1024})\s+(\S{1,40})\s+(\d{1,20})\s+(\d{1,20})\s+(/.*)$", line)
        if found is None:
            continue
        rotational, nvme = disks.get(found[1], (None, None))
        found_all.append(
            Filesystem(
                mount=found[5],
                source=found[1],
                kind=found[2],
                size=int(found[3]),
                free=int(found[4]),
                rotational=rotational,
                nvme=nvme,
            )
        )
    return found_all


def filesystem_of(path: str, filesystems: list[Filesystem]) -> Filesystem | None:
    """The filesystem a path lies on: the one with the longest mount point above it, the last mounted if two."""
    best: Filesystem | None = None
    for filesystem in filesystems:
        mount = filesystem.mount.rstrip("/")
        above = path == mount or path.startswith(mount + "/") or mount == ""
        if above and (best is None or len(mount) >= len(best.mount.rstrip("/"))):
            best = filesystem
    return best


def parse_dd(text: str) -> tuple[int, float] | None:
    """Bytes and seconds of dd's last line ("1073741824 bytes (1.1 GB, 1.0 GiB) copied, 0.5 s, 2.1 GB/s")."""
    for line in reversed(lines(text)):
        found = re.match(r"(\d{1,18}) bytes .{0,60}copied, (\d{1,9}(?:[.,]\d{1,9})?(?:e-?\d{1,3})?) s", line)
        if found:
            return int(found[1]), float(found[2].replace(",", "."))
    return None
