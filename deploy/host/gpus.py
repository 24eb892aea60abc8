"""Which NUMA node each GPU hangs on: parser and check."""

from dataclasses import dataclass

from deploy.host.errors import HostError
from deploy.spec.model import CDI_KIND

QUERY = ["nvidia-smi", "--query-gpu=index,uuid,pci.bus_id", "--format=csv,noheader"]


@dataclass(frozen=True)
class GpuPlace:
    """`numa_node` is -1 where the kernel does not know it."""

    index: int
    uuid: str
    pci_address: str
    numa_node: int = -1


def parse_query(text: str) -> list[GpuPlace]:
    """Read the output of QUERY; lines of another shape are skipped. The address comes as sysfs spells it."""
    places: list[GpuPlace] = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[0].isascii() and fields[0].isdigit():
            domain, _, rest = fields[2].lower().partition(":")
            places.append(GpuPlace(int(fields[0]), fields[1], f"{domain[-4:]}:{rest}"))
    return places


def require_node(role: str, devices: list[str], numa_node: int, places: list[GpuPlace]) -> None:
    """Check that all GPUs of a role hang on the node that its ranks are bound to.

    Args:
        devices: CDI names.
        places: what this host has; empty if it cannot be known.

    Raises:
        HostError: names the GPUs that hang elsewhere.
    """
    by_name = {f"{CDI_KIND}={name}": place for place in places for name in (str(place.index), place.uuid)}
    elsewhere = [
        f"{device} (node {place.numa_node})"
        for device in devices
        if (place := by_name.get(device)) and place.numa_node not in (-1, numa_node)
    ]
    if elsewhere:
        raise HostError(
            f"{role} is bound to NUMA node {numa_node}, but {', '.join(elsewhere)}",
            "every all-reduce and every copy to the host would cross the link between the sockets",
            f"choose GPUs of one node for [{role}] and set its numa_node (nvidia-smi topo -m shows both)",
        )
