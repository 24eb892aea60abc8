"""Look at the GPUs of this host once, for the live view."""

from concurrent.futures import ThreadPoolExecutor

from deploy.host.machine import Machine
from deploy.host.parsers.nvidia_smi import QUERY_FIELDS, parse_query, parse_transfer_rates
from deploy.host.parsers.text import integer
from deploy.host.report import Gpu
from deploy.status.sample import GpuSample, gpu_sample

_QUERY = ("nvidia-smi", f"--query-gpu={','.join(QUERY_FIELDS)}", "--format=csv")


def find_gpus(machine: Machine) -> list[Gpu]:
    """The GPUs that the driver lists, with their NUMA nodes as the kernel knows them; empty without a driver."""
    gpus, _ = parse_query(machine.run(*_QUERY).out)
    nodes = {gpu.index: integer(machine.read(f"/sys/bus/pci/devices/{gpu.pci_address}/numa_node")) for gpu in gpus}
    return [gpu.model_copy(update={"numa_node": _known(nodes[gpu.index])}) for gpu in gpus]


def _known(node: int | None) -> int | None:
    return None if node is None or node < 0 else node


def sample_gpus(machine: Machine) -> list[GpuSample]:
    """All GPUs by index; empty without a driver. Takes about a second: PCIe counters are sampled over that time."""
    with ThreadPoolExecutor(2) as pool:
        query = pool.submit(find_gpus, machine)
        rates = pool.submit(machine.run, "nvidia-smi", "dmon", "-s", "t", "-c", "1")
        gpus = query.result()
        transfers = parse_transfer_rates(rates.result().out)
    return [gpu_sample(gpu, transfers.get(gpu.index)) for gpu in gpus]
