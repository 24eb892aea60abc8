"""The demands on where a role's GPUs hang."""

from deploy.host.errors import HostError
from deploy.host.report import Gpu
from deploy.spec.model import CDI_KIND

MINIMUM_DRIVER = (580,)
"""First driver branch that runs CUDA 13 (CUDA 13.0 release notes, table of driver versions)."""


def require_node(role: str, devices: list[str], numa_node: int, gpus: list[Gpu]) -> None:
    """Check that all GPUs of a role hang on the node that its ranks are bound to.

    Args:
        devices: CDI names.
        gpus: what this host has; empty if it cannot be known.

    Raises:
        HostError: names the GPUs that hang elsewhere.
    """
    by_name = {f"{CDI_KIND}={name}": gpu for gpu in gpus for name in (str(gpu.index), gpu.uuid)}
    elsewhere = [
        f"{device} (node {gpu.numa_node})"
        for device in devices
        if (gpu := by_name.get(device)) and gpu.numa_node not in (None, numa_node)
    ]
    if elsewhere:
        raise HostError(
            f"{role} is bound to NUMA node {numa_node}, but {', '.join(elsewhere)}",
            "every all-reduce and every copy to the host would cross the link between the sockets",
            f"choose GPUs of one node for [{role}] and set its numa_node (nvidia-smi topo -m shows both)",
        )
