"""Look at this host and fill a `HostReport`.

Every command and every group of files has its own time limit and all run at the same time, so the whole takes about
one limit at worst. What cannot be seen (no root, no tool, no answer) becomes an entry of `unseen`, never an error.
"""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploy.host.machine import Machine, Ran
from deploy.host.parsers import docker as docker_parser
from deploy.host.parsers import nvidia_smi, ports, proc
from deploy.host.parsers.cpu_list import parse_cpu_list
from deploy.host.parsers.disks import parse_dd, parse_df, parse_lsblk
from deploy.host.parsers.kernel_log import parse_kernel_log
from deploy.host.parsers.lspci import parse_lspci
from deploy.host.parsers.sysfs_pci import merge_pci, parse_pci_device
from deploy.host.parsers.text import integer
from deploy.host.report import (
    Cpu,
    DiskRead,
    Docker,
    Filesystem,
    Firewall,
    Gpu,
    GpuProcess,
    HostReport,
    KernelLog,
    Limits,
    Listener,
    LostGpu,
    Memory,
    NumaNode,
    PciDevice,
    PeerAccess,
    System,
    Topology,
    Unseen,
)

LIMIT_SECONDS = 1.5
"""Of each command, so that the whole stays below 3 s. A driver without persistence mode needs longer: `--limit`."""
_READ_LIMIT = 8 * 1024 * 1024
_PIECE = 64 * 1024
_ENVIRONMENT_PREFIXES = ("NCCL_", "UCX_", "CUDA_", "NVIDIA_VISIBLE", "PYTORCH_ALLOC", "PYTORCH_CUDA_ALLOC")
_LINK_FILES = ("current_link_speed", "max_link_speed", "current_link_width", "max_link_width")
_SAMPLE_BLOCKS = 16
_CDI_DIRS = ["/etc/cdi", "/var/run/cdi"]


class LocalMachine:
    """The host this program runs on.

    Args:
        limit: seconds a command may take.
    """

    def __init__(self, limit: float = LIMIT_SECONDS) -> None:
        self.limit = limit
        # Tools for administrators are not on every user's path.
        self._environment = os.environ | {
            "LC_ALL": "C",
            "PATH": f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin",
        }

    def run(self, *command: str) -> Ran:
        """See `Machine.run`. A command stuck in the kernel cannot be killed: it is left behind, not waited for."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
            )
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            return Ran("missing")
        except OSError as error:
            # No memory or no more open files, say: that does not mean that there is no such program.
            return Ran("failed", "", error.strerror or str(error))
        try:
            out, err = process.communicate(timeout=self.limit)
        except subprocess.TimeoutExpired:
            process.kill()
            try:
                out, err = process.communicate(timeout=0.1)
            except subprocess.TimeoutExpired as stuck:
                out, err = stuck.stdout or b"", b""
            return Ran("slow", _decode(out), _decode(err))
        except BaseException:
            process.kill()
            raise
        return Ran("ok" if process.returncode == 0 else "failed", _decode(out), _decode(err))

    def read(self, path: str) -> str | None:
        """See `Machine.read`."""
        try:
            # In pieces: the kernel refuses reads of 4 MiB and more of a file under /proc/sys.
            text = bytearray()
            with Path(path).open("rb", buffering=0) as file:
                while len(text) < _READ_LIMIT and (piece := file.read(_PIECE)):
                    text += piece
            return _decode(bytes(text))
        except OSError:
            return None

    def entries(self, path: str) -> list[str]:
        """See `Machine.entries`."""
        try:
            return sorted(entry.name for entry in Path(path).iterdir())
        except OSError:
            return []

    def target(self, path: str) -> str | None:
        """See `Machine.target`."""
        try:
            # A socket or pipe under /proc/<pid>/fd leads to a name that is no path.
            return str(Path(path).readlink() if "/fd/" in path else Path(path).resolve(strict=True))
        except OSError:
            return None


def _decode(data: bytes) -> str:
    return data.decode(errors="replace")


class _Notes:
    """Collects what could not be seen."""

    def __init__(self) -> None:
        self.unseen: list[Unseen] = []

    def add(self, what: str, why: str, how: str = "") -> None:
        self.unseen.append(Unseen(what=what, why=why, how=how))

    def ran(self, what: str, command: str, ran: Ran, how: str = "") -> None:
        """Note a command that did not succeed."""
        said = next((line.strip() for line in ran.text.splitlines() if line.strip()), "")[:200]
        why = {
            "missing": f"{command} is not installed",
            "slow": f"{command} did not answer in time",
            "failed": f"{command} failed: {said}",
        }.get(ran.end)
        if why:
            self.add(what, why, how)


def probe(machine: Machine, limit: float = LIMIT_SECONDS, model_folder: str | None = None) -> HostReport:
    """Look at a host.

    Args:
        machine: the host.
        limit: seconds for each group of facts.
        model_folder: where the model lies; the read speed is sampled there.
    """
    started = time.monotonic()
    notes = _Notes()
    parts: dict[str, Callable[[], Any]] = {
        "GPUs": lambda: _gpus(machine, notes),
        "GPU processes": lambda: _gpu_processes(machine),
        "GPU topology": lambda: _topology(machine),
        "peer access": lambda: _peer_access(machine),
        "PCI devices": lambda: _pci(machine, notes),
        "NUMA nodes": lambda: _numa(machine, notes),
        "processors": lambda: _cpu(machine),
        "memory": lambda: _memory(machine),
        "limits": lambda: limits(machine),
        "filesystems": lambda: _filesystems(machine, notes),
        "model": lambda: None if model_folder is None else len(_shards(machine, model_folder)),
        "disk read": lambda: _disk_read(machine, model_folder, notes),
        "Docker": lambda: docker(machine),
        "ports": lambda: listeners(machine),
        "firewall": lambda: _firewall(machine),
        "kernel log": lambda: _kernel_log(machine, notes),
        "system": lambda: _system(machine, notes),
    }
    seen = _all_within(parts, limit + 0.3, notes)
    gpus_seen: tuple[list[Gpu], list[LostGpu]] | None = seen["GPUs"]
    gpus, lost = gpus_seen or ([], [])
    pci: list[PciDevice] | None = seen["PCI devices"]
    topology: Topology | None = seen["GPU topology"]
    filesystems: list[Filesystem] | None = seen["filesystems"]
    return HostReport(
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - started, 3),
        system=seen["system"] or System(hostname="", kernel="", root=False),
        gpus=[_with_numa_node(gpu, pci, topology) for gpu in gpus],
        lost_gpus=lost,
        gpu_processes=seen["GPU processes"],
        topology=topology,
        peer_access=seen["peer access"],
        pci=pci,
        numa=seen["NUMA nodes"],
        cpu=seen["processors"] or Cpu(),
        memory=seen["memory"] or Memory(),
        limits=seen["limits"] or Limits(),
        shm_bytes=next((entry.size for entry in filesystems or [] if entry.mount == "/dev/shm"), None),
        filesystems=filesystems,
        disk_reads=seen["disk read"] or [],
        model_shards=seen["model"],
        docker=seen["Docker"],
        listeners=seen["ports"],
        firewall=seen["firewall"] or Firewall(),
        kernel_log=seen["kernel log"],
        unseen=sorted(notes.unseen, key=lambda note: note.what),
    )


def _all_within(parts: dict[str, Callable[[], Any]], limit: float, notes: _Notes) -> dict[str, Any]:
    """Results of all parts, run at the same time; None for those not ready in time.

    Threads are daemons: one that hangs in the kernel is left behind.
    """
    results: dict[str, Any] = dict.fromkeys(parts)
    threads: dict[str, threading.Thread] = {}
    for name, part in parts.items():

        def work(name: str = name, part: Callable[[], Any] = part) -> None:
            results[name] = part()

        threads[name] = threading.Thread(target=work, daemon=True)
        threads[name].start()
    deadline = time.monotonic() + limit
    for name, thread in threads.items():
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            notes.add(name, f"no answer within {limit:.1f} s", "deploy doctor --limit 30")
    return dict(results)


def _with_numa_node(gpu: Gpu, pci: list[PciDevice] | None, topology: Topology | None) -> Gpu:
    """The node from the PCI tree; if that does not say, the driver's NUMA affinity if it is one node."""
    device = next((device for device in pci or [] if device.address == gpu.pci_address), None)
    node = device.numa_node if device else None
    nodes = topology.numa_nodes.get(f"GPU{gpu.index}", []) if topology else []
    if node is None and len(nodes) == 1:
        node = nodes[0]
    return gpu.model_copy(update={"numa_node": node})


def _gpus(machine: Machine, notes: _Notes) -> tuple[list[Gpu], list[LostGpu]]:
    fields = list(nvidia_smi.QUERY_FIELDS)
    ran = machine.run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv")
    # An older driver lacks a field or two: ask for the others.
    while (unknown := nvidia_smi.invalid_field(ran.text)) in fields and len(fields) > len(nvidia_smi.QUERY_FIELDS) - 4:
        fields.remove(unknown)
        ran = machine.run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv")
    how = {"slow": "deploy doctor --limit 30", "failed": "nvidia-smi"}.get(ran.end, "")
    notes.ran("GPUs", "nvidia-smi", ran, how)
    return nvidia_smi.parse_query(ran.text)


def _gpu_processes(machine: Machine) -> list[GpuProcess] | None:
    ran = machine.run("nvidia-smi", f"--query-compute-apps={','.join(nvidia_smi.PROCESS_FIELDS)}", "--format=csv")
    return nvidia_smi.parse_processes(ran.out) if ran.end == "ok" else None


def _topology(machine: Machine) -> Topology | None:
    ran = machine.run("nvidia-smi", "topo", "-m")
    return nvidia_smi.parse_topology(ran.out) if ran.end == "ok" else None


def _peer_access(machine: Machine) -> PeerAccess | None:
    read = machine.run("nvidia-smi", "topo", "-p2p", "r")
    write = machine.run("nvidia-smi", "topo", "-p2p", "w") if read.end == "ok" else read
    if read.end != "ok":
        return None
    return PeerAccess(read=nvidia_smi.parse_peer_access(read.out), write=nvidia_smi.parse_peer_access(write.out))


def _pci(machine: Machine, notes: _Notes) -> list[PciDevice] | None:
    listed = machine.run("lspci", "-D", "-vvv")
    from_lspci = parse_lspci(listed.out)
    from_sysfs: list[PciDevice] = []
    for address in machine.entries("/sys/bus/pci/devices"):
        folder = machine.target(f"/sys/bus/pci/devices/{address}")
        if folder and (device := parse_pci_device(folder, _pci_attributes(machine, folder))):
            from_sysfs.append(device)
    if listed.end != "ok":
        notes.ran("ACS of PCIe bridges", "lspci", listed, "sudo apt-get install pciutils")
    elif "access denied" in listed.out:
        notes.add("ACS of PCIe bridges", "only root sees PCIe capabilities", "sudo deploy doctor")
    if not from_sysfs and not from_lspci:
        notes.add("PCI devices", "/sys/bus/pci is empty or hidden, and lspci lists nothing")
        return None
    return merge_pci(from_sysfs, from_lspci)


def _pci_attributes(machine: Machine, folder: str) -> dict[str, str]:
    attributes: dict[str, str] = {}
    names = ["class", "vendor", "numa_node"]
    for name in names:
        if (text := machine.read(f"{folder}/{name}")) is not None:
            attributes[name] = text
    # Only displays, bridges, NVMe and network cards: a server has hundreds of functions.
    if attributes.get("class", "")[:4] in {"0x03", "0x06", "0x01", "0x02"}:
        for name in _LINK_FILES:
            if (text := machine.read(f"{folder}/{name}")) is not None:
                attributes[name] = text
    group = machine.target(f"{folder}/iommu_group")
    if group:
        attributes["iommu_group"] = group.rsplit("/", 1)[-1]
        attributes["iommu_domain"] = machine.read(f"{group}/type") or ""
    return attributes


def _numa(machine: Machine, notes: _Notes) -> list[NumaNode] | None:
    root = "/sys/devices/system/node"
    nodes: list[NumaNode] = []
    for name in machine.entries(root):
        if name.startswith("node") and (node := integer(name[4:])) is not None:
            files = {file: machine.read(f"{root}/{name}/{file}") or "" for file in ("cpulist", "meminfo", "distance")}
            nodes.append(proc.parse_numa_node(node, files))
    if not nodes:
        notes.add("NUMA nodes", f"{root} is empty or hidden")
        return None
    return sorted(nodes, key=lambda node: node.node)


def _cpu(machine: Machine) -> Cpu:
    root = "/sys/devices/system/cpu"
    model, vendor, sockets, cores = proc.parse_cpuinfo(machine.read("/proc/cpuinfo") or "")
    online = parse_cpu_list(machine.read(f"{root}/online"))
    siblings = {
        tuple(parse_cpu_list(machine.read(f"{root}/cpu{number}/topology/thread_siblings_list"))) for number in online
    }
    governors = {machine.read(f"{root}/cpu{number}/cpufreq/scaling_governor") for number in online}
    return Cpu(
        model=model,
        vendor=vendor,
        sockets=sockets,
        cores=cores,
        present=parse_cpu_list(machine.read(f"{root}/present")),
        online=online,
        thread_siblings=sorted(list(group) for group in siblings if group),
        governors=sorted(governor.strip() for governor in governors if governor),
    )


def _memory(machine: Machine) -> Memory:
    info = proc.parse_meminfo(machine.read("/proc/meminfo") or "")
    balancing = machine.read("/proc/sys/kernel/numa_balancing")
    return Memory(
        total=info.get("MemTotal"),
        available=info.get("MemAvailable"),
        swap_total=info.get("SwapTotal"),
        hugepages_total=info.get("HugePages_Total"),
        hugepages_free=info.get("HugePages_Free"),
        hugepage_bytes=info.get("Hugepagesize"),
        transparent_hugepages=proc.selected(machine.read("/sys/kernel/mm/transparent_hugepage/enabled")),
        numa_balancing=None if balancing is None else balancing.strip() not in {"", "0"},
    )


def limits(machine: Machine) -> Limits:
    """Resource limits of this shell and of the Docker daemon."""
    own = proc.parse_limits(machine.read("/proc/self/limits") or "")
    daemon = (machine.read("/var/run/docker.pid") or "").strip()
    theirs = proc.parse_limits(machine.read(f"/proc/{daemon}/limits") or "") if daemon.isdigit() else {}
    status = machine.read(f"/proc/{daemon}/status") if daemon.isdigit() else None
    return Limits(
        memlock=own.get("Max locked memory"),
        nofile=own.get("Max open files"),
        daemon_memlock=theirs.get("Max locked memory"),
        daemon_nofile=theirs.get("Max open files"),
        daemon_may_raise=proc.has_capability(status, proc.CAP_SYS_RESOURCE) if status else None,
    )


def _filesystems(machine: Machine, notes: _Notes) -> list[Filesystem] | None:
    disks = parse_lsblk(machine.run("lsblk", "--json", "--output", "PATH,NAME,ROTA,TRAN").out)
    # --local: a dead network filesystem would block df.
    ran = machine.run("df", "--local", "--block-size=1", "--output=source,fstype,size,avail,target")
    found = parse_df(ran.out, disks)
    if not found:
        notes.ran("filesystems", "df", ran)
        return None
    return found


def free_bytes(machine: Machine, path: str) -> int | None:
    """Bytes an ordinary user may still write at a path (its nearest folder that exists), None if df cannot say."""
    folder = Path(path).absolute()
    while machine.target(str(folder)) is None and folder != folder.parent:
        folder = folder.parent
    found = parse_df(
        machine.run("df", "--block-size=1", "--output=source,fstype,size,avail,target", str(folder)).out, {}
    )
    return found[0].free if found else None


def _shards(machine: Machine, model_folder: str) -> list[str]:
    return [name for name in machine.entries(model_folder) if name.endswith(".safetensors")]


def _disk_read(machine: Machine, model_folder: str | None, notes: _Notes) -> list[DiskRead]:
    if model_folder is None:
        return []
    names = _shards(machine, model_folder)
    if not names:
        return []
    path = f"{model_folder.rstrip('/')}/{names[0]}"
    ran = machine.run("dd", f"if={path}", "of=/dev/null", "bs=16M", f"count={_SAMPLE_BLOCKS}", "iflag=direct")
    result = parse_dd(ran.text)
    if result is None or not result[0] or not result[1]:
        notes.ran("disk read", "dd", ran)
        return []
    return [DiskRead(path=path, bytes_read=result[0], bytes_per_second=result[0] / result[1])]


def docker(machine: Machine) -> Docker | None:
    """The Docker Engine, None if there is no client. Never waits longer than the machine's limit."""
    ran = machine.run("docker", "info", "--format", "{{json .}}")
    if ran.end == "missing":
        return None
    found = docker_parser.parse_docker_info(ran.out, machine.read("/etc/docker/daemon.json") or "")
    if ran.end == "slow":
        return found.model_copy(update={"error": "the Docker daemon did not answer in time"})
    said = [line.strip() for line in ran.err.splitlines() if line.strip() and not line.startswith("WARNING")]
    if found.server is None and said:
        # The reason stands in the JSON or beside it, which depends on the client's version.
        found = found.model_copy(update={"error": said[0][:300]})
    devices = cdi_devices(machine, found.cdi_spec_dirs or _CDI_DIRS) | set(found.cdi_devices)
    return found.model_copy(update={"cdi_devices": sorted(devices)})


def cdi_devices(machine: Machine, folders: Iterable[str]) -> set[str]:
    """Names of all devices in the CDI specifications of these folders."""
    return {
        device
        for folder in folders
        for name in machine.entries(folder)
        if name.endswith((".yaml", ".yml", ".json"))
        for device in docker_parser.parse_cdi_spec(machine.read(f"{folder}/{name}") or "")
    }


def listeners(machine: Machine) -> list[Listener] | None:
    """TCP ports in use with the process that holds each (without root only one's own processes are named)."""
    sockets: list[tuple[str, int, int]] = []
    tables = [machine.read("/proc/net/tcp"), machine.read("/proc/net/tcp6")]
    if tables == [None, None]:
        return None
    for table in tables:
        sockets += ports.parse_listening_sockets(table or "")
    wanted = {f"socket:[{inode}]": inode for _, _, inode in sockets}
    holder: dict[int, int] = {}
    for name in machine.entries("/proc"):
        if name.isdigit():
            for descriptor in machine.entries(f"/proc/{name}/fd"):
                inode = wanted.get(machine.target(f"/proc/{name}/fd/{descriptor}") or "")
                if inode is not None:
                    holder.setdefault(inode, int(name))
    return [
        Listener(
            address=address,
            port=port,
            pid=(pid := holder.get(inode)),
            process=(machine.read(f"/proc/{pid}/comm") or "").strip() or None if pid else None,
        )
        for address, port, inode in sockets
    ]


def _firewall(machine: Machine) -> Firewall:
    ufw = machine.read("/etc/ufw/ufw.conf")
    return Firewall(
        ufw=None if ufw is None else proc.parse_pairs(ufw, "=").get("ENABLED", "").lower() == "yes",
        firewalld=bool(machine.read("/run/firewalld.pid")),
    )


def _kernel_log(machine: Machine, notes: _Notes) -> KernelLog | None:
    ran = machine.run("dmesg")
    if ran.end != "ok":
        journal = machine.run("journalctl", "--dmesg", "--boot", "--quiet", "--no-pager")
        ran = journal if journal.end == "ok" and journal.out.strip() else ran
    if ran.end != "ok":
        notes.ran("kernel log", "dmesg", ran, "sudo deploy doctor")
        return None
    return parse_kernel_log(ran.out)


def _system(machine: Machine, notes: _Notes) -> System:
    release = proc.parse_pairs(machine.read("/etc/os-release") or "", "=")
    module, is_open = proc.parse_driver_version(machine.read("/proc/driver/nvidia/version") or "")
    toolkit = machine.run("nvidia-ctk", "--version")
    clock = machine.run("timedatectl", "show", "--property=NTPSynchronized", "--value")
    if clock.end != "ok":
        notes.ran("time synchronisation", "timedatectl", clock)
    char_devices = machine.entries("/dev/char")
    environment = proc.parse_pairs((machine.read("/proc/self/environ") or "").replace("\0", "\n"), "=")
    return System(
        hostname=(machine.read("/proc/sys/kernel/hostname") or "").strip(),
        kernel=(machine.read("/proc/sys/kernel/osrelease") or "").strip(),
        os=release.get("PRETTY_NAME"),
        root=proc.parse_pairs(machine.read("/proc/self/status") or "").get("Uid", "").split()[1:2] == ["0"],
        container=_container(machine),
        command_line=(machine.read("/proc/cmdline") or "").strip() or None,
        driver_module=module,
        driver_module_open=is_open,
        container_toolkit=toolkit.out.split("version")[-1].split()[0] if "version " in toolkit.out else None,
        dev_char_links="195:0" in char_devices if char_devices else None,
        time_synchronised={"yes": True, "no": False}.get(clock.out.strip()),
        environment={
            name: value for name, value in sorted(environment.items()) if name.startswith(_ENVIRONMENT_PREFIXES)
        },
    )


def _container(machine: Machine) -> str:
    if machine.target("/.dockerenv"):
        return "docker"
    return "podman" if machine.target("/run/.containerenv") else ""
