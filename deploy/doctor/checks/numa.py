"""Checks of NUMA nodes and processors: where roles can live."""

from collections import Counter
from collections.abc import Iterator

from deploy.doctor.check import check
from deploy.doctor.checks.common import TENSOR_PARALLEL, gpus_of, listing, wants_gpus
from deploy.doctor.finding import Needs, Problem, error, note, warning
from deploy.host.parsers.cpu_list import format_cpu_list, parse_cpu_list
from deploy.host.report import HostReport

GROUP = "NUMA and processors"
BINDING_LINK = "https://github.com/1Cat-vLLM/1Cat-vLLM/issues/678"


@check("numa.gpu_node", GROUP)
def gpu_node(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """The firmware does not say which node a GPU hangs on."""
    unknown = [gpu for gpu in report.gpus if gpu.numa_node is None]
    if unknown and len(report.numa or []) > 1:
        yield warning(
            f"the NUMA node of {listing(unknown)} is not known",
            "ranks cannot be bound to the memory next to their GPU",
            "update the BIOS, or enable 'ACPI SRAT' / 'NUMA' there; until then set numa_node in deploy.toml by hand",
        )


@check("numa.missing_cpu", GROUP)
def missing_cpu(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """CPUs that exist but are offline: a cpuset that names one is refused."""
    offline = sorted(set(report.cpu.present) - set(report.cpu.online)) if report.cpu.online else []
    if offline:
        shown = format_cpu_list(offline)
        yield warning(
            f"offline CPUs: {shown}",
            "a container's cpuset that names one of them does not start, and its core's work falls to others",
            "bring them online, or leave them out of the roles' cpus (deploy init does)",
            *(f"echo 1 | sudo tee /sys/devices/system/cpu/cpu{cpu}/online" for cpu in offline[:8]),
        )


@check("numa.no_memory", GROUP)
def no_memory(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """A node with CPUs or GPUs and no memory of its own."""
    used = {gpu.numa_node for gpu in report.gpus}
    for node in report.numa or []:
        if node.memory_bytes == 0 and (node.cpus or node.node in used):
            yield warning(
                f"NUMA node {node.node} has no memory",
                "a rank bound to it cannot allocate there: the engine fails at start or works over the other socket",
                "fill memory channels of every socket",
            )


@check("numa.spread", GROUP)
def spread(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """GPUs lie on the nodes such that no four of one node remain for each role."""
    count = Counter(gpu.numa_node for gpu in report.gpus if gpu.numa_node is not None)
    total = sum(count.values())
    groups = sum(number // TENSOR_PARALLEL for number in count.values())
    if total < TENSOR_PARALLEL or groups >= total // TENSOR_PARALLEL or needs.roles:
        return
    shown = ", ".join(f"node {node}: {number}" for node, number in sorted(count.items()))
    sockets = report.cpu.sockets or 1
    if len(report.numa or []) > sockets:
        yield warning(
            f"{len(report.numa or [])} NUMA nodes on {sockets} sockets, GPUs spread over them ({shown})",
            "each role's ranks would sit on several nodes, each with a fraction of the memory bandwidth",
            "set 'NUMA nodes per socket' to NPS1 in the BIOS (Intel: switch sub-NUMA clustering off)",
        )
    else:
        yield warning(
            f"GPUs are spread unevenly over the NUMA nodes ({shown})",
            "one role must take GPUs of both nodes: its all-reduce crosses the link between the sockets in every layer",
            f"move cards so that each node has a multiple of {TENSOR_PARALLEL}",
        )


@check("numa.roles", GROUP)
def roles(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """deploy.toml places a role elsewhere than its GPUs are."""
    nodes = {node.node: set(node.cpus) for node in report.numa or []}
    online = set(report.cpu.online)
    for role in needs.roles:
        gpus = gpus_of(report, role)
        placed = {gpu.index: gpu.numa_node for gpu in gpus if gpu.numa_node is not None}
        elsewhere = [f"GPU {index} is on node {node}" for index, node in placed.items() if node != role.numa_node]
        if elsewhere:
            there = set(placed.values())
            yield error(
                f"deploy.toml binds {role.name} to NUMA node {role.numa_node}, but {', '.join(elsewhere)}",
                "every copy to the host, and every all-reduce between nodes, crosses the link between the sockets",
                f"set numa_node = {there.pop()} under [{role.name}]"
                if len(there) == 1
                else f"choose GPUs of one node for [{role.name}] (deploy init proposes them)",
                look="nvidia-smi topo -m",
                link=BINDING_LINK,
            )
        cpus = set(parse_cpu_list(role.cpus))
        if absent := sorted(cpus - online) if online else []:
            yield error(
                f"cpus of {role.name} names CPUs that are not online: {format_cpu_list(absent)}",
                "Docker refuses to start the container",
                f'set cpus = "{format_cpu_list(sorted(cpus - set(absent)))}" under [{role.name}]',
            )
        near = nodes.get(role.numa_node, set[int]())
        if near and (outside := sorted((cpus & online) - near)):
            yield warning(
                f"cpus of {role.name} includes CPUs of other NUMA nodes: {format_cpu_list(outside)}",
                "a container-wide cpuset does not keep ranks on their node; threads there work on remote memory",
                f'set cpus = "{format_cpu_list(sorted(cpus & near))}" under [{role.name}]',
                link=BINDING_LINK,
            )


@check("numa.balancing", GROUP)
def balancing(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """The kernel moves pages between nodes by itself."""
    if report.memory.numa_balancing and len(report.numa or []) > 1 and wants_gpus(report, needs):
        yield note(
            "automatic NUMA balancing is on",
            "the kernel unmaps pages to learn who uses them, which stalls threads that are bound to their node anyway",
            "",
            "echo kernel.numa_balancing=0 | sudo tee /etc/sysctl.d/90-numa-balancing.conf",
            "sudo sysctl --system",
        )


@check("cpu.governor", GROUP)
def governor(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Processors that clock down between steps."""
    slow = [name for name in report.cpu.governors if name != "performance"]
    if slow and wants_gpus(report, needs):
        yield warning(
            f"CPU frequency governor: {', '.join(slow)}",
            "launching thousands of small kernels a step is bound by one core's clock",
            "",
            "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor",
        )
