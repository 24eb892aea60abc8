"""Look at the GPUs of this host once, for the live view."""

from concurrent.futures import ThreadPoolExecutor

from deploy.host.machine import Machine
from deploy.host.parsers.nvidia_smi import QUERY_FIELDS, parse_query, parse_transfer_rates
from deploy.status.sample import GpuSample, gpu_sample


def sample_gpus(machine: Machine) -> list[GpuSample]:
    """All GPUs by index; empty without a driver. Takes about a second: PCIe counters are sampled over that time."""
    with ThreadPoolExecutor(2) as pool:
        query = pool.submit(machine.run, "nvidia-smi", f"--query-gpu={','.join(QUERY_FIELDS)}", "--format=csv")
        rates = pool.submit(machine.run, "nvidia-smi", "dmon", "-s", "t", "-c", "1")
        gpus, _ = parse_query(query.result().out)
        transfers = parse_transfer_rates(rates.result().out)
    return [gpu_sample(gpu, transfers.get(gpu.index)) for gpu in gpus]
