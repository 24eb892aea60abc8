"""The host as plain data: what the probe saw, when, and what it could not see.

A report is saved and loaded as JSON, so that the checks run the same on the host and on another machine.
`None` always means "not seen"; an empty list means "looked, and there is none".
"""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from deploy.validation import first_mistake

SCHEMA_VERSION = 1


class UnreadableReport(ValueError):
    """The file is no host report of this schema version."""


class Fact(BaseModel):
    """Base of everything in a report: immutable, no unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Unseen(Fact):
    """Something the probe looked for in vain."""

    what: str
    why: str
    how: str = ""
    """The command that would show it, empty if there is none."""


class PcieLink(Fact):
    """Generation and lane count of a PCIe link, now and at most.

    `generation_max` is what card and slot allow together, `generation_card` what the card alone allows.
    """

    generation: int | None = None
    generation_max: int | None = None
    generation_card: int | None = None
    width: int | None = None
    width_max: int | None = None


class Gpu(Fact):
    """One GPU as the driver describes it. Memory in MiB, power in watts, clocks in MHz, temperature in °C."""

    index: int
    name: str | None = None
    uuid: str | None = None
    serial: str | None = None
    pci_address: str | None = None
    driver: str | None = None
    compute_capability: str | None = None
    memory_mib: int | None = None
    memory_used_mib: int | None = None
    persistence: bool | None = None
    mig: bool | None = None
    ecc: bool | None = None
    ecc_uncorrected: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    utilisation_percent: float | None = None
    memory_utilisation_percent: float | None = None
    clock_sm_mhz: float | None = None
    clock_sm_max_mhz: float | None = None
    performance_state: str | None = None
    throttle: list[str] = []
    link: PcieLink = PcieLink()
    numa_node: int | None = None


class LostGpu(Fact):
    """A GPU that the driver or the PCI bus names but can no longer talk to."""

    pci_address: str | None
    said: str


class GpuProcess(Fact):
    """A process that holds GPU memory."""

    gpu_uuid: str
    pid: int
    name: str
    memory_mib: int | None = None


class Topology(Fact):
    """`nvidia-smi topo -m`: how each pair of devices is connected, and the driver's idea of the nearest CPUs."""

    devices: list[str] = []
    links: dict[str, dict[str, str]] = {}
    cpus: dict[str, list[int]] = {}
    numa_nodes: dict[str, list[int]] = {}
    nics: dict[str, str] = {}


class PeerAccess(Fact):
    """`nvidia-smi topo -p2p`: the driver's verdict for each pair of GPUs (OK, CNS, GNS, TNS, NS, DR, U)."""

    read: dict[str, dict[str, str]] = {}
    write: dict[str, dict[str, str]] = {}


class AcsControl(Fact):
    """The Access Control Services bits that a bridge has switched on."""

    source_validation: bool = False
    request_redirect: bool = False
    completion_redirect: bool = False
    upstream_forwarding: bool = False
    egress_control: bool = False
    direct_translated: bool = False


class PciDevice(Fact):
    """One PCI function. `kind` is gpu, bridge, nvme, nic or other; `parent` is the address of the bridge above."""

    address: str
    kind: Literal["gpu", "bridge", "nvme", "nic", "other"] = "other"
    name: str | None = None
    vendor: str | None = None
    parent: str | None = None
    root: str | None = None
    """The host bridge, such as `pci0000:40`."""
    numa_node: int | None = None
    iommu_group: int | None = None
    iommu_domain: str | None = None
    """Type of the IOMMU domain: DMA, DMA-FQ, identity …"""
    link: PcieLink = PcieLink()
    acs: AcsControl | None = None
    responds: bool = True


class NumaNode(Fact):
    """One NUMA node: its CPUs that are online, and its memory in bytes."""

    node: int
    cpus: list[int] = []
    memory_bytes: int | None = None
    memory_free_bytes: int | None = None
    distances: list[int] = []


class Cpu(Fact):
    """The processors."""

    model: str | None = None
    vendor: str | None = None
    sockets: int | None = None
    cores: int | None = None
    present: list[int] = []
    online: list[int] = []
    thread_siblings: list[list[int]] = []
    """Groups of logical CPUs that share one core."""
    governors: list[str] = []
    """Each governor in use, once."""


class Memory(Fact):
    """Host memory in bytes."""

    total: int | None = None
    available: int | None = None
    swap_total: int | None = None
    hugepages_total: int | None = None
    hugepages_free: int | None = None
    hugepage_bytes: int | None = None
    transparent_hugepages: str | None = None
    numa_balancing: bool | None = None


class Limit(Fact):
    """A resource limit; -1 is unlimited."""

    soft: int
    hard: int


class Limits(Fact):
    """Limits of this shell and of the Docker daemon, which are the ceiling for containers."""

    memlock: Limit | None = None
    nofile: Limit | None = None
    daemon_memlock: Limit | None = None
    daemon_nofile: Limit | None = None
    daemon_may_raise: bool | None = None
    """The daemon holds CAP_SYS_RESOURCE, so it can give containers more than its own limits."""


class Filesystem(Fact):
    """A mounted local filesystem; sizes in bytes."""

    mount: str
    source: str
    kind: str
    size: int
    free: int
    rotational: bool | None = None
    nvme: bool | None = None


class DiskRead(Fact):
    """Speed of a read that went past the page cache."""

    path: str
    bytes_read: int
    bytes_per_second: float


class Docker(Fact):
    """The Docker Engine as it describes itself."""

    client: str | None = None
    server: str | None = None
    error: str | None = None
    root: str | None = None
    storage_driver: str | None = None
    cgroup_driver: str | None = None
    cgroup_version: str | None = None
    live_restore: bool | None = None
    runtimes: list[str] = []
    plugins: dict[str, str] = {}
    """Client plug-ins (compose, buildx) with their versions."""
    cdi_enabled: bool | None = None
    cdi_spec_dirs: list[str] = []
    cdi_devices: list[str] = []
    """Fully qualified names such as `nvidia.com/gpu=0`."""
    iptables: bool | None = None


class Listener(Fact):
    """A TCP port somebody listens on."""

    address: str
    port: int
    pid: int | None = None
    process: str | None = None


class Firewall(Fact):
    """Host firewalls that Docker's published ports go around."""

    ufw: bool | None = None
    firewalld: bool | None = None


class Xid(Fact):
    """An error the NVIDIA driver logged."""

    code: int
    pci_address: str
    text: str
    count: int = 1


class KernelLog(Fact):
    """What the kernel log says about GPUs and PCIe; counts are by PCI address."""

    xids: list[Xid] = []
    iommu_faults: dict[str, int] = {}
    pcie_errors: dict[str, int] = {}
    iommu_default_domain: str | None = None


class System(Fact):
    """Operating system and how we run on it."""

    hostname: str
    kernel: str
    os: str | None = None
    root: bool
    container: str | None = None
    """The container runtime that we run in, empty if none."""
    command_line: str | None = None
    driver_module: str | None = None
    """Version of the loaded NVIDIA kernel module."""
    driver_module_open: bool | None = None
    container_toolkit: str | None = None
    dev_char_links: bool | None = None
    """/dev/char has the links that keep GPUs in containers over a systemd reload."""
    time_synchronised: bool | None = None
    environment: dict[str, str] = {}
    """Variables of this shell that change NCCL, UCX, CUDA or PyTorch."""


class CopyResult(Fact):
    """Memory copy on one GPU."""

    gpu: int
    bytes_per_second: float | None = None
    correct: bool | None = None
    error: str | None = None


class PeerResult(Fact):
    """Copy from one GPU to another."""

    source: int
    target: int
    bytes_per_second: float | None = None
    correct: bool | None = None
    peer_access: bool | None = None
    error: str | None = None


Outcome = Literal["ok", "hang", "wrong_values", "failed"]


class AllReduceResult(Fact):
    """A real all-reduce over all ranks."""

    device: str
    ranks: int
    peer_to_peer: bool
    outcome: Outcome
    seconds: float | None = None
    bytes_per_second: float | None = None
    """Algorithm bandwidth: bytes of one rank's buffer by time."""
    said: str = ""


class TransferResult(Fact):
    """A NIXL transfer between two processes."""

    transport: Literal["isolated", "p2p"]
    """As in deploy.toml: each process in a container of its own with its own GPU, or both in one that has both."""
    memory: Literal["cpu", "cuda"]
    outcome: Outcome
    bytes_per_second: float | None = None
    used: list[str] = []
    """The transports that UCX says it chose, such as `tcp`."""
    said: str = ""


class ActiveTests(Fact):
    """Results of `doctor --probe`, which runs programs in the locked image."""

    image: str
    copies: list[CopyResult] = []
    peers: list[PeerResult] = []
    all_reduces: list[AllReduceResult] = []
    transfers: list[TransferResult] = []
    not_run: list[Unseen] = []


class HostReport(Fact):
    """Everything the checks, the proposal and the bug report know about a host."""

    schema_version: Literal[1] = SCHEMA_VERSION
    taken_at: str
    """UTC, ISO 8601."""
    seconds: float
    """Time the probe took."""
    system: System
    gpus: list[Gpu] = []
    lost_gpus: list[LostGpu] = []
    gpu_processes: list[GpuProcess] | None = None
    topology: Topology | None = None
    peer_access: PeerAccess | None = None
    pci: list[PciDevice] | None = None
    numa: list[NumaNode] | None = None
    cpu: Cpu = Cpu()
    memory: Memory = Memory()
    limits: Limits = Limits()
    shm_bytes: int | None = None
    filesystems: list[Filesystem] | None = None
    disk_reads: list[DiskRead] = []
    model_shards: int | None = None
    """Files with weights in the model's folder; None if no folder was named."""
    docker: Docker | None = None
    listeners: list[Listener] | None = None
    firewall: Firewall = Firewall()
    kernel_log: KernelLog | None = None
    active: ActiveTests | None = None
    unseen: list[Unseen] = []

    def gpu_at(self, address: str) -> Gpu | None:
        """The GPU at a PCI address, or None."""
        return next((gpu for gpu in self.gpus if gpu.pci_address == address), None)

    def pci_at(self, address: str | None) -> PciDevice | None:
        """The PCI function at an address, or None."""
        return next((device for device in self.pci or [] if device.address == address), None)

    def bridges_above(self, address: str) -> list[PciDevice]:
        """The bridges between a device and its host bridge, nearest first."""
        above: list[PciDevice] = []
        device = self.pci_at(address)
        while device and (parent := self.pci_at(device.parent)) and parent not in above:
            above.append(parent)
            device = parent
        return above


def load(path: Path) -> HostReport:
    """Read a saved report.

    Raises:
        UnreadableReport: the file is missing, no JSON, or of another schema version; the text says which.
    """
    try:
        return HostReport.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UnreadableReport(f"{path}: {error.strerror or error}") from error
    except ValidationError as error:
        raise UnreadableReport(f"{path}: {first_mistake(error)}") from error


def save(report: HostReport, path: Path) -> None:
    """Write a report as JSON that people can read and diff."""
    path.write_text(report.model_dump_json(indent=2) + "\n")
