"""The probe on look-alike hosts, on this machine, and on commands that hang."""

import os
import time
from pathlib import Path

import lookalike
import pytest
from lookalike import LAYOUTS, RecordedHost, host

from deploy.host.machine import Ran
from deploy.host.probe_host import LocalMachine, docker, free_bytes, listeners, probe
from deploy.host.report import UnreadableReport, load, save


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_each_layout_is_seen_as_it_is(layout: lookalike.Layout) -> None:
    report = probe(host(layout))
    assert [gpu.numa_node for gpu in report.gpus] == [slot.node for slot in layout.slots]
    assert [gpu.pci_address for gpu in report.gpus] == lookalike.gpu_addresses(layout)
    assert [node.node for node in report.numa or []] == list(layout.nodes)
    assert sorted(cpu for node in report.numa or [] for cpu in node.cpus) == report.cpu.online
    assert set(report.cpu.present) - set(report.cpu.online) == layout.offline
    assert report.cpu.sockets == layout.sockets
    assert report.unseen == []
    for gpu, slot in zip(report.gpus, layout.slots, strict=True):
        device = report.pci_at(gpu.pci_address)
        assert device and device.root == f"pci0000:{slot.root:02x}"
        assert len(report.bridges_above(device.address)) == (3 if slot.switched else 1)


@pytest.mark.parametrize("name", lookalike.SPECIAL)
def test_a_report_survives_saving_and_loading(name: str, tmp_path: Path) -> None:
    report = probe(lookalike.SPECIAL[name]())
    save(report, tmp_path / "host.json")
    assert load(tmp_path / "host.json") == report


def test_an_empty_machine_gives_an_empty_report_that_names_what_is_unseen() -> None:
    report = probe(RecordedHost())
    assert (report.gpus, report.pci, report.numa, report.docker, report.listeners) == ([], None, None, None, None)
    assert {"GPUs", "NUMA nodes", "PCI devices", "kernel log", "filesystems"} <= {note.what for note in report.unseen}


def test_without_root_the_report_says_what_root_would_add() -> None:
    report = probe(lookalike.not_root())
    assert not report.system.root
    assert {note.what: note.how for note in report.unseen} == {
        "ACS of PCIe bridges": "sudo deploy doctor",
        "kernel log": "sudo deploy doctor",
    }
    assert all(device.acs is None for device in report.pci or [])
    assert [gpu.link.width for gpu in report.gpus] == [16] * 8


def test_a_container_without_sys_still_knows_its_gpus() -> None:
    report = probe(lookalike.container_without_sys())
    assert (len(report.gpus), report.pci, report.numa, report.system.container) == (8, None, None, "docker")
    assert report.topology and report.topology.links["GPU0"]["GPU7"] == "SYS"


def test_a_lost_gpu_is_named_from_every_side() -> None:
    report = probe(lookalike.gpu_lost())
    assert [gpu.pci_address for gpu in report.lost_gpus] == ["0000:a4:00.0"]
    assert [device.address for device in report.pci or [] if not device.responds] == ["0000:a4:00.0"]
    assert report.kernel_log and report.kernel_log.xids[0].code == 79


def test_a_field_that_the_driver_does_not_know_is_left_out() -> None:
    healthy = host(lookalike.TWO_GPUS)

    class OlderDriver(RecordedHost):
        def run(self, *command: str) -> Ran:
            if command[0] == "nvidia-smi" and "clocks_event_reasons.active" in command[1]:
                return Ran("failed", 'Field "clocks_event_reasons.active" is not a valid field to query.\n')
            return super().run(*command)

    report = probe(OlderDriver(healthy.commands, healthy.files, healthy.links))
    assert len(report.gpus) == 2


def test_a_command_that_hangs_costs_its_limit_and_is_named() -> None:
    machine = LocalMachine(limit=0.3)
    started = time.monotonic()
    assert machine.run("sleep", "30").end == "slow"
    # A child that keeps the pipe open after its parent was killed.
    assert machine.run("sh", "-c", "sleep 30 & sleep 30").end == "slow"
    assert time.monotonic() - started < 2


def test_a_part_that_hangs_in_the_kernel_is_left_behind() -> None:
    class Hanging(RecordedHost):
        def read(self, path: str) -> str | None:
            if path == "/proc/meminfo":
                time.sleep(5)
            return super().read(path)

    started = time.monotonic()
    healthy = host(lookalike.TWO_GPUS)
    report = probe(Hanging(healthy.commands, healthy.files, healthy.links), limit=0.2)
    assert time.monotonic() - started < 2
    assert [note.what for note in report.unseen] == ["memory"]
    assert len(report.gpus) == 2


def test_commands_that_are_missing_or_fail_are_told_apart() -> None:
    machine = LocalMachine()
    assert machine.run("no-such-command-anywhere").end == "missing"
    assert machine.run("sh", "-c", "echo out; echo err >&2; exit 3") == Ran("failed", "out\n", "err\n")


def test_this_machine_is_seen_within_three_seconds() -> None:
    started = time.monotonic()
    report = probe(LocalMachine())
    assert time.monotonic() - started < 3
    assert report.system.hostname == Path("/proc/sys/kernel/hostname").read_text().strip()
    assert report.memory.total and report.memory.total > 2**20
    assert len(report.cpu.online) >= len(os.sched_getaffinity(0))
    assert report.filesystems


def test_a_listening_port_of_ours_is_seen_with_this_process() -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        mine = [entry for entry in listeners(LocalMachine()) or [] if entry.port == server.getsockname()[1]]
    assert [(entry.address, entry.pid) for entry in mine] == [("127.0.0.1", os.getpid())]
    assert mine[0].process


def test_free_space_of_a_folder_that_does_not_exist_yet(tmp_path: Path) -> None:
    free = free_bytes(LocalMachine(), str(tmp_path / "a" / "b"))
    stat = os.statvfs(tmp_path)
    assert free is not None and abs(free - stat.f_bavail * stat.f_frsize) < 2**30


def test_the_read_speed_is_sampled_from_a_shard(tmp_path: Path) -> None:
    assert probe(LocalMachine(), model_folder=str(tmp_path)).disk_reads == []
    (tmp_path / "model-00001.safetensors").write_bytes(os.urandom(2**22))
    report = probe(LocalMachine(), model_folder=str(tmp_path))
    # A filesystem in memory refuses reads past the page cache: then the report says so.
    if report.disk_reads:
        assert report.disk_reads[0].bytes_read == 2**22 and report.disk_reads[0].bytes_per_second > 0
    else:
        assert "disk read" in {note.what for note in report.unseen}


def test_docker_states() -> None:
    healthy = docker(host(lookalike.EIGHT_GPUS))
    assert healthy and healthy.server == "28.3.3" and "nvidia.com/gpu=7" in healthy.cdi_devices
    refused = docker(RecordedHost().answering("docker info", "", "failed", "permission denied on the socket\n"))
    assert refused and refused.error == "permission denied on the socket"
    beside = docker(
        RecordedHost().answering("docker info", '{"ServerVersion": ""}', "failed", "WARNING: x\npermission denied\n")
    )
    assert beside and beside.error == "permission denied"
    slow = docker(RecordedHost().answering("docker info", end="slow"))
    assert slow and slow.error == "the Docker daemon did not answer in time"
    assert docker(RecordedHost()) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", "Invalid JSON"), ("{}", "taken_at"), ('{"schema_version": 2}', "schema_version"), ("[1]", "file")],
)
def test_a_file_that_is_no_report_is_refused_with_the_place(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    path.write_text(text)
    with pytest.raises(UnreadableReport, match=expected):
        load(path)
    with pytest.raises(UnreadableReport, match="No such file"):
        load(tmp_path / "missing.json")
