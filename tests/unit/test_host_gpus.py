import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.host.errors import HostError
from deploy.host.gpus import GpuPlace, parse_query, require_node

# In the shape of nvidia-smi's CSV; the UUIDs are made up.
QUERY_OUTPUT = """\
0, GPU-00000000-0000-0000-0000-000000000000, 00000000:01:00.0
1, GPU-11111111-1111-1111-1111-111111111111, 00000000:C1:00.0
"""
PLACES = [
    GpuPlace(0, "GPU-a", "0000:01:00.0", 0),
    GpuPlace(1, "GPU-b", "0000:c1:00.0", 1),
    GpuPlace(2, "GPU-c", "", -1),
]


def test_addresses_are_spelled_as_in_sysfs() -> None:
    assert [place.pci_address for place in parse_query(QUERY_OUTPUT)] == ["0000:01:00.0", "0000:c1:00.0"]


@given(st.text())
def test_no_text_stops_the_parser(text: str) -> None:
    parse_query(text)


@pytest.mark.parametrize("devices", [["nvidia.com/gpu=0", "nvidia.com/gpu=1"], ["nvidia.com/gpu=GPU-b"]])
def test_a_gpu_on_another_node_is_named(devices: list[str]) -> None:
    with pytest.raises(HostError, match=r"prefill is bound to NUMA node 0, but nvidia.com/gpu=\S+ \(node 1\)"):
        require_node("prefill", devices, 0, PLACES)


def test_what_is_not_known_is_not_refused() -> None:
    require_node("decode", ["nvidia.com/gpu=2", "nvidia.com/gpu=9"], 1, PLACES)
    require_node("decode", ["nvidia.com/gpu=0"], 1, [])
