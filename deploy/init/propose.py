"""What a host should run: roles, GPUs, CPU sets and settings, each with its reason. Pure functions of the report."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from deploy.host.report import Gpu, HostReport
from deploy.spec.memory import MemoryPlan, plan_memory
from deploy.spec.model import Spec
from deploy.spec.profiles import ENGINES, Profile

RANKS = 4
"""GPUs of prefill and of decode each."""
REPLICA_RANKS = 2
"""Two GPUs hold the weights."""
REPLICA_MEMORY_FRACTION = 0.9
"""Weights take three quarters of two GPUs: with less, little or nothing would remain for the KV cache."""
OS_CORES = 2
"""Physical cores of each NUMA node that no role gets: kernel, Docker, router, tokenizers of other programs."""
ENOUGH_CORES = 16
"""Nodes with fewer physical cores leave one to the system instead."""
EXHAUSTIVE = 10
"""Up to so many GPUs every way to divide them is tried."""

# nvidia-smi's words for how far two GPUs are apart, nearest first.
_DISTANCE = {"X": 0, "PIX": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 6}
_UNKNOWN_DISTANCE = 5


@dataclass(frozen=True)
class RolePlan:
    """One engine: its GPUs in rank order, the NUMA node they hang on, the CPUs it may use."""

    name: str
    gpus: tuple[Gpu, ...]
    numa_node: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Setting:
    """A variable of compose.yaml with the reason for its value."""

    name: str
    value: str | int
    reason: str


@dataclass(frozen=True)
class Proposal:
    """What to run here.

    Attributes:
        profile: of deploy.toml.
        roles: the engines.
        system_cpus: CPUs that stay with the operating system.
        transport: how the KV cache travels, with `transport_reason`.
        settings: variables that differ from compose.yaml's defaults.
        memory_fraction: share of GPU memory for weights and KV cache.
        memory: of one GPU, None without GPUs.
        remarks: why it looks like this.
        obstacles: what keeps this host from serving; empty if nothing does.
    """

    profile: Profile
    roles: tuple[RolePlan, ...] = ()
    system_cpus: tuple[int, ...] = ()
    transport: str = "isolated"
    transport_reason: str = ""
    settings: tuple[Setting, ...] = ()
    memory_fraction: float = 0.85
    memory: MemoryPlan | None = None
    remarks: tuple[str, ...] = ()
    obstacles: tuple[str, ...] = field(default=())


def propose(report: HostReport, keep: Spec | None = None) -> Proposal:
    """Choose profile, GPUs, CPUs and settings for a host.

    Eight GPUs and more: prefill and decode with four each, unless `keep` has replicas. Fewer: replicas of two. None:
    the CPU profile.

    Args:
        keep: what a person decided before; the defaults if None.
    """
    keep = keep or Spec()
    gpus = [gpu for gpu in report.gpus if not gpu.mig]
    if not gpus:
        return _without_gpus(report)
    profile: Profile = "pd" if len(gpus) >= 2 * RANKS and keep.profile != "replicas" else "replicas"
    ranks = RANKS if profile == "pd" else REPLICA_RANKS
    names = ENGINES[profile][: len(gpus) // ranks]
    groups = divide(report, gpus, len(names), ranks)
    remarks = [f"{len(gpus)} GPUs: profile {profile}, {len(names)} engines of {ranks}"]
    remarks += [f"GPU {gpu.index} is left out: MIG is on" for gpu in report.gpus if gpu.mig]
    obstacles = list(_obstacles(report, groups, names, ranks))
    if not groups:
        obstacles.append(f"one GPU does not hold the weights: at least {REPLICA_RANKS} are needed")
    nodes = [_node(group) for group in groups]
    cpu_sets, system = assign_cpus(report, nodes)
    roles = tuple(
        RolePlan(name, group, node, cpus)
        for name, group, node, cpus in zip(names, groups, nodes, cpu_sets, strict=False)
    )
    smallest = min((gpu.memory_mib for gpu in gpus if gpu.memory_mib), default=None)
    fraction = keep.engine.memory_fraction
    if profile == "replicas":
        fraction = max(fraction, REPLICA_MEMORY_FRACTION)
    engine = keep.engine.model_copy(update={"memory_fraction": fraction})
    chosen = keep.model_copy(update={"profile": profile, "engine": engine})
    memory = plan_memory(smallest, chosen, ranks) if smallest else None
    if memory and not memory.fits:
        obstacles.append(f"{ranks} GPUs of {memory.total / 1024**3:.0f} GiB are too small: {memory}")
    transport, reason = _transport(report)
    return Proposal(
        profile=profile,
        roles=roles,
        system_cpus=system,
        transport=transport,
        transport_reason=reason,
        settings=tuple(_settings(report, groups)),
        memory_fraction=fraction,
        memory=memory,
        remarks=tuple(remarks),
        obstacles=tuple(obstacles),
    )


def _without_gpus(report: HostReport) -> Proposal:
    hardware = [device for device in report.pci or [] if device.kind == "gpu"]
    broken = bool(hardware or report.lost_gpus)
    return Proposal(
        profile="cpu",
        system_cpus=tuple(report.cpu.online),
        settings=tuple(_limits(report)),
        remarks=("no GPU here: the three services run with a tiny model",),
        obstacles=("GPUs are here and the driver shows none: deploy doctor says why",) if broken else (),
    )


def cost(report: HostReport, gpus: Iterable[Gpu]) -> tuple[int, float, float]:
    """How badly some GPUs talk to each other: NUMA nodes spanned, then the worst pair, then all pairs.

    Measured bandwidth counts where there is one; else the distance that nvidia-smi names.
    """
    chosen = list(gpus)
    pairs = [_pair_cost(report, one, other) for one, other in combinations(chosen, 2)]
    nodes = len({gpu.numa_node for gpu in chosen})
    return nodes, max(pairs, default=0.0), sum(pairs)


def _pair_cost(report: HostReport, one: Gpu, other: Gpu) -> float:
    measured = [
        result.bytes_per_second
        for result in (report.active.peers if report.active else [])
        if {result.source, result.target} == {one.index, other.index} and result.bytes_per_second
    ]
    if measured:
        # In the range of the distances, so that both can be mixed: 60 GB/s is 1, 10 GB/s is 6.
        return 60e9 / min(measured)
    links = report.topology.links if report.topology else {}
    word = links.get(f"GPU{one.index}", {}).get(f"GPU{other.index}", "")
    return 0.5 if word.startswith("NV") else _DISTANCE.get(word, _UNKNOWN_DISTANCE)


def divide(report: HostReport, gpus: Sequence[Gpu], groups: int, size: int) -> list[tuple[Gpu, ...]]:
    """Choose `groups` disjoint groups of `size` GPUs whose members are as near each other as can be.

    Groups are sorted by NUMA node, then by index. With many GPUs the best group is taken first, then the best of the
    rest.
    """
    if len(gpus) <= EXHAUSTIVE:
        found = min(_divisions(list(gpus), groups, size), key=lambda parts: _total(report, parts))
    else:
        left, found = list(gpus), list[tuple[Gpu, ...]]()
        for _ in range(groups):
            found.append(min(combinations(left, size), key=lambda part: cost(report, part)))
            left = [gpu for gpu in left if gpu not in found[-1]]
    return sorted(found, key=lambda part: (_node(part), part[0].index))


def _divisions(gpus: list[Gpu], groups: int, size: int) -> Iterable[list[tuple[Gpu, ...]]]:
    """Every way to choose disjoint groups, each once (a group's first GPU comes before the next group's)."""
    if groups == 0:
        yield []
        return
    for first in range(len(gpus) - groups * size + 1):
        for others in combinations(gpus[first + 1 :], size - 1):
            part = (gpus[first], *others)
            rest = [gpu for gpu in gpus[first + 1 :] if gpu not in others]
            for parts in _divisions(rest, groups - 1, size):
                yield [part, *parts]


def _total(report: HostReport, parts: list[tuple[Gpu, ...]]) -> tuple[int, float, float]:
    costs = [cost(report, part) for part in parts]
    return (
        sum(nodes for nodes, _, _ in costs),
        max((worst for _, worst, _ in costs), default=0.0),
        sum(every for _, _, every in costs),
    )


def _node(group: tuple[Gpu, ...]) -> int:
    """The node most of the GPUs hang on; 0 if none is known."""
    known = [gpu.numa_node for gpu in group if gpu.numa_node is not None]
    return max(sorted(set(known)), key=known.count) if known else 0


def _obstacles(report: HostReport, groups: list[tuple[Gpu, ...]], names: tuple[str, ...], ranks: int) -> Iterable[str]:
    for name, group in zip(names, groups, strict=False):
        nodes = sorted({gpu.numa_node for gpu in group if gpu.numa_node is not None})
        if len(nodes) > 1:
            yield (
                f"no {len(names)} groups of {ranks} GPUs lie on one NUMA node each: {name} would span nodes "
                f"{', '.join(map(str, nodes))} (deploy doctor says what to change)"
            )
            return
    if report.lost_gpus:
        yield "a GPU does not answer: deploy doctor says which"


def assign_cpus(report: HostReport, nodes: Sequence[int]) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """CPU sets for engines on these NUMA nodes, and the CPUs that are left to the operating system.

    Whole physical cores are given away, with all their threads; engines on one node share it equally. Unknown
    processors give empty sets, which means "all".
    """
    online = set(report.cpu.online)
    node_cpus = {node.node: [cpu for cpu in node.cpus if not online or cpu in online] for node in report.numa or []}
    sets: list[tuple[int, ...]] = [()] * len(nodes)
    given: set[int] = set()
    for node in sorted(set(nodes)):
        cores = _cores(report, node_cpus.get(node, []))
        reserved = OS_CORES if len(cores) >= ENOUGH_CORES else 1
        usable = cores[reserved:]
        members = [position for position, home in enumerate(nodes) if home == node]
        share = len(usable) // len(members)
        for order, position in enumerate(members):
            part = usable[order * share : (order + 1) * share]
            sets[position] = tuple(sorted(cpu for core in part for cpu in core))
            given.update(sets[position])
    return sets, tuple(cpu for cpu in sorted(online) if cpu not in given)


def _cores(report: HostReport, cpus: list[int]) -> list[tuple[int, ...]]:
    """Physical cores among some CPUs, each with its threads, in order."""
    siblings = {cpu: group for group in report.cpu.thread_siblings for cpu in group}
    wanted = set(cpus)
    cores = {tuple(sorted(wanted & set(siblings.get(cpu, [cpu])))) for cpu in cpus}
    return sorted(cores)


def _transport(report: HostReport) -> tuple[str, str]:
    """`isolated` unless a measurement on this host says that direct copies are faster and right."""
    tests = report.active.transfers if report.active else []
    good = {test.transport: test.bytes_per_second or 0.0 for test in tests if test.outcome == "ok"}
    isolated, direct = good.get("isolated"), good.get("p2p")
    if isolated is not None and direct is not None and direct > 1.2 * isolated:
        return (
            "p2p",
            f"Measured here: {direct / 1e9:.1f} GB/s from GPU to GPU, {isolated / 1e9:.1f} through host memory",
        )
    if isolated is not None and direct is not None:
        return "isolated", f"Measured here: {isolated / 1e9:.1f} GB/s, and {direct / 1e9:.1f} from GPU to GPU"
    return "isolated", "Each container sees its own GPUs only; deploy doctor --probe measures whether p2p is faster"


def _settings(report: HostReport, groups: list[tuple[Gpu, ...]]) -> Iterable[Setting]:
    tests = report.active.all_reduces if report.active else []
    good = {test.peer_to_peer: test.bytes_per_second or 0.0 for test in tests if test.outcome == "ok"}
    failed = any(test.peer_to_peer and test.outcome != "ok" for test in tests)
    refused = [
        f"GPU {one.index} and GPU {other.index}"
        for group in groups
        for one, other in combinations(group, 2)
        if report.peer_access
        and report.peer_access.read.get(f"GPU{one.index}", {}).get(f"GPU{other.index}", "OK") != "OK"
    ]
    if failed:
        yield Setting("NCCL_P2P_LEVEL", "LOC", "all-reduce with peer-to-peer failed in doctor --probe: use host memory")
    elif refused:
        yield Setting("NCCL_P2P_LEVEL", "LOC", f"the driver refuses peer-to-peer between {refused[0]}: use host memory")
    elif False in good and True in good and good[True] < good[False]:
        yield Setting("NCCL_P2P_LEVEL", "LOC", "measured here: host memory is faster than peer-to-peer")
    else:
        nodes = max((len({gpu.numa_node for gpu in group}) for group in groups), default=1)
        level, why = (
            ("SYS", "a role spans NUMA nodes") if nodes > 1 else ("PHB", "each role's GPUs hang on one NUMA node")
        )
        yield Setting("NCCL_P2P_LEVEL", level, f"{why}: copy from GPU to GPU as far as that reaches")
    yield from _limits(report)


def _limits(report: HostReport) -> Iterable[Setting]:
    """Limits that the Docker daemon cannot raise for containers."""
    if report.limits.daemon_may_raise is not False:
        return
    for name, limit in (("MEMLOCK", report.limits.daemon_memlock), ("NOFILE", report.limits.daemon_nofile)):
        if limit and limit.hard != -1:
            yield Setting(name, limit.hard, "the Docker daemon has no more and cannot raise it")
