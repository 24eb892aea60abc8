"""What the verbs ask of this host (Docker, GPUs, ports, disk, memory), and refuse; probe_host.py does the looking."""

import os
import shutil
from pathlib import Path

import psutil

from deploy.host import probe_host
from deploy.host.docker_facts import DockerFacts, parse_info
from deploy.host.errors import HostError
from deploy.host.parsers.proc import CAP_SYS_RESOURCE, has_capability
from deploy.host.probe_gpus import find_gpus
from deploy.host.probe_host import LocalMachine
from deploy.host.report import Gpu

GIB = 1024**3


def docker_facts(timeout_s: float = 60) -> DockerFacts:
    """Ask the Docker client about itself and the engine of its current context."""
    ran = LocalMachine(timeout_s).run("docker", "info", "--format", "{{json .}}")
    if ran.end == "missing":
        return DockerFacts()
    if ran.end == "slow":
        return DockerFacts(client="unknown", failure=f"`docker info` gave no answer within {timeout_s:.0f} s")
    return parse_info(ran.out, ran.err)


def cdi_devices(folders: tuple[Path, ...]) -> set[str]:
    """Names of all devices in the CDI specs of these folders; unreadable files count as empty."""
    return probe_host.cdi_devices(LocalMachine(), map(str, folders))


def gpus(timeout_s: float = 20) -> list[Gpu]:
    """The GPUs that the driver shows and their NUMA nodes; empty without a driver."""
    return find_gpus(LocalMachine(timeout_s))


def port_holder(address: str, port: int) -> str | None:
    """Who listens on a TCP port that `address` would collide with: `name (pid N)`, or None if it is free."""
    for listener in probe_host.listeners(LocalMachine()) or []:
        if listener.port == port and (listener.address == address or {listener.address, address} & {"0.0.0.0", "::"}):
            if listener.pid is None:
                return "a process that this user may not see"
            return f"{listener.process or 'a process'} (pid {listener.pid})"
    return None


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

    Without CAP_SYS_RESOURCE the Docker daemon cannot raise its own hard limits, and a container that asks for more
    does not start. A daemon that cannot be looked at is assumed to have the limits and capabilities of this process.
    """
    machine = LocalMachine()
    found = probe_host.limits(machine)
    memlock, nofile, may_raise = found.daemon_memlock, found.daemon_nofile, found.daemon_may_raise
    if may_raise is None:
        may_raise = has_capability(machine.read("/proc/self/status") or "", CAP_SYS_RESOURCE) or os.geteuid() != 0
        memlock, nofile = found.memlock, found.nofile
    if may_raise:
        return {}
    return {
        name: str(limit.hard)
        for name, limit in (("MEMLOCK", memlock), ("NOFILE", nofile))
        if limit is not None and limit.hard != -1
    }


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 1024**2:.0f} MiB"
