"""A small drawing of the machine: nodes, PCIe roots, GPUs, and which role gets what."""

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text
from rich.tree import Tree

from deploy.host.parsers.cpu_list import format_cpu_list
from deploy.host.report import Gpu, HostReport
from deploy.init.propose import Proposal, RolePlan

_COLOURS = ("cyan", "magenta", "green", "yellow")


def draw(report: HostReport, proposal: Proposal) -> RenderableType:
    """The machine as boxes, one a NUMA node, with the roles beside their GPUs and CPUs."""
    colours = {role.name: _COLOURS[number % len(_COLOURS)] for number, role in enumerate(proposal.roles)}
    role_of = {gpu.index: role for role in proposal.roles for gpu in role.gpus}
    known = [node.node for node in report.numa or []]
    nodes = sorted({*known, *(gpu.numa_node for gpu in report.gpus if gpu.numa_node is not None)}) or [0]
    boxes = [_box(report, proposal, node, nodes, role_of, colours) for node in nodes]
    return Columns(boxes, padding=(0, 1))


def _box(
    report: HostReport,
    proposal: Proposal,
    node: int,
    nodes: list[int],
    role_of: dict[int, RolePlan],
    colours: dict[str, str],
) -> Panel:
    entry = next((entry for entry in report.numa or [] if entry.node == node), None)
    gpus = [gpu for gpu in report.gpus if gpu.numa_node == node or (gpu.numa_node is None and node == nodes[0])]
    memory = f", {entry.memory_bytes / 1024**3:.0f} GiB" if entry and entry.memory_bytes else ""
    parts: list[RenderableType] = []
    roots: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        device = report.pci_at(gpu.pci_address)
        roots.setdefault(device.root if device and device.root else "PCIe root unknown", []).append(gpu)
    for root, members in roots.items():
        address = members[0].pci_address
        switch = " with switch" if address and len(report.bridges_above(address)) > 1 else ""
        tree = Tree(Text(f"{root}{switch}", style="dim"), guide_style="dim")
        for gpu in members:
            tree.add(_gpu(gpu, role_of.get(gpu.index), colours))
        parts.append(tree)
    parts += [
        Text(f"{role.name}: CPUs {format_cpu_list(list(role.cpus)) or 'all'}", style=colours[role.name])
        for role in proposal.roles
        if role.numa_node == node
    ]
    here = set(entry.cpus) if entry else set(proposal.system_cpus)
    system = [cpu for cpu in proposal.system_cpus if cpu in here]
    if system:
        parts.append(Text(f"system: CPUs {format_cpu_list(system)}", style="dim"))
    return Panel(Group(*parts), title=f"NUMA node {node}{memory}", title_align="left", expand=False)


def _gpu(gpu: Gpu, role: RolePlan | None, colours: dict[str, str]) -> Text:
    link = f" x{gpu.link.width_max}" if gpu.link.width_max else ""
    generation = f" gen{gpu.link.generation_max}" if gpu.link.generation_max else ""
    rank = f"  {role.name} rank {role.gpus.index(gpu)}" if role else "  free"
    text = Text(f"GPU {gpu.index} {gpu.pci_address or ''}{link}{generation}")
    return text + Text(rank, style=colours[role.name] if role else "dim")
