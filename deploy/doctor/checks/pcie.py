"""Checks of the PCIe fabric between the GPUs."""

from collections.abc import Iterator

from deploy.doctor.check import check
from deploy.doctor.checks.common import gpu_hardware
from deploy.doctor.finding import Needs, Problem, error, note, warning
from deploy.host.parsers.kernel_command_line import parse_kernel_command_line
from deploy.host.report import HostReport

GROUP = "PCIe"
NCCL_LINK = "https://github.com/NVIDIA/nccl/issues/2079"
MANY_ERRORS = 10
"""Corrected link errors since boot from which a link counts as bad."""


@check("pcie.acs", GROUP)
def acs(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Bridges that send peer traffic up to the root: only request and completion redirect do, not SrcValid."""
    gpus = gpu_hardware(report)
    above = {bridge.address: bridge for gpu in gpus for bridge in report.bridges_above(gpu)}
    redirecting = [
        address
        for address, bridge in sorted(above.items())
        if bridge.acs and (bridge.acs.request_redirect or bridge.acs.completion_redirect)
    ]
    if len(gpus) > 1 and redirecting:
        yield error(
            f"ACS redirects peer-to-peer traffic on {len(redirecting)} bridges above GPUs ({', '.join(redirecting)})",
            "every transfer between GPUs goes up to the root complex: slow at best, and NCCL is known to hang",
            "switch ACS off in the BIOS; the commands do it until the next boot",
            *(f"sudo setpci -s {address} ECAP_ACS+0x6.w=0000" for address in redirecting),
            link=NCCL_LINK,
        )


@check("pcie.acs_unseen", GROUP)
def acs_unseen(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """ACS could not be read, so the check above says nothing."""
    unseen = next((seen for seen in report.unseen if seen.what == "ACS of PCIe bridges"), None)
    if unseen and len(gpu_hardware(report)) > 1:
        yield note(
            f"whether ACS redirects peer-to-peer traffic is not known: {unseen.why}",
            "ACS redirect makes transfers between GPUs slow or hang",
            unseen.how,
            link=NCCL_LINK,
        )


def iommu_translates(report: HostReport) -> bool | None:
    """Whether the IOMMU translates the GPUs' addresses; None if nothing tells.

    The domain of the GPUs' own groups is the best witness, then the kernel's default, then the boot parameters.
    """
    devices = [device for address in gpu_hardware(report) if (device := report.pci_at(address))]
    domains = {device.iommu_domain for device in devices if device.iommu_domain}
    if domains:
        return any(domain.startswith("DMA") for domain in domains)
    if devices and all(device.iommu_group is None for device in devices):
        return False
    if report.kernel_log and report.kernel_log.iommu_default_domain:
        return report.kernel_log.iommu_default_domain == "Translated"
    parameters = parse_kernel_command_line(report.system.command_line or "")
    asked = {parameters.get(name) for name in ("iommu", "amd_iommu", "intel_iommu")} - {None}
    if asked & {"pt", "off"}:
        return False
    return True if asked & {"on", "force", "nopt"} else None


@check("pcie.iommu", GROUP)
def iommu(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """The IOMMU translates every transfer between GPUs."""
    count = len(gpu_hardware(report))
    if count < 2 or not iommu_translates(report):
        return
    parameters = parse_kernel_command_line(report.system.command_line or "")
    asked = " ".join(f"{name}={value}" for name, value in parameters.items() if name.endswith("iommu"))
    parameter = "intel_iommu=off" if report.cpu.vendor == "GenuineIntel" else "amd_iommu=off"
    severity = error if count >= 8 else warning
    yield severity(
        f"the IOMMU translates the GPUs' transfers (boot parameters: {asked or 'none about it'})",
        "it was measured to cost about 15 % of throughput, and peer-to-peer hangs with 8 GPUs",
        f"boot with iommu=pt; if peer-to-peer still hangs, with {parameter}",
        "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub",
        "sudo update-grub",
        "sudo systemctl reboot",
        link="https://github.com/local-inference-lab/rtx6kpro",
    )


@check("pcie.iommu_faults", GROUP)
def iommu_faults(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """The IOMMU blocked transfers of a GPU."""
    gpus = set(gpu_hardware(report))
    for address, count in (report.kernel_log.iommu_faults if report.kernel_log else {}).items():
        if address in gpus:
            yield error(
                f"the IOMMU blocked {count} accesses of the GPU at {address}",
                "a peer-to-peer transfer had no mapping in the IOMMU: data is lost and NCCL waits for ever",
                "see the finding about the IOMMU; boot with iommu=pt",
                link=NCCL_LINK,
            )


@check("pcie.link_errors", GROUP)
def link_errors(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """A PCIe link that keeps failing."""
    gpus = gpu_hardware(report)
    path = {address for gpu in gpus for address in (gpu, *(bridge.address for bridge in report.bridges_above(gpu)))}
    for address, count in (report.kernel_log.pcie_errors if report.kernel_log else {}).items():
        if address in path and count >= MANY_ERRORS:
            yield warning(
                f"{count} PCIe errors at {address} since boot",
                "corrected errors cost bandwidth and usually come before the GPU falls off the bus",
                "reseat card and riser; lower the slot to PCIe generation 4 to tell signal quality from a defect",
                look=f"sudo dmesg | grep {address}",
            )
