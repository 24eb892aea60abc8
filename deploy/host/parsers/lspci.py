"""Output of `lspci -D -vvv`: the PCI tree, its links, and which bridges redirect peer traffic."""

import re
from typing import Literal

from deploy.host.parsers.text import integer, lines, pci_address
from deploy.host.report import AcsControl, PciDevice, PcieLink

Kind = Literal["gpu", "bridge", "nvme", "nic", "other"]
_HEAD = re.compile(r"((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]) ([^:]{1,80}): (.*)")
_SECONDARY = re.compile(r"secondary=([0-9a-fA-F]{2})")
_LINK = re.compile(r"Speed ([\d.]{1,5})GT/s[^,]{0,40}, Width x(\d{1,2})")
_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


def generation(gigatransfers: float | None) -> int | None:
    """PCIe generation of a link speed in GT/s."""
    return None if gigatransfers is None else _GENERATION.get(gigatransfers)


def _kind(class_name: str, vendor: str | None) -> Kind:
    if "NVIDIA" in (vendor or "") and ("VGA" in class_name or "3D" in class_name or "Display" in class_name):
        return "gpu"
    if "bridge" in class_name:
        return "bridge"
    if "Non-Volatile" in class_name:
        return "nvme"
    return "nic" if class_name in {"Ethernet controller", "Infiniband controller", "Network controller"} else "other"


def _link(body: list[str]) -> PcieLink:
    speeds: dict[str, tuple[int | None, int]] = {}
    for line in body:
        name = line.strip()[:7]
        if name in {"LnkCap:", "LnkSta:"} and (found := _LINK.search(line)):
            try:
                speeds[name] = (generation(float(found[1])), int(found[2]))
            except ValueError:
                continue
    now, most = speeds.get("LnkSta:", (None, None)), speeds.get("LnkCap:", (None, None))
    return PcieLink(generation=now[0], width=now[1], generation_max=most[0], width_max=most[1])


def _acs(body: list[str]) -> AcsControl | None:
    control = next((line for line in body if line.strip().startswith("ACSCtl:")), None)
    if control is None:
        return None
    return AcsControl(
        source_validation="SrcValid+" in control,
        request_redirect="ReqRedir+" in control,
        completion_redirect="CmpltRedir+" in control,
        upstream_forwarding="UpstreamFwd+" in control,
        egress_control="EgressCtrl+" in control,
        direct_translated="DirectTrans+" in control,
    )


def _field(body: list[str], name: str) -> int | None:
    line = next((line.strip() for line in body if line.strip().startswith(name)), None)
    return integer(line[len(name) :]) if line else None


def parse_lspci(text: str) -> list[PciDevice]:
    """Every function lspci lists. Without root it hides the capabilities: then `acs` and `link` stay unseen."""
    blocks: list[tuple[str, str, str, list[str]]] = []
    for line in lines(text):
        head = _HEAD.match(line)
        if head and (address := pci_address(head[1])):
            blocks.append((address, head[2], head[3], []))
        elif blocks and line[:1] in {"\t", " "}:
            blocks[-1][3].append(line)
    bridge_of_bus: dict[tuple[str, str], str] = {}
    for address, class_name, _, body in blocks:
        bus = next((found[1].lower() for line in body if (found := _SECONDARY.search(line))), None)
        if bus and "bridge" in class_name:
            bridge_of_bus.setdefault((address.split(":")[0], bus), address)
    devices: dict[str, PciDevice] = {}
    for address, class_name, description, body in blocks:
        domain, bus, _ = address.split(":")
        parent = bridge_of_bus.get((domain, bus))
        devices[address] = PciDevice(
            address=address,
            kind=_kind(class_name, description),
            name=re.sub(r" \((?:rev|prog-if) .{1,60}$", "", description)[:120] or None,
            parent=None if parent == address else parent,
            numa_node=_field(body, "NUMA node:"),
            iommu_group=_field(body, "IOMMU group:"),
            link=_link(body),
            acs=_acs(body),
            responds="(rev ff)" not in description and not any("Unknown header type 7f" in line for line in body),
        )
    return list(devices.values())
