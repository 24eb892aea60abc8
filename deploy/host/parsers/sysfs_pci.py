"""The PCI devices as /sys shows them: readable without root and without lspci."""

import re
from collections.abc import Mapping

from deploy.host.parsers.lspci import Kind, generation
from deploy.host.parsers.text import integer, number
from deploy.host.report import PciDevice, PcieLink

NVIDIA = "0x10de"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def _kind(class_code: str, vendor: str) -> Kind:
    """From the class code's first four digits (PCI Code and ID Assignment Specification)."""
    base = class_code[:6].lower()
    if base in {"0x0300", "0x0302"} and vendor == NVIDIA:
        return "gpu"
    return {"0x0604": "bridge", "0x0108": "nvme", "0x0200": "nic", "0x0207": "nic"}.get(base, "other")  # type: ignore[return-value]


def parse_pci_device(path: str, attributes: Mapping[str, str]) -> PciDevice | None:
    """One device from its resolved folder under /sys/devices and the text of its attributes.

    Args:
        path: such as `/sys/devices/pci0000:40/0000:40:01.1/0000:41:00.0`.
        attributes: of `class`, `vendor`, `numa_node`, `current_link_speed`, `max_link_speed`,
            `current_link_width`, `max_link_width`, `iommu_group` (its number) and `iommu_domain`, those that exist.
    """
    parts = [part for part in path.split("/") if part]
    if not parts or not _ADDRESS.fullmatch(parts[-1]):
        return None
    above = [part for part in parts[:-1] if _ADDRESS.fullmatch(part)]
    node, vendor = integer(attributes.get("numa_node")), attributes.get("vendor", "").strip()
    return PciDevice(
        address=parts[-1],
        kind=_kind(attributes.get("class", "").strip(), vendor),
        vendor=vendor or None,
        parent=above[-1] if above else None,
        root=next((part for part in parts if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)), None),
        numa_node=None if node is None or node < 0 else node,
        iommu_group=integer(attributes.get("iommu_group")),
        iommu_domain=attributes.get("iommu_domain", "").strip() or None,
        link=PcieLink(
            generation=generation(number(attributes.get("current_link_speed"))),
            generation_max=generation(number(attributes.get("max_link_speed"))),
            width=integer(attributes.get("current_link_width")) or None,
            width_max=integer(attributes.get("max_link_width")) or None,
        ),
        # A card that fell off the bus reads as all ones, and the width field has six bits; 63 lanes do not exist.
        responds=integer(attributes.get("current_link_width")) != 63,
    )


def merge_pci(from_sysfs: list[PciDevice], from_lspci: list[PciDevice]) -> list[PciDevice]:
    """One list: /sys says where a device sits, lspci adds its name, ACS and whether it still answers."""
    listed = {device.address: device for device in from_lspci}
    merged: list[PciDevice] = []
    for device in from_sysfs:
        other = listed.pop(device.address, None)
        if other is None:
            merged.append(device)
            continue
        merged.append(
            device.model_copy(
                update={
                    "name": other.name,
                    "acs": other.acs,
                    "responds": device.responds and other.responds,
                    "kind": device.kind if device.kind != "other" else other.kind,
                    "numa_node": other.numa_node if device.numa_node is None else device.numa_node,
                    "iommu_group": other.iommu_group if device.iommu_group is None else device.iommu_group,
                }
            )
        )
    return sorted([*merged, *listed.values()], key=lambda device: device.address)
