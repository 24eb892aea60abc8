"""Checks of the system around everything else."""

from collections.abc import Iterator

from deploy.doctor.check import check
from deploy.doctor.checks.common import wants_gpus
from deploy.doctor.finding import Needs, Problem, note, warning
from deploy.host.report import HostReport

GROUP = "System"
_BY_HAND = "deploy ignores variables of the shell; `docker compose up` by hand takes them over"


@check("system.time", GROUP)
def time(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """The clock runs free."""
    if report.system.time_synchronised is False:
        yield warning(
            "the clock is not synchronised",
            "TLS to registries fails once it is far off, and logs and measurements of several hosts do not line up",
            "",
            "sudo timedatectl set-ntp true",
        )


@check("system.container", GROUP)
def container(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """The doctor sees a container, not the host."""
    if report.system.container and report.numa is None:
        yield note(
            f"this runs inside a {report.system.container} container that hides /sys",
            "topology, NUMA nodes, PCIe and limits are the host's; most checks had nothing to look at",
            "run deploy doctor on the host",
        )


@check("environment.allocator", GROUP)
def allocator(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """An allocator setting that ruins KV transfers."""
    for name, value in report.system.environment.items():
        if "expandable_segments:true" in value.lower():
            yield warning(
                f"{name}={value} is set in this shell",
                "expandable segments cut KV transfers over NIXL from about 200 to 0.3 GB/s; " + _BY_HAND,
                f"unset {name}",
                link="https://github.com/ai-dynamo/nixl/issues/1754",
            )


@check("environment.transports", GROUP)
def transports(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """UCX or NCCL settings in the shell that change how GPUs talk."""
    value = report.system.environment.get("UCX_TLS", "")
    excludes = value.startswith("^") and "cuda" in value
    only_network = bool(value) and not value.startswith("^") and not any(word in value for word in ("cuda", "all"))
    if excludes or only_network:
        yield warning(
            f"UCX_TLS={value} is set in this shell",
            "without the CUDA transports the KV cache goes through host memory or TCP, with HTTP 200; " + _BY_HAND,
            "unset UCX_TLS",
            link="https://github.com/ai-dynamo/nixl/issues/1110",
        )
    others = [name for name in report.system.environment if name.startswith("NCCL_")]
    if others and wants_gpus(report, needs):
        yield note(
            f"{', '.join(others)} set in this shell",
            _BY_HAND,
            f"unset {' '.join(others)}; what you mean belongs into [variables] of deploy.toml",
        )


@check("environment.visible_devices", GROUP)
def visible_devices(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """A shell that hides GPUs from tests run by hand."""
    value = report.system.environment.get("CUDA_VISIBLE_DEVICES")
    if value is not None and report.gpus:
        yield note(
            f"CUDA_VISIBLE_DEVICES={value} is set in this shell",
            "programs started here see only those GPUs, numbered from 0; containers get theirs by UUID",
            "unset CUDA_VISIBLE_DEVICES",
            link="https://github.com/gpustack/gpustack/issues/6041",
        )
