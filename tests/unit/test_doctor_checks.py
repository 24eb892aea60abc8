"""Every check on a healthy and on a broken look-alike host."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lookalike
import pytest
from lookalike import EIGHT_GPUS, RecordedHost, docker_info, host

from deploy.doctor.finding import Finding, Needs, RoleNeeds, Severity, needs_of
from deploy.doctor.run import all_checks, run_checks
from deploy.host.probe_host import probe
from deploy.host.report import (
    ActiveTests,
    AllReduceResult,
    CopyResult,
    DiskRead,
    HostReport,
    PeerResult,
    TransferResult,
    Unseen,
)
from deploy.spec.load import parse

QUERY = "nvidia-smi --query-gpu"
LSPCI = "lspci -D -vvv"
ROLES = (
    RoleNeeds(name="prefill", gpus=(0, 1, 2, 3), numa_node=0, cpus="0-47,96-143"),
    RoleNeeds(name="decode", gpus=(4, 5, 6, 7), numa_node=1, cpus="48-95,144-191"),
)
PD = Needs(profile="pd", roles=ROLES, model_folder=lookalike.MODEL, image_bytes=14 * 10**9)


def findings_of(machine: RecordedHost, needs: Needs = PD) -> list[Finding]:
    return run_checks(probe(machine, model_folder=needs.model_folder), needs)


def edit(where: str, old: str, new: str) -> RecordedHost:
    return host(EIGHT_GPUS).edited(where, old, new)


def row(index: int, old: str, new: str) -> RecordedHost:
    """Eight GPUs, with one GPU's row of the query changed."""
    machine = host(EIGHT_GPUS)
    lines = machine.commands[QUERY].out.split("\n")
    assert old in lines[index + 1]
    lines[index + 1] = lines[index + 1].replace(old, new)
    return machine.answering(QUERY, "\n".join(lines))


def log(line: str, times: int = 1) -> RecordedHost:
    machine = host(EIGHT_GPUS)
    return machine.answering("dmesg", machine.commands["dmesg"].out + f"[ 7.7] {line}\n" * times)


def environment(text: str) -> RecordedHost:
    return host(EIGHT_GPUS).with_file("/proc/self/environ", f"HOME=/root\0{text}\0")


def translated_iommu() -> RecordedHost:
    machine = host(EIGHT_GPUS).with_file("/proc/cmdline", "quiet amd_iommu=on\n")
    groups = [path for path in machine.files if path.startswith("/sys/kernel/iommu_groups/")]
    for path in groups:
        machine = machine.with_file(path, "DMA-FQ\n")
    return machine


def listening(port: int, address: str = "00000000", comm: str = "nginx") -> RecordedHost:
    machine = host(EIGHT_GPUS)
    line = f"   1: {address}:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 8080 1\n"
    machine = machine.with_file("/proc/net/tcp", machine.files["/proc/net/tcp"] + line)
    machine = machine.with_file("/proc/777/comm", f"{comm}\n")
    return RecordedHost(machine.commands, machine.files, {**machine.links, "/proc/777/fd/5": "socket:[8080]"})


def limited_daemon() -> RecordedHost:
    return (
        host(EIGHT_GPUS)
        .with_file(
            "/proc/1402/limits",
            "Max locked memory         8388608     8388608     bytes\n"
            "Max open files            20000       20000       files\n",
        )
        .with_file("/proc/1402/status", "CapEff:\t00000000a80425fb\n")
    )


def memory_of_node_1_gone() -> RecordedHost:
    return edit("/sys/devices/system/node/node1/meminfo", f"{768 * 1024 * 1024} kB", "0 kB")


@dataclass(frozen=True)
class Case:
    """A host that one check must find, and how bad it is. `fix` must stand in the commands, fix or look."""

    id: str
    machine: Callable[[], RecordedHost]
    severity: Severity
    fix: str = ""
    needs: Needs = PD


E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE
BARE = Needs()

CASES = [
    Case("gpu.none", lookalike.no_gpu, E, 'profile = "cpu"'),
    Case("gpu.none", lookalike.no_gpu, N, "make demo", BARE),
    Case("gpu.driver", lambda: host(EIGHT_GPUS).without("nvidia-smi"), E, "nvidia-driver-580"),
    Case("gpu.driver", lambda: host(EIGHT_GPUS).answering(QUERY, end="slow"), E, "--limit 30"),
    Case("gpu.lost", lookalike.gpu_lost, E, "reboot"),
    Case("gpu.count", lambda: host(lookalike.FOUR_GPUS), E, "deploy init"),
    Case("gpu.count", lambda: host(lookalike.FOUR_GPUS), N, "deploy init", BARE),
    Case("gpu.mixed", lambda: row(2, "97887 MiB", "95000 MiB"), W),
    Case("gpu.mig", lookalike.mig_on, E, "sudo nvidia-smi -i 2 -mig 0"),
    Case(
        "gpu.busy",
        lambda: host(EIGHT_GPUS).answering(
            "nvidia-smi --query-compute-apps",
            f"gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n{lookalike.uuid(1)}, 4242, python3, 900 MiB\n",
        ),
        W,
        "ps -fp 4242",
    ),
    Case("gpu.persistence", lambda: row(0, "Enabled, Disabled", "Disabled, Disabled"), W, "nvidia-smi -pm 1"),
    Case("gpu.power", lambda: row(6, "600.00 W, 600.00 W", "450.00 W, 600.00 W"), N, "-i 6 -pl 600"),
    Case("gpu.throttled", lambda: row(1, "0x0000000000000001", "0x0000000000000040"), W),
    Case("gpu.ecc", lambda: row(4, "Enabled, 0,", "Enabled, 3,"), E, "--gpu-reset"),
    Case("gpu.link", lambda: row(5, "1, 5, 5, 16, 16", "1, 5, 5, 8, 16"), W, "lspci -vvs 0000:a4:00.0"),
    Case("gpu.link", lambda: row(5, "1, 5, 5, 16, 16", "1, 4, 5, 16, 16"), W),
    Case("gpu.architecture", lambda: row(0, ", 12.0,", ", 9.0,"), W),
    Case("gpu.driver_version", lambda: edit(QUERY, lookalike.DRIVER, "570.133.20"), E, "nvidia-driver-580"),
    Case("gpu.driver_version", lambda: edit(QUERY, lookalike.DRIVER, "580.105.08"), E, "reboot"),
    Case(
        "gpu.peer_access",
        lambda: host(EIGHT_GPUS).answering("nvidia-smi topo -p2p w", " \tGPU0\tGPU1\n GPU0\tX\tCNS\n GPU1\tOK\tX\n"),
        W,
    ),
    Case("gpu.xid", lambda: log("NVRM: Xid (PCI:0000:23:00): 79, GPU has fallen off the bus."), E, "dmesg"),
    Case("gpu.xid", lambda: log("NVRM: Xid (PCI:0000:23:00): 31, pid=9, name=python, MMU Fault"), N),
    Case("gpu.xid", lambda: log("NVRM: Xid (PCI:0000:23:00): 16, pid=9, Display engine hung"), W),
    Case(
        "pcie.acs",
        lambda: edit(LSPCI, "ACSCtl:\tSrcValid+ TransBlk- ReqRedir-", "ACSCtl:\tSrcValid+ TransBlk- ReqRedir+"),
        E,
        "sudo setpci -s 0000:20:01.1 ECAP_ACS+0x6.w=0000",
    ),
    Case(
        "pcie.acs",
        lambda: edit(
            LSPCI,
            "ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-",
            "ReqRedir- CmpltRedir+ UpstreamFwd- EgressCtrl- DirectTrans-",
        ),
        E,
        "setpci",
    ),
    Case("pcie.acs_unseen", lookalike.not_root, N, "sudo deploy doctor"),
    Case("pcie.iommu", translated_iommu, E, "iommu=pt"),
    Case("pcie.iommu_faults", lambda: log("nvidia 0000:23:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x1]"), E),
    Case("pcie.link_errors", lambda: log("pcieport 0000:20:01.1: AER: Corrected error received: 0000:23:00.0", 50), W),
    Case(
        "numa.gpu_node",
        lambda: (
            edit("/sys/devices/pci0000:20/0000:20:01.1/0000:21:00.0/0000:22:00.0/0000:23:00.0/numa_node", "0", "-1")
            .edited("nvidia-smi topo -m", "GPU0\t X ", "GPU9\t X ")
            .edited(LSPCI, "\tNUMA node: 0\n", "")
        ),
        W,
    ),
    Case("numa.missing_cpu", lambda: host(lookalike.MISSING_CPU), W, "cpu23/online", BARE),
    Case("numa.no_memory", memory_of_node_1_gone, W),
    Case("numa.spread", lambda: host(lookalike.NPS4), W, "NPS1", BARE),
    Case("numa.spread", lambda: host(lookalike.FIVE_AND_THREE), W, "", BARE),
    Case("numa.roles", lambda: host(lookalike.FIVE_AND_THREE), E, "deploy init"),
    Case("numa.roles", lambda: host(lookalike.MISSING_CPU), E, 'cpus = "0-22,24-47,96-143"'),
    Case(
        "numa.roles",
        lambda: host(EIGHT_GPUS),
        E,
        "numa_node = 0",
        PD.model_copy(update={"roles": (ROLES[0].model_copy(update={"numa_node": 1}), ROLES[1])}),
    ),
    Case(
        "numa.roles",
        lambda: host(EIGHT_GPUS),
        W,
        'cpus = "0-3"',
        PD.model_copy(update={"roles": (ROLES[0].model_copy(update={"cpus": "0-3,50"}), ROLES[1])}),
    ),
    Case("numa.balancing", lambda: edit("/proc/sys/kernel/numa_balancing", "0", "1"), N, "kernel.numa_balancing=0"),
    Case(
        "cpu.governor",
        lambda: edit("/sys/devices/system/cpu/cpu7/cpufreq/scaling_governor", "performance", "powersave"),
        W,
        "scaling_governor",
    ),
    Case(
        "memory.available",
        lambda: lookalike.no_gpu().with_file("/proc/meminfo", "MemAvailable: 2000000 kB\n"),
        E,
        "",
        BARE,
    ),
    Case(
        "memory.hugepages",
        lambda: edit("/proc/meminfo", "HugePages_Free:        0", "HugePages_Free:   300000"),
        W,
        "nr_hugepages",
    ),
    Case("limits.memlock", limited_daemon, W, "MEMLOCK=8388608"),
    Case("limits.nofile", limited_daemon, W, "NOFILE=20000"),
    Case("memory.shm", lambda: edit("df", "811000000000", "67108864"), W, "remount"),
    Case("docker.answers", lambda: host(EIGHT_GPUS).without("docker"), E, "make docker"),
    Case("docker.answers", lookalike.container_without_sys, N),
    Case("docker.answers", lambda: host(EIGHT_GPUS).answering("docker info", end="slow"), E),
    Case(
        "docker.answers",
        lambda: host(EIGHT_GPUS).answering(
            "docker info", '{"ServerErrors": ["permission denied while trying to connect to the Docker daemon socket"]}'
        ),
        E,
        "usermod -aG docker",
    ),
    Case("docker.version", lambda: edit("docker info", '"ServerVersion": "28.3.3"', '"ServerVersion": "24.0.7"'), E),
    Case("docker.version", lambda: edit("docker info", "v2.39.1", "v2.20.0"), E, "docker-compose-plugin"),
    Case("docker.version", lambda: edit("docker info", '"buildx"', '"scan"'), E, "docker-buildx-plugin"),
    Case(
        "docker.cdi", lambda: host(EIGHT_GPUS).answering("docker info", docker_info(CDISpecDirs=None)), E, '"cdi": true'
    ),
    Case("docker.cdi", lambda: host(EIGHT_GPUS).without("/etc/cdi"), E, "nvidia-ctk cdi generate"),
    Case(
        "docker.cdi", lambda: edit("/etc/cdi/nvidia.yaml", lookalike.uuid(3), "GPU-old"), E, "nvidia-ctk cdi generate"
    ),
    Case(
        "docker.cdi",
        lambda: host(EIGHT_GPUS).with_file(
            "/etc/cdi/nvidia.yaml",
            "kind: nvidia.com/gpu\ndevices:\n" + "".join(f"- name: '{index}'\n" for index in range(8)),
        ),
        N,
        "--device-name-strategy=uuid",
    ),
    Case(
        "docker.reload",
        lambda: host(EIGHT_GPUS).without("/dev/char").with_file("/dev/char/1:3", ""),
        W,
        "create-dev-char",
    ),
    Case("docker.storage", lambda: edit("docker info", "overlay2", "vfs"), W),
    Case(
        "docker.live_restore",
        lambda: edit("docker info", '"LiveRestoreEnabled": true', '"LiveRestoreEnabled": false'),
        N,
    ),
    Case("disk.image", lambda: edit("df", "612000000000", "9000000000"), E, "docker system df"),
    Case("disk.weights", lambda: host(EIGHT_GPUS).without(lookalike.MODEL), E, "deploy model fetch"),
    Case("disk.model", lambda: edit("lsblk", '"/dev/nvme2n1", "rota": false', '"/dev/nvme2n1", "rota": true'), W),
    Case("port.in_use", lambda: listening(30000), E, "sport = :30000"),
    Case(
        "firewall.bypassed",
        lambda: edit("/etc/ufw/ufw.conf", "ENABLED=no", "ENABLED=yes"),
        W,
        "127.0.0.1",
        PD.model_copy(update={"bind": "0.0.0.0"}),
    ),
    Case("system.time", lambda: host(EIGHT_GPUS).answering("timedatectl", "no\n"), W, "set-ntp"),
    Case("system.container", lookalike.container_without_sys, N),
    Case("environment.allocator", lambda: environment("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"), W, "unset"),
    Case("environment.transports", lambda: environment("UCX_TLS=^cuda_ipc"), W, "unset UCX_TLS"),
    Case("environment.transports", lambda: environment("UCX_TLS=tcp,self"), W, "unset UCX_TLS"),
    Case("environment.transports", lambda: environment("NCCL_PROTO=LL"), N, "[variables]"),
    Case("environment.visible_devices", lambda: environment("CUDA_VISIBLE_DEVICES=1"), N, "unset"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.id}-{case.severity}")
def test_a_broken_host_has_the_finding_with_its_cause_and_cure(case: Case) -> None:
    found = [finding for finding in findings_of(case.machine(), case.needs) if finding.id == case.id]
    assert [finding.severity for finding in found] and case.severity in {finding.severity for finding in found}
    for finding in found:
        assert finding.seen and finding.why and finding.group
    assert any(case.fix in "\n".join([finding.fix, finding.look, *finding.commands]) for finding in found)


@pytest.mark.parametrize("layout", [EIGHT_GPUS, lookalike.WITH_NICS], ids=lambda layout: layout.name)
def test_a_healthy_host_has_no_finding(layout: lookalike.Layout) -> None:
    for needs in (PD, BARE):
        assert findings_of(host(layout), needs) == []


@pytest.mark.parametrize("name", [layout.name for layout in lookalike.LAYOUTS])
def test_a_sound_host_of_any_layout_has_no_error(name: str) -> None:
    layout = next(layout for layout in lookalike.LAYOUTS if layout.name == name)
    assert [finding for finding in findings_of(host(layout), BARE) if finding.severity == Severity.ERROR] == []


def test_each_look_alike_has_exactly_its_own_findings() -> None:
    def ids(machine: RecordedHost, needs: Needs = BARE) -> set[str]:
        return {finding.id for finding in findings_of(machine, needs)}

    assert ids(lookalike.no_gpu()) == {"gpu.none"}
    assert ids(lookalike.no_gpu(), Needs(profile="cpu")) == set()
    assert ids(lookalike.gpu_lost()) == {"gpu.lost", "gpu.xid"}
    assert ids(lookalike.mig_on()) == {"gpu.mig"}
    assert ids(lookalike.not_root()) == {"pcie.acs_unseen"}
    assert ids(lookalike.container_without_sys()) == {"pcie.acs_unseen", "docker.answers", "system.container"}
    assert ids(host(lookalike.TWO_GPUS)) == ids(host(lookalike.FOUR_GPUS)) == {"gpu.count"}


def test_every_check_has_a_case() -> None:
    tested = {case.id for case in CASES} | {id for id, _, _ in ACTIVE} | {"probe.not_run"}
    assert {check.id for check in all_checks()} == tested


def active(**results: object) -> HostReport:
    tests = ActiveTests.model_validate({"image": "sha256:0", **results})
    return probe(host(EIGHT_GPUS)).model_copy(update={"active": tests})


def reduced(outcome: str, peer_to_peer: bool, speed: float | None = None) -> AllReduceResult:
    return AllReduceResult.model_validate(
        {"device": "cuda", "ranks": 8, "peer_to_peer": peer_to_peer, "outcome": outcome, "bytes_per_second": speed}
    )


def moved(outcome: str, speed: float | None = None) -> TransferResult:
    return TransferResult.model_validate(
        {"transport": "isolated", "memory": "cuda", "outcome": outcome, "bytes_per_second": speed, "used": ["tcp"]}
    )


def copied(*speeds: float) -> list[CopyResult]:
    return [CopyResult(gpu=gpu, bytes_per_second=speed, correct=True) for gpu, speed in enumerate(speeds)]


def peered(*speeds: float) -> list[PeerResult]:
    return [PeerResult(source=0, target=gpu, bytes_per_second=speed, correct=True) for gpu, speed in enumerate(speeds)]


ACTIVE: list[tuple[str, dict[str, object], Severity]] = [
    ("probe.all_reduce", {"all_reduces": [reduced("hang", True), reduced("ok", False, 9e9)]}, E),
    ("probe.all_reduce", {"all_reduces": [reduced("wrong_values", True)]}, E),
    ("probe.all_reduce", {"all_reduces": [reduced("failed", False)]}, E),
    ("probe.all_reduce", {"all_reduces": [reduced("ok", True, 5e9), reduced("ok", False, 9e9)]}, W),
    ("probe.copies", {"copies": [CopyResult(gpu=3, correct=False)]}, E),
    ("probe.copies", {"copies": copied(1.6e12, 1.6e12, 0.9e12)}, W),
    ("probe.peers", {"peers": [PeerResult(source=0, target=1, correct=False)]}, E),
    ("probe.peers", {"peers": peered(50e9, 50e9, 20e9)}, N),
    ("probe.transfers", {"transfers": [moved("hang")]}, E),
    ("probe.transfers", {"transfers": [moved("wrong_values")]}, E),
    ("probe.transfers", {"transfers": [moved("ok", 0.4e9)]}, W),
]


@pytest.mark.parametrize(("id", "results", "severity"), ACTIVE)
def test_a_failed_active_test_is_a_finding(id: str, results: dict[str, object], severity: Severity) -> None:
    assert [(finding.id, finding.severity) for finding in run_checks(active(**results), PD)] == [(id, severity)]


def test_good_active_tests_are_no_finding() -> None:
    good = active(
        copies=copied(1.6e12, 1.5e12),
        peers=peered(50e9, 52e9),
        all_reduces=[reduced("ok", True, 40e9), reduced("ok", False, 9e9)],
        transfers=[moved("ok", 40e9)],
    )
    assert run_checks(good, PD) == []


def test_a_hang_only_with_peer_to_peer_says_how_to_go_on_without() -> None:
    report = active(all_reduces=[reduced("hang", True), reduced("ok", False, 9e9)])
    assert 'NCCL_P2P_LEVEL = "LOC"' in run_checks(report, PD)[0].fix


def test_tests_that_did_not_run_are_noted() -> None:
    report = active(not_run=[Unseen(what="NIXL", why="no image")])
    assert [finding.id for finding in run_checks(report, PD)] == ["probe.not_run"]


def test_findings_come_worst_first() -> None:
    ranks = [finding.severity.rank for finding in findings_of(lookalike.gpu_lost().answering("timedatectl", "no\n"))]
    assert ranks == sorted(ranks) and len(set(ranks)) > 1


def test_source_validation_alone_is_no_acs_finding() -> None:
    machine = host(EIGHT_GPUS)
    assert "SrcValid+ TransBlk- ReqRedir-" in machine.commands[LSPCI].out
    assert not [finding for finding in findings_of(machine) if finding.id == "pcie.acs"]


def test_the_iommu_finding_carries_its_figures() -> None:
    found = next(finding for finding in findings_of(translated_iommu()) if finding.id == "pcie.iommu")
    assert "15 %" in found.why and "8 GPUs" in found.why and "amd_iommu=on" in found.seen


def test_our_own_router_behind_the_docker_proxy_is_no_port_conflict() -> None:
    assert findings_of(listening(30000, comm="docker-proxy")) == []
    assert findings_of(listening(30000, address="0101A8C0")) == []


# Rows of shared field reports that are about hosts, and the check that answers each.
REPORTS = {
    "first all-reduce hangs although topo says OK": "probe.all_reduce",
    "ACS request redirect": "pcie.acs",
    "IOMMU on": "pcie.iommu",
    "Xid 79": "gpu.xid",
    "driver-specific failures": "gpu.driver_version",
    "two containers fall back to TCP": "probe.transfers",
    "expandable_segments": "environment.allocator",
    "UCX_TLS=^cuda_ipc": "environment.transports",
    "device_ids by index loaded the wrong GPU": "docker.cdi",
    "containers lose GPUs on systemd reload": "docker.reload",
    "published ports bypass ufw": "firewall.bypassed",
    "/dev/shm 64 MB": "memory.shm",
    "memlock 8 MB": "limits.memlock",
    "ranks bound to the wrong node": "numa.roles",
}


@pytest.mark.parametrize("report", REPORTS)
def test_every_field_report_about_hosts_has_its_check(report: str) -> None:
    assert REPORTS[report] in {check.id for check in all_checks()}


def test_a_slow_model_disk_is_noted_with_the_minutes_it_costs() -> None:
    report = probe(host(EIGHT_GPUS))
    slow = DiskRead(path="/models/DeepSeek-V4-Flash/a.safetensors", bytes_read=2**28, bytes_per_second=500e6)
    found = run_checks(report.model_copy(update={"disk_reads": [slow]}), PD)
    assert [(finding.id, finding.severity) for finding in found] == [("disk.model", N)]
    assert "5 minutes" in found[0].why


def test_a_gpu_on_the_bus_that_the_driver_does_not_list_is_lost() -> None:
    machine = host(EIGHT_GPUS)
    seven = "\n".join(line for line in machine.commands[QUERY].out.split("\n") if not line.startswith("2,"))
    found = findings_of(machine.answering(QUERY, seven), BARE)
    assert [(finding.id, finding.seen.split()[3]) for finding in found if finding.id == "gpu.lost"] == [
        ("gpu.lost", "0000:43:00.0")
    ]


def test_every_check_is_documented_in_its_own_words() -> None:
    document = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    rows = [line for line in document.splitlines() if line.startswith("| `") and "." in line.split("`")[1]]
    described = {check.id: (check.function.__doc__ or "").splitlines()[0] for check in all_checks()}
    assert rows == [f"| `{id}` | {words} |" for id, words in described.items()]


def test_what_a_spec_with_replicas_needs_is_checked_like_prefill_and_decode() -> None:
    tables = "[[replica]]\ngpus = [0, 1]\nnuma_node = 1\n[[replica]]\ngpus = [2, 9]\nnuma_node = 0\n"
    needs = needs_of(parse(f'profile = "replicas"\n{tables}', Path("deploy.toml")).spec, None, 0)
    assert [role.name for role in needs.roles] == ["engine", "engine-2"]
    found = run_checks(probe(host(EIGHT_GPUS)), needs)
    seen = "; ".join(finding.seen for finding in found)
    # GPUs 0 and 1 hang on node 0, and there is no GPU 9.
    assert "engine" in seen and "deploy.toml names GPUs that are not here: 9" in seen
    assert "gpu.none" in {finding.id for finding in run_checks(probe(lookalike.no_gpu()), needs)}
