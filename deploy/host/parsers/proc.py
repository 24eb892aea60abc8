"""Files under /proc and /sys that describe processors, memory and limits."""

import re
from collections.abc import Mapping

from deploy.host.parsers.cpu_list import parse_cpu_list
from deploy.host.parsers.text import integer, lines
from deploy.host.report import Limit, NumaNode

CAP_SYS_RESOURCE = 24
"""include/uapi/linux/capability.h"""
_UNIT = {"kB": 1024, "KB": 1024, "B": 1, "": 1}


def parse_pairs(text: str, separator: str = ":") -> dict[str, str]:
    """`name: value` lines by name, the first of each; quotes around a value are dropped."""
    pairs: dict[str, str] = {}
    for line in lines(text):
        name, found, value = line.partition(separator)
        if found:
            pairs.setdefault(name.strip(), value.strip().strip("\"'"))
    return pairs


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo or a node's meminfo by name; amounts in bytes, counts as they are."""
    values: dict[str, int] = {}
    for line in lines(text):
        found = re.match(r"(?:Node \d{1,5} )?([\w()]{1,40}):\s+(\d{1,18})(?: (\w{1,3}))?$", line)
        if found and (found[3] or "") in _UNIT:
            values[found[1]] = int(found[2]) * _UNIT[found[3] or ""]
    return values


def parse_cpuinfo(text: str) -> tuple[str | None, str | None, int | None, int | None]:
    """Model, vendor, number of sockets and number of cores of /proc/cpuinfo."""
    pairs = parse_pairs(text)
    sockets: set[str] = set()
    cores: set[tuple[str, str]] = set()
    socket = ""
    for line in lines(text):
        name, _, value = line.partition(":")
        if name.strip() == "physical id":
            socket = value.strip()
            sockets.add(socket)
        elif name.strip() == "core id":
            cores.add((socket, value.strip()))
    return pairs.get("model name"), pairs.get("vendor_id"), len(sockets) or None, len(cores) or None


def parse_limits(text: str) -> dict[str, Limit]:
    """/proc/<pid>/limits by the kernel's name ("Max open files"); unlimited is -1."""
    limits: dict[str, Limit] = {}
    for line in lines(text):
        found = re.match(r"(Max [a-z ]{1,30}?)\s{2,}(unlimited|\d{1,20})\s+(unlimited|\d{1,20})", line)
        if found:
            soft, hard = (-1 if value == "unlimited" else int(value) for value in (found[2], found[3]))
            limits[found[1].strip()] = Limit(soft=soft, hard=hard)
    return limits


def has_capability(status: str, capability: int) -> bool | None:
    """Whether /proc/<pid>/status shows a capability as effective; None if it does not say."""
    mask = parse_pairs(status).get("CapEff", "")
    return bool(int(mask, 16) >> capability & 1) if re.fullmatch(r"[0-9a-fA-F]{1,16}", mask) else None


def selected(text: str | None) -> str | None:
    """The choice in brackets of a /sys file such as `always [madvise] never`."""
    found = re.search(r"\[(\w{1,20})\]", text[:200]) if text else None
    return found[1] if found else None


def parse_numa_node(node: int, files: Mapping[str, str]) -> NumaNode:
    """A NUMA node from the texts of its `cpulist`, `meminfo` and `distance`, those that exist."""
    memory = parse_meminfo(files.get("meminfo", ""))
    distances = [value for word in files.get("distance", "").split()[:1024] if (value := integer(word)) is not None]
    return NumaNode(
        node=node,
        cpus=parse_cpu_list(files.get("cpulist")),
        memory_bytes=memory.get("MemTotal"),
        memory_free_bytes=memory.get("MemFree"),
        distances=distances,
    )


def parse_driver_version(text: str) -> tuple[str | None, bool | None]:
    """/proc/driver/nvidia/version: the loaded module's version, and whether it is the open one."""
    found = re.search(r"NVRM version: .{0,120}?\s(\d{3,4}(?:\.\d{1,4}){1,3})\s", text[:2000] + " ")
    return (found[1], "Open Kernel Module" in text[:2000]) if found else (None, None)
