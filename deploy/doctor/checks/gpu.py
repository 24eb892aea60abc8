"""Checks of the GPUs and their driver."""

from collections.abc import Iterator

from deploy.doctor.check import check
from deploy.doctor.checks.common import find_gpu, gpu_groups, gpu_hardware, listing, named, wants_gpus
from deploy.doctor.finding import Needs, Problem, error, note, warning
from deploy.host.gpus import MINIMUM_DRIVER
from deploy.host.parsers.docker import parse_version
from deploy.host.report import HostReport

GROUP = "GPUs"
ARCHITECTURE = "12.0"
"""Compute capability of the RTX PRO 6000 Blackwell, which the kernels of this project are compiled for."""
XID_LINK = "https://docs.nvidia.com/deploy/xid-errors/"

# NVIDIA's Xid catalogue: what the hardware or the driver did, against what a program did.
_XID_HARDWARE = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    63: "row remapping recorded",
    64: "row remapping failed",
    74: "NVLink error",
    79: "the GPU fell off the bus",
    92: "high single-bit ECC error rate",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "the GPU's system processor timed out",
    120: "the GPU's system processor failed",
    140: "unrecovered ECC error",
    154: "the GPU asks for a recovery action",
}
_XID_PROGRAM = {13: "illegal instruction or address", 31: "page fault", 43: "reset channel", 45: "preemptive removal"}
_VERDICTS = {
    "CNS": "the chipset does not support it",
    "GNS": "the GPU does not support it",
    "TNS": "the topology does not support it",
    "NS": "not supported",
    "DR": "switched off by a driver setting",
    "U": "unknown",
}


@check("gpu.none", GROUP)
def none(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """No NVIDIA GPU in the machine."""
    if report.gpus or report.lost_gpus or gpu_hardware(report):
        return
    if needs.profile in ("pd", "replicas"):
        yield error(
            "this machine has no NVIDIA GPU",
            f'deploy.toml says profile = "{needs.profile}", which serves from GPUs',
            'run this on the GPU host, or set profile = "cpu"',
        )
    elif needs.profile is None:
        yield note(
            "this machine has no NVIDIA GPU",
            "only the CPU profile can run here: real prefill, decode and router with a tiny model",
            "make demo",
        )


@check("gpu.driver", GROUP)
def driver(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """GPUs sit in the machine but the driver shows none of them."""
    hardware = gpu_hardware(report)
    if report.gpus or not hardware:
        return
    reason = next((seen.why for seen in report.unseen if seen.what == "GPUs"), "nvidia-smi lists none")
    hung = "did not answer" in reason
    yield error(
        f"{len(hardware)} NVIDIA GPUs are on the PCI bus and the driver shows none: {reason}",
        "without the driver no container gets a GPU",
        "wait longer first; if it still does not answer, the driver hangs and the machine must be rebooted"
        if hung
        else "install the NVIDIA driver (580 or newer, open kernel modules) and reboot",
        *(() if hung else ("sudo apt-get install nvidia-driver-580-server-open",)),
        look="deploy doctor --limit 30" if hung else "nvidia-smi",
    )


@check("gpu.lost", GROUP)
def lost(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """GPUs that are there but answer no more."""
    said: dict[str, str] = {gpu.pci_address or "an unknown address": gpu.said for gpu in report.lost_gpus}
    for device in report.pci or []:
        if device.kind == "gpu" and not device.responds:
            said.setdefault(device.address, "its PCI configuration reads as all ones")
        elif device.kind == "gpu" and report.gpus and not report.gpu_at(device.address):
            said.setdefault(device.address, "the driver does not list it")
    for address, words in said.items():
        yield error(
            f"the GPU at {address} does not answer: {words}",
            "a GPU that fell off the bus comes back only with a reset of its slot; jobs on the others may hang with it",
            "reboot; if it happens again check power cables, seating, temperature and the PCIe link of this slot",
            "sudo systemctl reboot",
            look="sudo dmesg | grep -i -e xid -e aer",
            link="https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1151",
        )


@check("gpu.count", GROUP)
def count(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """GPUs that deploy.toml names are not there, or there are too few for the profile."""
    missing = [str(name) for role in needs.roles for name in role.gpus if find_gpu(report, name) is None]
    if missing and report.gpus:
        have = ", ".join(f"{gpu.index} = {gpu.uuid}" for gpu in report.gpus)
        yield error(
            f"deploy.toml names GPUs that are not here: {', '.join(missing)}",
            f"this host has {have}",
            "deploy init proposes a deploy.toml for this host",
            look="nvidia-smi -L",
        )
    if not needs.roles and not report.lost_gpus and 0 < len(report.gpus) < 8 and wants_gpus(report, needs):
        yield note(
            f"{len(report.gpus)} GPUs",
            "profile pd gives prefill and decode four GPUs each; with fewer, replicas of two serve",
            "deploy init proposes them",
        )


@check("gpu.mixed", GROUP)
def mixed(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Different models of GPU."""
    models = sorted({f"{gpu.name} with {gpu.memory_mib} MiB" for gpu in report.gpus})
    if len(models) > 1:
        yield warning(
            f"GPUs of different kinds: {'; '.join(models)}",
            "in a tensor-parallel group every step waits for the slowest GPU and the smallest memory sets the KV cache",
            "give each role GPUs of one kind",
        )


@check("gpu.mig", GROUP)
def mig(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """MIG cuts a GPU into parts that cannot talk to other GPUs."""
    cut = [gpu for gpu in report.gpus if gpu.mig]
    if cut:
        yield error(
            f"MIG is on: {listing(cut)}",
            "a MIG instance has neither peer-to-peer access nor the whole memory",
            "switch it off while nothing runs on the GPU",
            *(f"sudo nvidia-smi -i {gpu.index} -mig 0" for gpu in cut),
        )


@check("gpu.busy", GROUP)
def busy(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Memory held by processes that are not this stack's."""
    for process in report.gpu_processes or []:
        if "sglang" in process.name:
            continue
        gpu = next((gpu for gpu in report.gpus if gpu.uuid == process.gpu_uuid), None)
        yield warning(
            f"{named(gpu) if gpu else process.gpu_uuid} is used by {process.name or 'a process'} (pid {process.pid}, "
            f"{process.memory_mib if process.memory_mib is not None else '?'} MiB)",
            "the engine takes a fixed share of the whole memory at start and fails if it is not free",
            "stop that process, or give the role another GPU",
            look=f"ps -fp {process.pid}",
        )


@check("gpu.persistence", GROUP)
def persistence(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Without persistence the driver unloads state whenever nothing uses the GPU."""
    off = [gpu for gpu in report.gpus if gpu.persistence is False]
    if off:
        yield warning(
            f"persistence mode is off: {listing(off)}",
            "every first use initialises the GPUs again (seconds each) and settings such as power limits are lost",
            "",
            "sudo systemctl enable --now nvidia-persistenced",
            "sudo nvidia-smi -pm 1",
        )


@check("gpu.power", GROUP)
def power(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Power limits below the default, or unequal."""
    low = [
        gpu
        for gpu in report.gpus
        if gpu.power_limit_w and gpu.power_default_w and gpu.power_limit_w < 0.98 * gpu.power_default_w
    ]
    if low:
        shown = ", ".join(f"{gpu.index}: {gpu.power_limit_w:.0f} of {gpu.power_default_w:.0f} W" for gpu in low)
        yield note(
            f"power limits below the default ({shown})",
            "prefill is bound by compute and slows down with the limit; decode hardly does",
            "raise them unless the power supply or the cooling needs them",
            *(f"sudo nvidia-smi -i {gpu.index} -pl {gpu.power_default_w:.0f}" for gpu in low),
        )


@check("gpu.throttled", GROUP)
def throttled(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """The hardware holds the clocks down now."""
    for gpu in report.gpus:
        reasons = [reason for reason in gpu.throttle if reason != "software power cap"]
        if reasons:
            heat = f" at {gpu.temperature_c:.0f} °C" if gpu.temperature_c is not None else ""
            yield warning(
                f"{named(gpu)} is slowed down{heat}: {', '.join(reasons)}",
                "the slowest GPU of a tensor-parallel group sets the pace of all",
                "check airflow and power cables",
                look=f"nvidia-smi -i {gpu.index} -q -d PERFORMANCE,TEMPERATURE,POWER",
            )


@check("gpu.ecc", GROUP)
def ecc(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Memory errors that were not corrected."""
    for gpu in report.gpus:
        if gpu.ecc_uncorrected:
            yield error(
                f"{named(gpu)} counts {gpu.ecc_uncorrected} uncorrected memory errors since the driver was loaded",
                "weights or KV cache on it may be wrong",
                "reset the GPU; if errors come back, replace it",
                f"sudo nvidia-smi -i {gpu.index} --gpu-reset",
                look=f"nvidia-smi -i {gpu.index} -q -d ECC,ROW_REMAPPER",
            )


@check("gpu.link", GROUP)
def link(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """PCIe links that are narrower or slower than the card can. An idle link lowers its generation, never its width."""
    for gpu in report.gpus:
        at, card = gpu.link, gpu.link.generation_card
        if at.width and at.width_max and at.width < at.width_max:
            yield warning(
                f"{named(gpu)} has {at.width} of {at.width_max} PCIe lanes",
                "tensor parallelism and the KV transfer run over this link",
                "reseat the card, check riser and slot wiring, and the slot's bifurcation in the BIOS",
                look=f"sudo lspci -vvs {gpu.pci_address} | grep -e LnkCap -e LnkSta",
            )
        if at.generation_max and card and at.generation_max < card:
            yield warning(
                f"{named(gpu)} can do PCIe generation {card} and its slot allows {at.generation_max}",
                "half the generation is half the bandwidth of every transfer between GPUs",
                "set the slot's link speed in the BIOS, or check riser and retimer",
            )


@check("gpu.architecture", GROUP)
def architecture(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """GPUs the kernels were not made for."""
    other = [gpu for gpu in report.gpus if gpu.compute_capability not in {None, ARCHITECTURE}]
    if other:
        yield warning(
            f"{listing(other)}: compute capability {other[0].compute_capability} ({other[0].name})",
            f"kernels and settings of this project are made for {ARCHITECTURE}; others run what SGLang chooses",
        )


@check("gpu.driver_version", GROUP)
def driver_version(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """A driver older than CUDA 13 needs, or of which the kernel runs another version."""
    version = next((gpu.driver for gpu in report.gpus if gpu.driver), report.system.driver_module)
    if version and parse_version(version) < MINIMUM_DRIVER:
        yield error(
            f"NVIDIA driver {version}",
            f"the image carries CUDA 13, which needs driver {MINIMUM_DRIVER[0]} or newer",
            "",
            "sudo apt-get install nvidia-driver-580-server-open",
        )
    module = report.system.driver_module
    if version and module and module != version:
        yield error(
            f"the kernel has driver {module} loaded and the libraries are of {version}",
            "the driver was updated and the old module still runs: new processes fail to open the GPUs",
            "",
            "sudo systemctl reboot",
        )


@check("gpu.peer_access", GROUP)
def peer_access(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Pairs of one group between which the driver refuses direct copies."""
    if report.peer_access is None:
        return
    for name, gpus in gpu_groups(report, needs):
        names = [f"GPU{gpu.index}" for gpu in gpus]
        verdicts = {
            (row, column): cell
            for table in (report.peer_access.read, report.peer_access.write)
            for row in names
            for column, cell in table.get(row, {}).items()
            if column in names and cell not in {"OK", "X"}
        }
        if verdicts:
            (row, column), cell = next(iter(verdicts.items()))
            yield warning(
                f"no peer-to-peer access between {len(verdicts)} pairs in {name} (first: {row} and {column}, "
                f"{cell}: {_VERDICTS.get(cell, 'no meaning known')})",
                "all-reduce then goes through host memory",
                "check ACS, IOMMU and 'Above 4G decoding' / resizable BAR in the BIOS",
                look="nvidia-smi topo -p2p r",
            )


@check("gpu.xid", GROUP)
def xid(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Errors that the driver logged since boot."""
    for entry in report.kernel_log.xids if report.kernel_log else []:
        times = f", {entry.count} times" if entry.count > 1 else ""
        meaning = _XID_HARDWARE.get(entry.code) or _XID_PROGRAM.get(entry.code) or entry.text or "see NVIDIA's list"
        seen = f"Xid {entry.code} at {entry.pci_address}{times}: {meaning}"
        version = report.system.driver_module or "unknown"
        if entry.code in _XID_PROGRAM:
            yield note(seen, "a program's error; it is over unless it comes back", link=XID_LINK)
        else:
            severity = error if entry.code in _XID_HARDWARE else warning
            yield severity(
                seen,
                f"the hardware or the driver (here {version}) failed; some Xids come with particular driver versions",
                "look the code up; compare with another driver version before replacing hardware",
                look="sudo dmesg | grep -i xid",
                link=XID_LINK,
            )
