import pytest

from deploy.host.errors import HostError
from deploy.host.gpus import require_node
from deploy.host.report import Gpu

GPUS = [Gpu(index=0, uuid="GPU-a", numa_node=0), Gpu(index=1, uuid="GPU-b", numa_node=1), Gpu(index=2, uuid="GPU-c")]


@pytest.mark.parametrize("devices", [["nvidia.com/gpu=0", "nvidia.com/gpu=1"], ["nvidia.com/gpu=GPU-b"]])
def test_a_gpu_on_another_node_is_named(devices: list[str]) -> None:
    with pytest.raises(HostError, match=r"prefill is bound to NUMA node 0, but nvidia.com/gpu=\S+ \(node 1\)"):
        require_node("prefill", devices, 0, GPUS)


def test_what_is_not_known_is_not_refused() -> None:
    require_node("decode", ["nvidia.com/gpu=2", "nvidia.com/gpu=9"], 1, GPUS)
    require_node("decode", ["nvidia.com/gpu=0"], 1, [])
