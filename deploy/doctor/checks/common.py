"""What several areas of checks ask."""

from deploy.doctor.finding import Needs, RoleNeeds
from deploy.host.report import Gpu, HostReport

TENSOR_PARALLEL = 4
"""GPUs of one role in profile pd."""


def gpu_hardware(report: HostReport) -> list[str]:
    """PCI addresses of the NVIDIA GPUs in the machine, working or not."""
    on_bus = {device.address for device in report.pci or [] if device.kind == "gpu"}
    return sorted(on_bus | {gpu.pci_address for gpu in report.gpus if gpu.pci_address})


def wants_gpus(report: HostReport, needs: Needs) -> bool:
    """Whether this host is to serve from GPUs: what deploy.toml says, else whether there are any."""
    return needs.profile != "cpu" if needs.profile else bool(gpu_hardware(report) or report.lost_gpus)


def named(gpu: Gpu) -> str:
    """How findings name a GPU."""
    return f"GPU {gpu.index} ({gpu.pci_address or gpu.uuid or 'address unknown'})"


def listing(gpus: list[Gpu]) -> str:
    """Indices of several GPUs in words."""
    return ("GPU " if len(gpus) == 1 else "GPUs ") + ", ".join(str(gpu.index) for gpu in gpus)


def find_gpu(report: HostReport, name: int | str) -> Gpu | None:
    """The GPU that deploy.toml means by an index, a UUID or a CDI name that ends in either."""
    wanted = str(name).rpartition("=")[2]
    return next((gpu for gpu in report.gpus if wanted in {str(gpu.index), gpu.uuid}), None)


def gpus_of(report: HostReport, role: RoleNeeds) -> list[Gpu]:
    """The GPUs of a role that exist."""
    return [gpu for name in role.gpus if (gpu := find_gpu(report, name))]


def gpu_groups(report: HostReport, needs: Needs) -> list[tuple[str, list[Gpu]]]:
    """GPUs that talk to each other at every layer: the roles of deploy.toml, else the GPUs of each NUMA node."""
    if needs.roles:
        return [(role.name, gpus_of(report, role)) for role in needs.roles]
    nodes = sorted({gpu.numa_node for gpu in report.gpus if gpu.numa_node is not None})
    return [(f"NUMA node {node}", [gpu for gpu in report.gpus if gpu.numa_node == node]) for node in nodes]


def gibibytes(count: float) -> str:
    """Bytes in words."""
    return f"{count / 1024**3:.0f} GiB" if count >= 10 * 1024**3 else f"{count / 1024**3:.1f} GiB"
