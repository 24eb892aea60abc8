"""Look-alike hosts: machines that do not exist, answering as real ones do.

A layout (which GPU sits under which root port, on which NUMA node) becomes the text of every tool and file the probe
asks for. Matrices whose real shapes differ are written by hand under `data/hosts/`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from deploy.host.machine import Ran
from deploy.host.parsers.cpu_list import format_cpu_list, parse_cpu_list

DATA = Path(__file__).parent / "data" / "hosts"
GIB = 1024**3
DRIVER = "580.95.05"


@dataclass(frozen=True)
class RecordedHost:
    """A `Machine` made of text. A command is found by the longest recorded beginning of its words."""

    commands: Mapping[str, Ran] = field(default_factory=dict[str, Ran])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    links: Mapping[str, str] = field(default_factory=dict[str, str])

    def run(self, *command: str) -> Ran:
        line = " ".join(command)
        known = [start for start in self.commands if line.startswith(start)]
        return self.commands[max(known, key=len)] if known else Ran("missing")

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def entries(self, path: str) -> list[str]:
        start = path.rstrip("/") + "/"
        below = [name for name in (*self.files, *self.links) if name.startswith(start)]
        return sorted({name[len(start) :].split("/")[0] for name in below})

    def target(self, path: str) -> str | None:
        return self.links.get(path, path if path in self.files or self.entries(path) else None)

    def answering(self, command: str, out: str = "", end: str = "ok", err: str = "") -> "RecordedHost":
        """The same host with another answer to one command."""
        assert end in {"ok", "failed", "missing", "slow"}
        return replace(self, commands={**self.commands, command: Ran(end, out, err)})  # type: ignore[arg-type]

    def with_file(self, path: str, text: str) -> "RecordedHost":
        return replace(self, files={**self.files, path: text})

    def edited(self, where: str, old: str, new: str) -> "RecordedHost":
        """The same host with a piece of a command's output or of a file replaced, which must be there."""
        if where in self.commands:
            out = self.commands[where].out
            assert old in out, f"{old!r} is not in the output of {where}"
            return self.answering(where, out.replace(old, new))
        assert old in self.files[where], f"{old!r} is not in {where}"
        return self.with_file(where, self.files[where].replace(old, new))

    def without(self, start: str) -> "RecordedHost":
        """The same host lacking the commands, files and links whose name starts so."""
        return RecordedHost(
            commands={name: ran for name, ran in self.commands.items() if not name.startswith(start)},
            files={name: text for name, text in self.files.items() if not name.startswith(start)},
            links={name: to for name, to in self.links.items() if not name.startswith(start)},
        )


@dataclass(frozen=True)
class Slot:
    """Where a GPU sits: the bus number of its host bridge, its NUMA node (-1: the firmware does not say)."""

    root: int
    node: int
    switched: bool = True


@dataclass(frozen=True)
class Layout:
    """A host. `nodes` maps a NUMA node to its CPU list and its memory in bytes."""

    name: str
    slots: tuple[Slot, ...]
    nodes: Mapping[int, tuple[str, int]]
    sockets: int = 2
    gpu: str = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    offline: frozenset[int] = frozenset()


TWO_NODES = {0: ("0-47,96-143", 768 * GIB), 1: ("48-95,144-191", 768 * GIB)}
_FOUR_SWITCHES = tuple(Slot(root, node) for root, node in ((0x20, 0), (0x40, 0), (0xA0, 1), (0xC0, 1)) for _ in "ab")

EIGHT_GPUS = Layout("eight-gpus-two-nodes", _FOUR_SWITCHES, TWO_NODES)
SINGLE_SOCKET = Layout(
    "eight-gpus-one-node",
    tuple(Slot(root, 0) for root in (0x20, 0x40, 0x60, 0x80) for _ in "ab"),
    {0: ("0-127", 1024 * GIB)},
    sockets=1,
)
NPS4 = Layout(
    "nps4",
    tuple(Slot(0x20 * node + 0x10, node) for node in range(8)),
    {node: (f"{12 * node}-{12 * node + 11},{96 + 12 * node}-{107 + 12 * node}", 192 * GIB) for node in range(8)},
)
FIVE_AND_THREE = Layout(
    "five-and-three",
    tuple(Slot(root, node) for root, node in ((0x20, 0), (0x20, 0), (0x40, 0), (0x40, 0), (0x60, 0)))
    + tuple(Slot(root, 1) for root in (0xA0, 0xA0, 0xC0)),
    TWO_NODES,
)
WITH_NICS = Layout("network-cards", _FOUR_SWITCHES, TWO_NODES)
MISSING_CPU = Layout(
    "missing-cpu", _FOUR_SWITCHES, {0: ("0-22,24-47,96-143", 768 * GIB), 1: TWO_NODES[1]}, offline=frozenset({23})
)
TWO_GPUS = Layout(
    "two-gpus",
    (Slot(0x00, 0, switched=False), Slot(0x40, 0, switched=False)),
    {0: ("0-31", 128 * GIB)},
    sockets=1,
    gpu="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
)
FOUR_GPUS = Layout(
    "four-gpus",
    tuple(Slot(root, 0, switched=False) for root in (0x00, 0x20, 0x40, 0xE0)),
    {0: ("0-63", 512 * GIB)},
    sockets=1,
    gpu="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
)
LAYOUTS = (EIGHT_GPUS, SINGLE_SOCKET, NPS4, FIVE_AND_THREE, WITH_NICS, MISSING_CPU, TWO_GPUS, FOUR_GPUS)


def data(name: str, file: str) -> str:
    """A hand-written text of a look-alike host."""
    return (DATA / name / file).read_text()


def gpu_addresses(layout: Layout) -> list[str]:
    """PCI address of each GPU in the order of the driver's indices."""
    seen: dict[int, int] = {}
    addresses: list[str] = []
    for slot in layout.slots:
        position = seen[slot.root] = seen.get(slot.root, -1) + 1
        addresses.append(f"0000:{slot.root + (3 + position if slot.switched else 1):02x}:00.0")
    return addresses


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-4000-8000-{index:012x}"


def _query(layout: Layout) -> str:
    header = (
        "index, name, uuid, serial, pci.bus_id, driver_version, compute_cap, memory.total [MiB], memory.used [MiB], "
        "persistence_mode, mig.mode.current, ecc.mode.current, ecc.errors.uncorrected.volatile.total, power.limit [W], "
        "power.default_limit [W], power.draw [W], temperature.gpu, utilization.gpu [%], utilization.memory [%], "
        "clocks.current.sm [MHz], clocks.max.sm [MHz], pstate, clocks_event_reasons.active, pcie.link.gen.current, "
        "pcie.link.gen.max, pcie.link.gen.gpumax, pcie.link.width.current, pcie.link.width.max"
    )
    rows = [
        f"{index}, {layout.gpu}, {uuid(index)}, 13200240000{index:02d}, 0000{address.upper()}, {DRIVER}, 12.0, "
        f"97887 MiB, 2 MiB, Enabled, Disabled, Enabled, 0, 600.00 W, 600.00 W, {31 + index}.40 W, {30 + index}, 0 %, "
        "0 %, 180 MHz, 2430 MHz, P8, 0x0000000000000001, 1, 5, 5, 16, 16"
        for index, address in enumerate(gpu_addresses(layout))
    ]
    return "\n".join([header, *rows]) + "\n"


def _peer_matrix(count: int) -> str:
    names = [f"GPU{index}" for index in range(count)]
    lines = ["\t".join(["", *names])]
    lines += ["\t".join([f" {row}", *("X" if row == column else "OK" for column in names)]) for row in names]
    legend = "\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n  U    = Unknown\n"
    return "\n".join(lines) + "\n" + legend


@dataclass(frozen=True)
class _Function:
    """One PCI function of the tree that is rendered both as lspci text and as /sys files."""

    address: str
    path: str
    node: int
    secondary: int | None = None
    acs: bool = True


def _tree(layout: Layout) -> list[_Function]:
    functions: list[_Function] = []
    for root in dict.fromkeys(slot.root for slot in layout.slots):
        slots = [slot for slot in layout.slots if slot.root == root]
        node, switched = slots[0].node, slots[0].switched
        top = f"/sys/devices/pci0000:{root:02x}"
        port = f"0000:{root:02x}:01.1"
        functions.append(_Function(port, f"{top}/{port}", node, root + 1))
        if not switched:
            gpu = f"0000:{root + 1:02x}:00.0"
            functions.append(_Function(gpu, f"{top}/{port}/{gpu}", node))
            continue
        upstream = f"0000:{root + 1:02x}:00.0"
        functions.append(_Function(upstream, f"{top}/{port}/{upstream}", node, root + 2, acs=False))
        for position in range(len(slots)):
            downstream = f"0000:{root + 2:02x}:{position:02x}.0"
            gpu = f"0000:{root + 3 + position:02x}:00.0"
            above = f"{top}/{port}/{upstream}/{downstream}"
            functions.append(_Function(downstream, above, node, root + 3 + position))
            functions.append(_Function(gpu, f"{above}/{gpu}", node))
    return functions


def _lspci(functions: list[_Function]) -> str:
    text = ""
    for group, function in enumerate(functions):
        bridge = function.secondary is not None
        what = (
            "PCI bridge: Advanced Micro Devices, Inc. [AMD] Device 14ab (rev 01) (prog-if 00 [Normal decode])"
            if bridge
            else "VGA compatible controller: NVIDIA Corporation Device 2bb5 (rev a1) (prog-if 00 [VGA controller])"
        )
        text += f"{function.address} {what}\n\tControl: I/O+ Mem+ BusMaster+ SpecCycle- MemWINV- ParErr- SERR+\n"
        text += f"\tNUMA node: {function.node}\n" if function.node >= 0 else ""
        text += f"\tIOMMU group: {group}\n"
        if bridge:
            bus = function.address.split(":")[1]
            text += f"\tBus: primary={bus}, secondary={function.secondary:02x}, subordinate=ff, sec-latency=0\n"
        text += "\tCapabilities: [60] Express (v2) Endpoint, MSI 00\n"
        text += "\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1, Exit Latency L1 <4us\n"
        text += "\t\tLnkSta:\tSpeed 32GT/s, Width x16\n"
        if bridge and function.acs:
            text += "\tCapabilities: [2a0 v1] Access Control Services\n"
            text += "\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+\n"
            text += "\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-\n"
        text += f"\tKernel driver in use: {'pcieport' if bridge else 'nvidia'}\n\n"
    return text


def _sysfs(functions: list[_Function]) -> tuple[dict[str, str], dict[str, str]]:
    files: dict[str, str] = {}
    links: dict[str, str] = {}
    for group, function in enumerate(functions):
        links[f"/sys/bus/pci/devices/{function.address}"] = function.path
        links[f"{function.path}/iommu_group"] = f"/sys/kernel/iommu_groups/{group}"
        files |= {
            f"{function.path}/class": "0x060400\n" if function.secondary is not None else "0x030000\n",
            f"{function.path}/vendor": "0x1022\n" if function.secondary is not None else "0x10de\n",
            f"{function.path}/numa_node": f"{function.node}\n",
            f"{function.path}/current_link_speed": "32.0 GT/s PCIe\n",
            f"{function.path}/max_link_speed": "32.0 GT/s PCIe\n",
            f"{function.path}/current_link_width": "16\n",
            f"{function.path}/max_link_width": "16\n",
            f"/sys/kernel/iommu_groups/{group}/type": "identity\n",
        }
    return files, links


def _processors(layout: Layout) -> dict[str, str]:
    online = sorted(cpu for cpus, _ in layout.nodes.values() for cpu in parse_cpu_list(cpus))
    present = sorted({*online, *layout.offline})
    half = len(present) // 2
    root = "/sys/devices/system/cpu"
    files = {f"{root}/online": format_cpu_list(online) + "\n", f"{root}/present": format_cpu_list(present) + "\n"}
    cpuinfo = ""
    for cpu in online:
        siblings = [other for other in (cpu % half, cpu % half + half) if other in online]
        files[f"{root}/cpu{cpu}/topology/thread_siblings_list"] = format_cpu_list(siblings) + "\n"
        files[f"{root}/cpu{cpu}/cpufreq/scaling_governor"] = "performance\n"
        socket = cpu % half * layout.sockets // half
        cpuinfo += f"processor\t: {cpu}\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC 9475F 48-Core Processor\n"
        cpuinfo += f"physical id\t: {socket}\ncore id\t\t: {cpu % half}\n\n"
    files["/proc/cpuinfo"] = cpuinfo
    for node, (cpus, memory) in layout.nodes.items():
        folder = f"/sys/devices/system/node/node{node}"
        files[f"{folder}/cpulist"] = cpus + "\n"
        files[f"{folder}/meminfo"] = (
            f"Node {node} MemTotal:       {memory // 1024} kB\nNode {node} MemFree:        {memory // 2048} kB\n"
        )
        files[f"{folder}/distance"] = " ".join("10" if other == node else "32" for other in layout.nodes) + "\n"
    return files


def docker_info(**changes: object) -> str:
    """`docker info` of a healthy engine."""
    info: dict[str, object] = {
        "ServerVersion": "28.3.3",
        "Driver": "overlay2",
        "DockerRootDir": "/var/lib/docker",
        "CgroupDriver": "systemd",
        "CgroupVersion": "2",
        "LiveRestoreEnabled": True,
        "Runtimes": {"io.containerd.runc.v2": {}, "nvidia": {}, "runc": {}},
        "CDISpecDirs": ["/etc/cdi", "/var/run/cdi"],
        "ClientInfo": {
            "Version": "28.3.3",
            "Plugins": [{"Name": "buildx", "Version": "v0.26.1"}, {"Name": "compose", "Version": "v2.39.1"}],
        },
    }
    return json.dumps(info | changes) + "\n"


def _cdi_spec(layout: Layout) -> str:
    names = [str(index) for index in range(len(layout.slots))] + [uuid(index) for index in range(len(layout.slots))]
    spec = "---\ncdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n"
    for name in [*names, "all"]:
        spec += f'- name: "{name}"\n  containerEdits:\n    deviceNodes:\n    - path: /dev/nvidia0\n'
    return spec + "containerEdits:\n  env:\n  - NVIDIA_VISIBLE_DEVICES=void\n"


_LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max open files            1048576              1048576              files
Max locked memory         unlimited            unlimited            bytes
"""
MODEL = "/models/DeepSeek-V4-Flash"
_FILES = {
    "/proc/sys/kernel/hostname": "inference-17\n",
    "/proc/sys/kernel/osrelease": "6.8.0-87-generic\n",
    "/proc/sys/kernel/numa_balancing": "0\n",
    "/etc/os-release": 'PRETTY_NAME="Ubuntu 24.04.3 LTS"\nID=ubuntu\n',
    "/proc/cmdline": "BOOT_IMAGE=/boot/vmlinuz-6.8.0-87-generic root=/dev/md0 ro iommu=pt\n",
    "/proc/self/status": "Name:\tdeploy\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\n",
    "/proc/self/limits": _LIMITS,
    "/proc/self/environ": "HOME=/root\0PATH=/usr/bin\0",
    "/var/run/docker.pid": "1402",
    "/proc/1402/limits": _LIMITS,
    "/proc/1402/status": "Name:\tdockerd\nCapEff:\t000001ffffffffff\n",
    "/proc/1402/comm": "dockerd\n",
    "/proc/net/tcp": "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout\n"
    "   0: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 5100 1 0 100 0\n",
    "/etc/ufw/ufw.conf": "# /etc/ufw/ufw.conf\nENABLED=no\nLOGLEVEL=low\n",
    "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}
_DF = """Filesystem     Type   1B-blocks          Avail Mounted on
/dev/md0       ext4   943000000000  612000000000 /
tmpfs          tmpfs  811000000000  811000000000 /dev/shm
/dev/nvme2n1   xfs   7680000000000 6900000000000 /models
"""
_LSBLK = json.dumps(
    {
        "blockdevices": [
            {"path": "/dev/nvme0n1", "rota": False, "tran": "nvme", "children": [{"path": "/dev/md0", "rota": False}]},
            {"path": "/dev/nvme1n1", "rota": False, "tran": "nvme", "children": [{"path": "/dev/md0", "rota": False}]},
            {"path": "/dev/nvme2n1", "rota": False, "tran": "nvme"},
        ]
    }
)


def host(layout: Layout) -> RecordedHost:
    """A healthy host of that layout, seen by root."""
    functions = _tree(layout)
    sys_files, links = _sysfs(functions)
    total = sum(memory for _, memory in layout.nodes.values())
    files = (
        _FILES
        | sys_files
        | _processors(layout)
        | {
            "/proc/meminfo": f"MemTotal:       {total // 1024} kB\nMemAvailable:   {total // 1100} kB\n"
            "SwapTotal:  0 kB\nHugePages_Total:       0\nHugePages_Free:        0\nHugepagesize:       2048 kB\n",
            "/etc/cdi/nvidia.yaml": _cdi_spec(layout),
            "/proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER}  "
            "Release Build  (root@host)\nGCC version:  gcc version 13.3.0\n",
        }
        | {f"/dev/char/195:{index}": "" for index in range(len(layout.slots))}
        | {f"{MODEL}/model-00001-of-00046.safetensors": ""}
    )
    commands = {
        "nvidia-smi --query-gpu": _query(layout),
        "nvidia-smi --query-compute-apps": "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n",
        "nvidia-smi topo -m": data(layout.name, "topo-m.txt"),
        "nvidia-smi topo -p2p": _peer_matrix(len(layout.slots)),
        "lspci -D -vvv": _lspci(functions),
        "lsblk": _LSBLK,
        "df": _DF,
        "dd": "268435456 bytes (268 MB, 256 MiB) copied, 0.0403 s, 6.7 GB/s\n",
        "docker info": docker_info(),
        "dmesg": "[    1.204311] iommu: Default domain type: Passthrough (set via kernel command line)\n"
        "[    9.771003] nvidia-nvlink: Nvlink Core is being initialized, major device number 511\n",
        "nvidia-ctk --version": "NVIDIA Container Toolkit CLI version 1.18.0\ncommit: 0000000\n",
        "timedatectl": "yes\n",
    }
    return RecordedHost({name: Ran("ok", out) for name, out in commands.items()}, files, links)


def mig_on() -> RecordedHost:
    """Eight GPUs, the third cut into MIG instances."""
    name = "nvidia-smi --query-gpu"
    machine = host(EIGHT_GPUS)
    lines = machine.commands[name].out.split("\n")
    lines[3] = lines[3].replace("Enabled, Disabled, Enabled", "Enabled, Enabled, Enabled")
    lines[3] = lines[3].replace(", 0 %, 0 %,", ", [N/A], [N/A],")
    return machine.answering(name, "\n".join(lines))


def gpu_lost() -> RecordedHost:
    """Eight GPUs, of which the sixth fell off the bus while running."""
    machine = host(EIGHT_GPUS)
    address = gpu_addresses(EIGHT_GPUS)[5]
    query = machine.commands["nvidia-smi --query-gpu"].out.split("\n")
    seven = "\n".join(line for line in query if not line.startswith("5,"))
    lost = f"Unable to determine the device handle for GPU5: {address.upper()}: Unknown Error\n"
    lspci = machine.commands["lspci -D -vvv"].out
    start = lspci.index(f"{address} VGA")
    broken = (
        f"{address} VGA compatible controller: NVIDIA Corporation Device 2bb5 (rev ff) (prog-if ff)\n"
        "\t!!! Unknown header type 7f\n\tKernel driver in use: nvidia\n"
    )
    lspci = lspci[:start] + broken + lspci[lspci.index("\n\n", start) + 1 :]
    xid = f"[88121.400] NVRM: Xid (PCI:{address[:-2]}): 79, pid='<unknown>', GPU has fallen off the bus.\n"
    return (
        machine.answering("nvidia-smi --query-gpu", seven, "failed", lost)
        .answering("lspci -D -vvv", lspci)
        .answering("dmesg", machine.commands["dmesg"].out + xid * 3)
        .with_file(f"{machine.links[f'/sys/bus/pci/devices/{address}']}/current_link_width", "63\n")
    )


def no_gpu() -> RecordedHost:
    """A small virtual machine with Docker."""
    layout = Layout("no-gpu", (), {0: ("0-1", 24 * GIB)}, sockets=1)
    cpus = _processors(layout)
    return RecordedHost(
        {
            "df": Ran("ok", "Filesystem Type 1B-blocks Avail Mounted on\n/dev/vda ext4 270000000000 72000000000 /\n"),
            "lsblk": Ran("ok", '{"blockdevices": [{"path": "/dev/vda", "rota": true, "tran": null}]}'),
            "docker info": Ran("ok", docker_info(CgroupDriver="cgroupfs", CgroupVersion="1", Runtimes={"runc": {}})),
            "dmesg": Ran("ok", "[    0.1] iommu: Default domain type: Translated\n"),
            "timedatectl": Ran("ok", "yes\n"),
        },
        _FILES | cpus | {"/proc/meminfo": "MemTotal: 25165824 kB\nMemAvailable: 20000000 kB\n"},
        {},
    )


def container_without_sys() -> RecordedHost:
    """Inside a container with GPUs: no /sys, no Docker, no kernel log, an empty CPU affinity."""
    machine = host(EIGHT_GPUS).without("/sys").without("docker").without("lspci").without("timedatectl").without("/var")
    return (
        machine.answering("dmesg", end="failed", err="dmesg: read kernel buffer failed: Operation not permitted")
        .answering("nvidia-smi topo -m", data("container", "topo-m.txt"))
        .with_file("/.dockerenv", "")
    )


def not_root() -> RecordedHost:
    """The healthy eight GPUs, seen by an ordinary user."""
    machine = host(EIGHT_GPUS)
    shown = "\n".join(
        line for line in machine.commands["lspci -D -vvv"].out.split("\n") if not line.startswith("\t\t")
    ).replace("Capabilities: [60] Express (v2) Endpoint, MSI 00", "Capabilities: <access denied>")
    return (
        machine.answering("lspci -D -vvv", shown)
        .answering("dmesg", end="failed", err="dmesg: read kernel buffer failed: Operation not permitted")
        .with_file("/proc/self/status", "Name:\tdeploy\nUid:\t1000\t1000\t1000\t1000\nCapEff:\t0000000000000000\n")
    )


SPECIAL = {
    "mig-on": mig_on,
    "gpu-lost": gpu_lost,
    "no-gpu": no_gpu,
    "container-without-sys": container_without_sys,
    "not-root": not_root,
}
