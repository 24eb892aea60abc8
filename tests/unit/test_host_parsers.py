"""Parsers of tools' text: real shapes, and never an exception or a hang on anything else."""

import inspect
import time
from collections.abc import Callable
from typing import Any

import lookalike
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deploy.host.parsers import (
    cpu_list,
    disks,
    docker,
    kernel_command_line,
    kernel_log,
    lspci,
    nvidia_smi,
    ports,
    proc,
    sysfs_pci,
    text,
)
from deploy.host.report import Limit

PARSERS: list[Callable[[str], Any]] = [
    cpu_list.parse_cpu_list,
    disks.parse_dd,
    disks.parse_lsblk,
    lambda value: disks.parse_df(value, {}),
    docker.parse_cdi_spec,
    docker.parse_docker_info,
    lambda value: docker.parse_docker_info("", value),
    docker.parse_version,
    kernel_command_line.parse_kernel_command_line,
    kernel_log.parse_kernel_log,
    lspci.parse_lspci,
    nvidia_smi.invalid_field,
    nvidia_smi.parse_peer_access,
    nvidia_smi.parse_processes,
    nvidia_smi.parse_query,
    nvidia_smi.parse_topology,
    nvidia_smi.parse_transfer_rates,
    nvidia_smi.throttle_reasons,
    ports.parse_listening_sockets,
    proc.parse_cpuinfo,
    proc.parse_driver_version,
    proc.parse_limits,
    proc.parse_meminfo,
    proc.parse_pairs,
    proc.selected,
    lambda value: proc.has_capability(value, 24),
    lambda value: proc.parse_numa_node(0, {"cpulist": value, "meminfo": value, "distance": value}),
    lambda value: sysfs_pci.parse_pci_device(value, {}),
    lambda value: sysfs_pci.parse_pci_device(
        "/sys/devices/pci0000:40/0000:40:01.1",
        dict.fromkeys(("class", "vendor", "numa_node", "current_link_speed", "current_link_width"), value),
    ),
    text.integer,
    text.number,
    text.pci_address,
]


def _real_texts() -> list[str]:
    machine = lookalike.host(lookalike.WITH_NICS)
    lost = lookalike.gpu_lost()
    answers = [*machine.commands.values(), *lost.commands.values()]
    return sorted({*(ran.text for ran in answers), *machine.files.values()} - {""})


REAL = _real_texts()


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """A real text cut off, with a piece replaced, or with lines shuffled."""
    whole = draw(st.sampled_from(REAL))
    start = draw(st.integers(0, len(whole)))
    piece = whole[:start] + draw(st.text(max_size=20)) + whole[start + draw(st.integers(0, 200)) :]
    return piece[: draw(st.integers(0, len(piece)))] if draw(st.booleans()) else piece


@settings(max_examples=300)
@given(st.text() | st.binary().map(lambda data: data.decode(errors="replace")) | damaged())
@example("0-99999999")
@example("9" * 5000)
@example("[" * 100_000)
@example('{"a":' * 50_000)
@example("kind: a\ndevices: &x\n- *x\n")
@example("\x1b[" * 20_000)
@example("Speed " * 50_000)
@example("0000:00:00.0 " + "a: " * 50_000)
@example('"' * 100_000)
@example("\u0663-\u0665,\u00b2")
@example("Max open files   " + "\u0663" * 3 + "   " + "\u00b2")
def test_no_parser_raises_or_hangs_on_any_text(value: str) -> None:
    for parse in PARSERS:
        parse(value)


@pytest.mark.parametrize("size", [200_000])
@pytest.mark.parametrize(
    "unit", [" ", "a", "0", "\t0", "- ", ": ", "GPU0 ", ",", "1,", '"', "\n", "0000:00:00.0 a: b\n\t"]
)
def test_parsers_stay_linear_on_long_texts(unit: str, size: int) -> None:
    value = unit * (size // len(unit))
    for parse in PARSERS:
        started = time.monotonic()
        parse(value)
        assert time.monotonic() - started < 5, inspect.getsource(parse)


def test_every_parser_module_is_fuzzed() -> None:
    modules = [cpu_list, disks, docker, kernel_command_line, kernel_log, lspci, nvidia_smi, ports, proc, sysfs_pci]
    called = "".join(inspect.getsource(parse) for parse in PARSERS)
    for module in modules:
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("parse_") and function.__module__ == module.__name__:
                assert name in called, f"{module.__name__}.{name}"


@given(st.sets(st.integers(0, cpu_list.HIGHEST), max_size=200))
def test_a_cpu_list_survives_formatting_and_parsing(numbers: set[int]) -> None:
    assert cpu_list.parse_cpu_list(cpu_list.format_cpu_list(list(numbers))) == sorted(numbers)


def test_topology_with_network_cards_and_escape_codes() -> None:
    topology = nvidia_smi.parse_topology(lookalike.data("network-cards", "topo-m.txt"))
    assert topology.devices == [*(f"GPU{index}" for index in range(8)), "NIC0", "NIC1"]
    assert topology.links["GPU0"]["GPU1"] == "PIX"
    assert topology.links["NIC1"]["GPU6"] == "PIX"
    assert topology.nics == {"NIC0": "mlx5_0", "NIC1": "mlx5_1"}
    assert topology.cpus["GPU7"] == [*range(48, 96), *range(144, 192)]
    assert topology.numa_nodes == {f"GPU{index}": [index // 4] for index in range(8)}


def test_topology_of_an_older_driver_and_of_a_container() -> None:
    old = nvidia_smi.parse_topology(lookalike.data("two-gpus", "topo-m.txt"))
    assert (old.links["GPU0"], old.cpus["GPU1"]) == ({"GPU0": "X", "GPU1": "PHB"}, list(range(32)))
    container = nvidia_smi.parse_topology(lookalike.data("container", "topo-m.txt"))
    assert container.links["GPU3"]["GPU2"] == "PIX"
    assert container.cpus == {} and container.numa_nodes == {}


def test_topology_with_network_cards_named_by_their_driver() -> None:
    matrix = "\tGPU0\tmlx5_0\tCPU Affinity\nGPU0\t X \tPHB\t0-7\nmlx5_0\tPHB\t X \t\n"
    topology = nvidia_smi.parse_topology(matrix)
    assert topology.devices == ["GPU0", "mlx5_0"]
    assert topology.links["mlx5_0"] == {"GPU0": "PHB", "mlx5_0": "X"}


@given(st.sampled_from(lookalike.LAYOUTS), st.data())
def test_a_cut_topology_never_names_a_wrong_link(layout: lookalike.Layout, choice: st.DataObject) -> None:
    whole = lookalike.data(layout.name, "topo-m.txt")
    rows_start = whole.index("\nGPU0") + 1
    line_ends = [index for index in range(rows_start, len(whole)) if whole[index] in "\t\n"]
    full = nvidia_smi.parse_topology(whole)
    cut = nvidia_smi.parse_topology(whole[: choice.draw(st.sampled_from(line_ends))])
    for device, links in cut.links.items():
        for other, link in links.items():
            assert full.links[device][other] == link


def test_peer_access_verdicts() -> None:
    matrix = " \tGPU0\tGPU1\t\n GPU0\tX\tCNS\t\n GPU1\tOK\tX\t\n\nLegend:\n\n  X    = Self\n"
    assert nvidia_smi.parse_peer_access(matrix) == {"GPU0": {"GPU1": "CNS"}, "GPU1": {"GPU0": "OK"}}


def test_query_names_lost_gpus_and_keeps_the_others() -> None:
    gpus, lost = nvidia_smi.parse_query(lookalike.gpu_lost().commands["nvidia-smi --query-gpu"].text)
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3, 4, 6, 7]
    assert [(gpu.pci_address, gpu.said) for gpu in lost] == [("0000:a4:00.0", "Unknown Error")]


def test_query_without_units_in_another_order_and_with_unknown_values() -> None:
    gpus, lost = nvidia_smi.parse_query(
        "pci.bus_id, index, power.limit, mig.mode.current, serial\n00000000:01:00.0, 0, [N/A], [N/A], 0\n"
    )
    assert lost == []
    assert (gpus[0].pci_address, gpus[0].power_limit_w, gpus[0].mig, gpus[0].serial) == (
        "0000:01:00.0",
        None,
        None,
        None,
    )


def test_a_row_of_unknown_errors_is_a_lost_gpu() -> None:
    gpus, lost = nvidia_smi.parse_query(
        "index, uuid, pci.bus_id, memory.total [MiB]\n3, [Unknown Error], 00000000:41:00.0, [GPU is lost]\n"
    )
    assert gpus == []
    assert (lost[0].pci_address, lost[0].said) == ("0000:41:00.0", "Unknown Error")


def test_throttle_bits_that_are_no_slowdown_are_left_out() -> None:
    assert nvidia_smi.throttle_reasons("0x0000000000000001") == []
    assert nvidia_smi.throttle_reasons("0x0000000000000048") == ["hardware slowdown", "hardware thermal slowdown"]


def test_lspci_tells_redirecting_bridges_from_mere_source_validation() -> None:
    shown = (
        "0000:40:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Device 14ab (rev 01)\n"
        "\tBus: primary=40, secondary=41, subordinate=44, sec-latency=0\n"
        "\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-\n"
        "0000:41:00.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0)\n"
        "\tBus: primary=41, secondary=42, subordinate=44, sec-latency=0\n"
        "\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir+ CmpltRedir- UpstreamFwd+ EgressCtrl- DirectTrans-\n"
        "0000:42:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev a1)\n"
        "\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1\n"
        "\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x8 (downgraded)\n"
    )
    root, switch, gpu = lspci.parse_lspci(shown)
    assert root.acs and root.acs.source_validation and not root.acs.request_redirect
    assert switch.acs and switch.acs.request_redirect and not switch.acs.completion_redirect
    assert (gpu.kind, gpu.parent, switch.parent, gpu.acs) == ("gpu", "0000:41:00.0", "0000:40:01.1", None)
    assert (gpu.link.generation, gpu.link.generation_max, gpu.link.width, gpu.link.width_max) == (1, 5, 8, 16)


def test_lspci_and_sysfs_agree_on_the_tree() -> None:
    for layout in lookalike.LAYOUTS:
        machine = lookalike.host(layout)
        for listed in lspci.parse_lspci(machine.commands["lspci -D -vvv"].out):
            seen = sysfs_pci.parse_pci_device(machine.links[f"/sys/bus/pci/devices/{listed.address}"], {})
            assert seen and seen.parent == listed.parent, listed.address


def test_lspci_sees_a_card_that_answers_no_more() -> None:
    devices = lspci.parse_lspci(lookalike.gpu_lost().commands["lspci -D -vvv"].out)
    assert [device.address for device in devices if not device.responds] == ["0000:a4:00.0"]


def test_kernel_log_counts_repeats_and_finds_the_culprit() -> None:
    log = kernel_log.parse_kernel_log(
        "[ 1.2] iommu: Default domain type: Translated\n"
        "[ 9.1] NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.\n"
        "[ 9.2] NVRM: Xid (PCI:0000:41:00): 79, pid=12, GPU has fallen off the bus.\n"
        "[ 9.3] NVRM: Xid (PCI:0000:C1:00): 31, pid=4, name=python, MMU Fault\n"
        "[ 9.4] pcieport 0000:40:01.1: AER: Correctable error message received from 0000:41:00.0\n"
        "[ 9.5] nvidia 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0016 address=0xdf0 flags=0x0020]\n"
    )
    assert [(xid.pci_address, xid.code, xid.count) for xid in log.xids] == [
        ("0000:41:00.0", 79, 2),
        ("0000:c1:00.0", 31, 1),
    ]
    assert (log.pcie_errors, log.iommu_faults) == ({"0000:41:00.0": 1}, {"0000:41:00.0": 1})
    assert log.iommu_default_domain == "Translated"


def test_boot_parameters_keep_the_last_value_and_quoted_spaces() -> None:
    parsed = kernel_command_line.parse_kernel_command_line('quiet iommu=on dyndbg="file a.c +p" iommu=pt\n')
    assert parsed == {"quiet": "", "iommu": "pt", "dyndbg": "file a.c +p"}


def test_limits_and_memory() -> None:
    limits = proc.parse_limits("Max open files            1024                 1048576              files     \n")
    assert limits == {"Max open files": Limit(soft=1024, hard=1048576)}
    assert proc.parse_meminfo("Node 1 MemTotal:  1024 kB\nHugePages_Total:    4\n") == {
        "MemTotal": 1048576,
        "HugePages_Total": 4,
    }


def test_driver_version_of_the_open_and_of_the_closed_module() -> None:
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 30 2025\n"
    assert proc.parse_driver_version(opened) == ("580.95.05", True)
    assert proc.parse_driver_version(closed) == ("570.133.20", False)


def test_docker_without_a_daemon_says_why() -> None:
    found = docker.parse_docker_info('{"ServerErrors": ["permission denied"], "ClientInfo": {"Version": "28.3.3"}}')
    assert (found.server, found.error, found.client, found.cdi_enabled) == (None, "permission denied", "28.3.3", None)


def test_cdi_names_from_yaml_and_json() -> None:
    spec = "kind: nvidia.com/gpu\ndevices:\n- name: 0\n  containerEdits:\n    hooks:\n    - name: x\n- name: GPU-1\n"
    assert docker.parse_cdi_spec(spec) == ["nvidia.com/gpu=0", "nvidia.com/gpu=GPU-1"]
    assert docker.parse_cdi_spec('{"kind": "nvidia.com/gpu", "devices": [{"name": "all"}]}') == ["nvidia.com/gpu=all"]


def test_a_path_lies_on_the_longest_mount_above_it() -> None:
    found = disks.parse_df("/dev/a ext4 10 5 /\n/dev/b xfs 20 6 /models\n", {"/dev/b": (True, False)})
    assert [disks.filesystem_of(path, found) for path in ("/models/x", "/models", "/modelsx")] == [
        found[1],
        found[1],
        found[0],
    ]
    assert found[1].rotational is True


def test_a_raid_is_on_nvme_only_if_every_disk_below_is() -> None:
    mixed = (
        '{"blockdevices": [{"path": "/dev/nvme0n1", "rota": false, "tran": "nvme", "children": [{"path": "/dev/md0"}]},'
        '{"path": "/dev/sda", "rota": "1", "tran": "sata", "children": [{"path": "/dev/md0", "rota": "1"}]}]}'
    )
    assert disks.parse_lsblk(mixed)["/dev/md0"] == (True, False)


def test_listening_sockets_of_both_families() -> None:
    assert ports.parse_listening_sockets(
        "  sl  local_address rem_address   st\n"
        "   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 5150 1 0\n"
        "   1: 0100007F:7530 0100007F:A000 01 00000000:00000000 00:00000000 00000000     0        0 5151 1 0\n"
        "   2: 00000000000000000000000001000000:0050 00000000000000000000000000000000:0000 0A "
        "00000000:00000000 00:00000000 00000000     0        0 77 1 0\n"
    ) == [("127.0.0.1", 30000, 5150), ("::1", 80, 77)]


def test_dd_in_both_decimal_styles() -> None:
    assert disks.parse_dd("16+0 records in\n268435456 bytes (268 MB, 256 MiB) copied, 0.125 s, 2.1 GB/s\n") == (
        268435456,
        0.125,
    )
    assert disks.parse_dd("1 bytes copied, 2,5e-05 s, 1 GB/s") == (1, 2.5e-05)


def test_transfer_rates_take_the_busier_direction_by_column_name() -> None:
    shown = "# gpu  rxpci  txpci\n# Idx   MB/s   MB/s\n    0   1200     35\n    1      -      -\n"
    assert nvidia_smi.parse_transfer_rates(shown) == {0: 1.2e9}
