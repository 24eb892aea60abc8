"""Looks at this host: runs commands, reads /proc and the disk. What it sees goes to pure functions."""

import os
import resource
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import psutil

from deploy.host.docker_facts import DockerFacts, parse_cdi, parse_info
from deploy.host.errors import HostError
from deploy.host.gpus import QUERY, GpuPlace, parse_query

GIB = 1024**3
CAP_SYS_RESOURCE = 24


def docker_facts(timeout_s: float = 60) -> DockerFacts:
    """Ask the Docker client about itself and the engine of its current context."""
    if not shutil.which("docker"):
        return DockerFacts()
    command = ["docker", "info", "--format", "{{json .}}"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return DockerFacts(client="unknown", failure=f"`docker info` gave no answer within {timeout_s:.0f} s")
    return parse_info(result.stdout, result.stderr)


def cdi_devices(folders: tuple[Path, ...]) -> set[str]:
    """Names of all devices in the CDI specs of these folders; unreadable files count as empty."""
    devices: set[str] = set()
    for folder in folders:
        for file in sorted(folder.glob("*")) if folder.is_dir() else []:
            if file.suffix in (".yaml", ".yml", ".json") and os.access(file, os.R_OK):
                devices |= parse_cdi(file.read_text(errors="replace"))
    return devices


def gpu_places(timeout_s: float = 20) -> list[GpuPlace]:
    """The GPUs that the driver shows and their NUMA nodes; empty without a driver."""
    try:
        result = subprocess.run(QUERY, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [replace(place, numa_node=_numa_node(place.pci_address)) for place in parse_query(result.stdout)]


def _numa_node(pci_address: str) -> int:
    try:
        return int(Path(f"/sys/bus/pci/devices/{pci_address}/numa_node").read_text())
    except (OSError, ValueError):
        return -1


def port_holder(address: str, port: int) -> str | None:
    """Who listens on a TCP port that `address` would collide with: `name (pid N)`, or None if it is free."""
    wildcard = {"0.0.0.0", "::"}
    for connection in psutil.net_connections("tcp"):
        if connection.status != psutil.CONN_LISTEN or connection.laddr.port != port:  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
            continue
        listening = str(connection.laddr.ip)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
        if listening == address or listening in wildcard or address in wildcard:
            return _process(connection.pid)
    return None


def _process(pid: int | None) -> str:
    if pid is None:
        return "a process that this user may not see"
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"


def require_port(address: str, port: int) -> None:
    """Check that the port can be published.

    Raises:
        HostError: names the process that holds it.
    """
    if holder := port_holder(address, port):
        raise HostError(
            f"port {port} on {address} is in use by {holder}",
            "the router is published there",
            "stop that process, or choose another port under [router] in deploy.toml",
        )


def require_space(folder: Path, needed: int, purpose: str) -> None:
    """Check that a file system has room.

    Args:
        folder: where the bytes go; it need not exist yet.
        needed: bytes.
        purpose: what they are for, in words.

    Raises:
        HostError: says how much is needed and how much is free.
    """
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise HostError(
            f"the disk under {folder} is too small for {purpose}",
            f"{_size(needed)} are needed and {_size(free)} are free",
            f"free {_size(needed - free)} there (docker system df shows what Docker keeps)",
        )


def require_memory(needed: int, purpose: str) -> None:
    """Check that so many bytes of memory are available.

    Raises:
        HostError: says how much is needed and how much is available.
    """
    available = psutil.virtual_memory().available
    if available < needed:
        raise HostError(
            f"too little memory for {purpose}",
            f"{_size(needed)} are needed and {_size(available)} are available",
            "stop what uses it (ps aux --sort=-rss | head)",
        )


def lowered_limits() -> dict[str, str]:
    """Resource limits that a container cannot get here, as variables of the compose files.

    Without CAP_SYS_RESOURCE an engine cannot raise its own hard limits, and a container that asks for more does not
    start. The engine is assumed to have the limits and capabilities of this process.
    """
    status = Path("/proc/self/status").read_text()
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:"))
    if effective >> CAP_SYS_RESOURCE & 1 or os.geteuid() != 0:
        return {}
    limits = {"MEMLOCK": resource.RLIMIT_MEMLOCK, "NOFILE": resource.RLIMIT_NOFILE}
    hard = {name: resource.getrlimit(limit)[1] for name, limit in limits.items()}
    return {name: str(value) for name, value in hard.items() if value != resource.RLIM_INFINITY}


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 1024**2:.0f} MiB"
