"""The texts are cuts from real logs of SGLang 0.5.23 with NIXL 1.5.1 (UCX 1.23.0); the last is made up, as marked."""

import pytest

from deploy.stack.transport import RemoteWrite, bytes_sent, describe, remote_writes

# Prefill in its own container, decode in another one, no GPU.
OVER_TCP = """\
[1795976957.724998] [2a20935456d1:48   :0]   +--------+-------------+-----------------------------------+
[1795976957.724998] [2a20935456d1:48   :0]   | a7c28c25-1590-42a1-99a1-f90b1d5 self cfg#0               |
[1795976957.724998] [2a20935456d1:48   :0]   | remote memory write by ucp_put* from host memory to host |
[1795976957.724998] [2a20935456d1:48   :0]   +--------+-------------+-----------------------------------+
[1795976957.724998] [2a20935456d1:48   :0]   | Range  | Description |              Config               |
[1795976957.724998] [2a20935456d1:48   :0]   +--------+-------------+-----------------------------------+
[1795976957.724998] [2a20935456d1:48   :0]   | 0..inf | zero-copy   | cma/memory                        |
[1795976957.724998] [2a20935456d1:48   :0]   +--------+-------------+-----------------------------------+
[1795976957.742809] [2a20935456d1:48   :0]   | a7c28c25-1590-42a1-99a1-f90b1d5 intra-node cfg#0         |
[1795976957.742809] [2a20935456d1:48   :0]   | remote memory write by ucp_put* from host memory to host |
[1795976957.742809] [2a20935456d1:48   :0]   | 0..inf | zero-copy   | cma/memory                        |
[1795976980.146586] [2a20935456d1:48   :2]   +--------+-------------+-----------------------------------+
[1795976980.146586] [2a20935456d1:48   :2]   | a7c28c25-1590-42a1-99a1-f90b1d5 inter-node cfg#1         |
[1795976980.146586] [2a20935456d1:48   :2]   | remote memory write by ucp_put* from host memory to host |
[2026-11-29 18:29:40] Prefill batch, #new-seq: 1, #new-token: 25, #cached-token: 0, token usage: 0.00
[1795976980.146586] [2a20935456d1:48   :2]   +--------+-------------+-----------------------------------+
[1795976980.146586] [2a20935456d1:48   :2]   | Range  | Description |              Config               |
[1795976980.146586] [2a20935456d1:48   :2]   +--------+-------------+-----------------------------------+
[1795976980.146586] [2a20935456d1:48   :2]   | 0..inf | zero-copy   | tcp/eth0                          |
[1795976980.146586] [2a20935456d1:48   :2]   +--------+-------------+-----------------------------------+
[1795976980.213893] [2a20935456d1:48   :3]   | a7c28c25-1590-42a1-99a1-f90b1d5 inter-node cfg#1                |
[1795976980.213893] [2a20935456d1:48   :3]   |[2026-11-29 18:29:40] INFO:     172.18.0.4:48010 - "POST /v1/chat"""
# Both processes in one PID namespace, no GPU.
OVER_CMA = """\
[1795976495.361456] [vm:23290:2]   | aed805be-8b4a-457a-a04d-2c0e611 intra-node cfg#1         |
[1795976495.361456] [vm:23290:2]   | remote memory write by ucp_put* from host memory to host |
[1795976495.361456] [vm:23290:2]   | Range  | Description |              Config               |
[1795976495.361456] [vm:23290:2]   | 0..inf | zero-copy   | cma/memory                        |
[1795976495.365659] [vm:23290:2]   | aed805be-8b4a-457a-a04d-2c0e611 intra-node cfg#1 |
[1795976495.365659] [vm:23290:2]   | active message by ucp_am_send* from host memory  |
[1795976495.365659] [vm:23290:2]   | 16516..inf | multi-frag copy-in | tcp/lo         |
[1795976495.704946] [vm:23290:3]   | aed805be-8b4a-457a-a04d-2c0e611 intra-node cfg#1                |
[1795976495.704946] [vm:23290:3]   | remote memory write by ucp_put*(multi) from host memory to host |
[1795976495.704946] [vm:23290:3]   | 0..inf | zero-copy   | cma/memory                               |
"""
# Made up after UCX's table format: a GPU host was not there to capture it.
BETWEEN_GPUS = """\
| aed805be-8b4a-457a-a04d-2c0e611 intra-node cfg#1                            |
| remote memory write by ucp_put*(multi) from cuda/GPU0 memory to cuda/GPU4   |
| 0..2047 | zero-copy   | tcp/eth0                                             |
| 2K..inf | zero-copy   | 50% on cuda_ipc/cuda and 50% on rc_mlx5/mlx5_0:1     |
"""


def test_the_transport_between_two_containers_is_read_from_a_log_that_other_lines_interrupt() -> None:
    assert remote_writes(OVER_TCP) == [RemoteWrite("host", "host", "zero-copy", ("tcp/eth0",))]


def test_the_connection_of_an_engine_to_itself_is_not_taken_for_its_peer() -> None:
    before_the_first_request = OVER_TCP[: OVER_TCP.index("[1795976980")]
    assert remote_writes(before_the_first_request) == []


def test_the_transport_of_control_messages_is_not_taken_for_that_of_the_cache() -> None:
    assert remote_writes(OVER_CMA) == [RemoteWrite("host", "host", "zero-copy", ("cma/memory",))]


def test_every_lane_of_large_blocks_is_named_and_none_of_small_ones() -> None:
    [write] = remote_writes(BETWEEN_GPUS)
    assert (write.source, write.destination) == ("cuda/GPU0", "cuda/GPU4")
    assert write.lanes == ("cuda_ipc/cuda", "rc_mlx5/mlx5_0:1")
    assert write.transports == ("cuda_ipc", "rc_mlx5")


def test_the_description_names_the_transport_first() -> None:
    assert describe(remote_writes(OVER_TCP)) == "tcp (tcp/eth0, host to host)"


def test_nothing_connected_is_described_as_unknown() -> None:
    assert describe(remote_writes("")) == "unknown"


def test_bytes_are_summed_over_the_ranks() -> None:
    page = """\
# HELP agent_tx_bytes_total Cumulative transmitted bytes
# TYPE agent_tx_bytes_total counter
agent_tx_bytes_total{hostname="prefill",agent_name="aed805be",pid="48",agent_instance="0"} 8000
agent_tx_bytes_total{hostname="prefill",agent_name="0fc2a9d1",pid="49",agent_instance="0"} 1600
# TYPE agent_rx_bytes_total counter
agent_rx_bytes_total{hostname="prefill",agent_name="aed805be",pid="48",agent_instance="0"} 7
"""
    assert bytes_sent(page) == 9600


def test_a_page_that_is_not_nixls_is_refused() -> None:
    with pytest.raises(ValueError, match="agent_tx_bytes_total"):
        bytes_sent("sglang_num_requests_total 3\n")
