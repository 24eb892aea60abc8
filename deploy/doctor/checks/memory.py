"""Checks of host memory and resource limits."""

from collections.abc import Iterator

from deploy.doctor.check import check
from deploy.doctor.checks.common import gibibytes, wants_gpus
from deploy.doctor.finding import Needs, Problem, error, note, warning
from deploy.host.report import HostReport, Limit

GROUP = "Memory and limits"
SMALLEST_SHM = 1024**3
HUGEPAGE_SHARE = 0.25
"""Share of memory in reserved, unused huge pages from which it is worth a finding."""
CPU_STACK_BYTES = 4 * 1024**3
"""Prefill, decode and router of the CPU profile take 3.2 GB together."""


@check("memory.available", GROUP)
def available(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Too little memory for the CPU profile."""
    free = report.memory.available
    if free is not None and not wants_gpus(report, needs) and free < CPU_STACK_BYTES:
        yield error(
            f"{gibibytes(free)} of memory are available",
            f"prefill, decode and router of the CPU profile need {gibibytes(CPU_STACK_BYTES)}",
            "stop what uses it",
            look="ps aux --sort=-rss | head",
        )


@check("memory.hugepages", GROUP)
def hugepages(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Memory set aside that nothing here uses."""
    free, size, total = report.memory.hugepages_free, report.memory.hugepage_bytes, report.memory.total
    if free and size and total and free * size > HUGEPAGE_SHARE * total:
        yield warning(
            f"{gibibytes(free * size)} of {gibibytes(total)} are reserved as huge pages and unused",
            "neither the engine nor the page cache that holds the weights can use them",
            "",
            "echo 0 | sudo tee /proc/sys/vm/nr_hugepages",
        )


def _short(limit: Limit | None, wanted: int) -> bool:
    return limit is not None and limit.hard != -1 and (wanted == -1 or limit.hard < wanted)


def _by_itself(name: str, value: int) -> str:
    return (
        f"deploy up lowers {name} to {value} by itself; for docker compose up by hand put {name}={value} into .env. "
        "Better: give the daemon CAP_SYS_RESOURCE"
    )


@check("limits.memlock", GROUP)
def memlock(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """The Docker daemon cannot give containers the locked memory that they ask for."""
    limit = report.limits.daemon_memlock
    if limit and _short(limit, needs.memlock) and report.limits.daemon_may_raise is False:
        # Only pinned GPU buffers are large.
        severity = warning if wants_gpus(report, needs) else note
        yield severity(
            f"the Docker daemon may lock {limit.hard // 1024} KiB and cannot raise it for containers",
            "UCX and NCCL pin the buffers they register; a container that asks for more than that does not start",
            _by_itself("MEMLOCK", limit.hard),
            link="https://github.com/NVIDIA/nccl/issues/290",
        )


@check("limits.nofile", GROUP)
def nofile(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """The Docker daemon cannot give containers the open files that they ask for."""
    limit = report.limits.daemon_nofile
    if limit and _short(limit, needs.nofile) and report.limits.daemon_may_raise is False:
        severity = warning if wants_gpus(report, needs) else note
        yield severity(
            f"the Docker daemon may open {limit.hard} files and cannot raise it for containers",
            f"compose.yaml asks for {needs.nofile}; a container that asks for more does not start",
            _by_itself("NOFILE", limit.hard),
        )


@check("memory.shm", GROUP)
def shm(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """A small /dev/shm, as containers have by default."""
    if report.shm_bytes is not None and report.shm_bytes < SMALLEST_SHM and wants_gpus(report, needs):
        yield warning(
            f"/dev/shm has {report.shm_bytes // 1024**2} MiB",
            "NCCL's shared-memory transport needs more; our containers bring their own (SHM_SIZE), others do not",
            "",
            "sudo mount -o remount,size=50% /dev/shm",
            link="https://github.com/NVIDIA/nccl/issues/290",
        )
