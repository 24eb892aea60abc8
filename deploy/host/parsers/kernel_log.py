"""The kernel log: errors of the NVIDIA driver, of the IOMMU and of PCIe links."""

import re
from collections import Counter

from deploy.host.parsers.text import lines, pci_address
from deploy.host.report import KernelLog, Xid

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]{7,20})\): (\d{1,4}),?\s*(.*)")
_IOMMU_FAULT = re.compile(r"(?:AMD-Vi: .{0,40}IO_PAGE_FAULT|DMAR: \[(?:DMA|INTR)).{0,80}")
_BUS_ERROR = re.compile(r"AER: .{0,80}(?:error|Error)")
_DOMAIN = re.compile(r"iommu: Default domain type: (\w{1,20})")
_FUNCTION = re.compile(r"([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.[0-7])?")


def parse_kernel_log(text: str) -> KernelLog:
    """What dmesg or `journalctl -k` says that matters here. Repeats are counted, the last text is kept."""
    xids: dict[tuple[int, str], Xid] = {}
    faults: Counter[str] = Counter()
    bus_errors: Counter[str] = Counter()
    domain: str | None = None
    for line in lines(text):
        if found := _XID.search(line):
            # The driver leaves the function out: a GPU is function 0.
            address = pci_address(found[1]) or pci_address(found[1] + ".0") or found[1]
            key = (int(found[2]), address)
            before = xids.get(key)
            xids[key] = Xid(
                code=key[0], pci_address=address, text=found[3][:200], count=1 + (before.count if before else 0)
            )
        elif _IOMMU_FAULT.search(line):
            faults[pci_address(line) or "unknown"] += 1
        elif _BUS_ERROR.search(line):
            # "pcieport 0000:40:01.1: AER: … error … 0000:41:00.0": the last address is the culprit.
            addresses = _FUNCTION.findall(line)
            bus_errors[(pci_address(f"{addresses[-1]}.0") if addresses else None) or "unknown"] += 1
        elif found := _DOMAIN.search(line):
            domain = found[1]
    return KernelLog(
        xids=sorted(xids.values(), key=lambda xid: (xid.pci_address, xid.code)),
        iommu_faults=dict(faults),
        pcie_errors=dict(bus_errors),
        iommu_default_domain=domain,
    )
