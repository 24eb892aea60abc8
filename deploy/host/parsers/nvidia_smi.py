"""Output of nvidia-smi: the GPU query, the compute processes, and both topology matrices."""

import csv
import re

from deploy.host.parsers.cpu_list import parse_cpu_list
from deploy.host.parsers.text import integer, lines, number, pci_address
from deploy.host.report import Gpu, GpuProcess, LostGpu, PcieLink, Topology

QUERY_FIELDS = (
    "index",
    "name",
    "uuid",
    "serial",
    "pci.bus_id",
    "driver_version",
    "compute_cap",
    "memory.total",
    "memory.used",
    "persistence_mode",
    "mig.mode.current",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "power.limit",
    "power.default_limit",
    "power.draw",
    "temperature.gpu",
    "utilization.gpu",
    "utilization.memory",
    "clocks.sm",
    "clocks.max.sm",
    "pstate",
    "clocks_event_reasons.active",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.gen.gpumax",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")

# nvml.h, nvmlClocksEventReason*; idle and the two settings a person makes are no slowdown.
_THROTTLE = {
    0x04: "software power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_LOST_MESSAGE = re.compile(r"device handle for GPU(.{0,60}): ([^:]{0,200})$")
_LOST_CELL = re.compile(r"\[?(GPU is lost|GPU requires reset|Unknown Error)\]?", re.IGNORECASE)
_BAD_FIELD = re.compile(r'Field "([\w.]+)" is not a valid field')
_DEVICE = re.compile(r"[A-Za-z][\w.-]*\d[\w.-]*")


def _table(text: str) -> list[dict[str, str]]:
    """Rows of nvidia-smi's CSV by column name, units in the header dropped. No header, no rows."""
    rows = csv.reader((line for line in lines(text) if "," in line), skipinitialspace=True, quoting=csv.QUOTE_NONE)
    header: list[str] | None = None
    table: list[dict[str, str]] = []
    for row in rows:
        if header is None:
            header = [cell.split(" [")[0].strip() for cell in row]
        else:
            table.append({name: cell.strip() for name, cell in zip(header, row, strict=False)})
    return table


def _switch(text: str | None) -> bool | None:
    return {"enabled": True, "disabled": False}.get((text or "").strip().lower())


def _known(text: str | None) -> str | None:
    """The text unless it is one of nvidia-smi's ways to say that there is none."""
    missing = not text or re.fullmatch(r"\[?(N/A|Not Supported|Not Found|None)\]?|0", text, re.IGNORECASE)
    return None if missing else text


def throttle_reasons(mask: str | None) -> list[str]:
    """Names of the slowdowns in a clocks-event bit mask such as `0x0000000000000004`."""
    try:
        bits = int((mask or "")[:20], 16)
    except ValueError:
        return []
    return [name for bit, name in _THROTTLE.items() if bits & bit]


def parse_query(text: str) -> tuple[list[Gpu], list[LostGpu]]:
    """GPUs of `nvidia-smi --query-gpu=… --format=csv`, and those the driver has lost."""
    gpus: list[Gpu] = []
    lost = [
        LostGpu(pci_address=pci_address(found[1]), said=found[2].strip() or "no answer")
        for line in lines(text)
        if (found := _LOST_MESSAGE.search(line))
    ]
    for row in _table(text):
        index, address = integer(row.get("index")), pci_address(row.get("pci.bus_id"))
        broken = next((found[1] for cell in row.values() if (found := _LOST_CELL.fullmatch(cell))), None)
        if broken and not (integer(row.get("memory.total")) and row.get("uuid", "").startswith("GPU-")):
            lost.append(LostGpu(pci_address=address, said=broken))
            continue
        if index is None or index < 0:
            continue
        gpus.append(
            Gpu(
                index=index,
                name=_known(row.get("name")),
                uuid=_known(row.get("uuid")),
                serial=_known(row.get("serial")),
                pci_address=address,
                driver=_known(row.get("driver_version")),
                compute_capability=_known(row.get("compute_cap")),
                memory_mib=integer(row.get("memory.total")),
                memory_used_mib=integer(row.get("memory.used")),
                persistence=_switch(row.get("persistence_mode")),
                mig=_switch(row.get("mig.mode.current")),
                ecc=_switch(row.get("ecc.mode.current")),
                ecc_uncorrected=integer(row.get("ecc.errors.uncorrected.volatile.total")),
                power_limit_w=number(row.get("power.limit")),
                power_default_w=number(row.get("power.default_limit")),
                power_w=number(row.get("power.draw")),
                temperature_c=number(row.get("temperature.gpu")),
                utilisation_percent=number(row.get("utilization.gpu")),
                memory_utilisation_percent=number(row.get("utilization.memory")),
                clock_sm_mhz=number(row.get("clocks.sm")),
                clock_sm_max_mhz=number(row.get("clocks.max.sm")),
                performance_state=_known(row.get("pstate")),
                throttle=throttle_reasons(row.get("clocks_event_reasons.active")),
                link=PcieLink(
                    generation=integer(row.get("pcie.link.gen.current")),
                    generation_max=integer(row.get("pcie.link.gen.max")),
                    generation_card=integer(row.get("pcie.link.gen.gpumax")),
                    width=integer(row.get("pcie.link.width.current")),
                    width_max=integer(row.get("pcie.link.width.max")),
                ),
            )
        )
    return gpus, lost


def invalid_field(text: str) -> str | None:
    """The query field this driver does not know, if it complained about one."""
    found = _BAD_FIELD.search(text)
    return found[1] if found else None


def parse_processes(text: str) -> list[GpuProcess]:
    """Processes of `nvidia-smi --query-compute-apps=… --format=csv`."""
    return [
        GpuProcess(
            gpu_uuid=row.get("gpu_uuid", ""),
            pid=pid,
            name=row.get("process_name", ""),
            memory_mib=integer(row.get("used_gpu_memory", row.get("used_memory"))),
        )
        for row in _table(text)
        if (pid := integer(row.get("pid"))) is not None
    ]


def parse_transfer_rates(text: str) -> dict[int, float]:
    """The busier direction of each GPU's PCIe link in bytes per second, from `nvidia-smi dmon -s t -c 1` (MB/s)."""
    columns: list[str] = []
    rates: dict[int, float] = {}
    for line in lines(text):
        words = line.split()
        if line.startswith("#"):
            columns = columns or words[1:]
        elif "gpu" in columns and len(words) == len(columns):
            row = dict(zip(columns, words, strict=True))
            index, both = integer(row["gpu"]), [number(row.get(name)) for name in ("rxpci", "txpci")]
            known = [rate for rate in both if rate is not None]
            if index is not None and known:
                rates[index] = max(known) * 1e6
    return rates


def _matrix(text: str) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Column names of a topology matrix and its rows (device, cells). The legend ends it.

    A row that was cut off before its diagonal has fewer cells; the caller pairs what is there.
    """
    columns: list[str] = []
    rows: list[tuple[str, list[str]]] = []
    for line in lines(text):
        words = line.split()
        if not columns:
            for word in words:
                if not _DEVICE.fullmatch(word):
                    break
                columns.append(word)
            if len(words) > len(columns) and columns and words[len(columns)] not in {"CPU", "NUMA", "GPU"}:
                columns = []
        elif words and words[0] in columns:
            rows.append((words[0], words[1:]))
        elif rows:
            break
    return columns, rows


def parse_topology(text: str) -> Topology:
    """The matrix of `nvidia-smi topo -m`, with or without NICs, affinities and GPU NUMA ids."""
    columns, rows = _matrix(text)
    links: dict[str, dict[str, str]] = {}
    cpus: dict[str, list[int]] = {}
    nodes: dict[str, list[int]] = {}
    for device, cells in rows:
        links[device] = dict(zip(columns, cells, strict=False))
        affinity = cells[len(columns) :]
        if affinity and (numbers := parse_cpu_list(affinity[0])):
            cpus[device] = numbers
        if len(affinity) > 1 and (numbers := parse_cpu_list(affinity[1])):
            nodes[device] = numbers
    nics = {
        found[1]: found[2] for line in lines(text) if (found := re.fullmatch(r"\s*(NIC\d{1,4}):\s+(\S{1,64})", line))
    }
    return Topology(devices=columns, links=links, cpus=cpus, numa_nodes=nodes, nics=nics)


def parse_peer_access(text: str) -> dict[str, dict[str, str]]:
    """The matrix of `nvidia-smi topo -p2p r` or `w`: verdict by row and column, without the diagonal."""
    columns, rows = _matrix(text)
    return {
        device: {column: cell for column, cell in zip(columns, cells, strict=False) if column != device}
        for device, cells in rows
    }
