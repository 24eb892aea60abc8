"""A NIXL transfer between two processes as prefill makes it: a write into the other's registered memory.

    python -m engine_runtime.probes.nixl_transfer pair --memory cuda:0 --to cuda:1
    python -m engine_runtime.probes.nixl_transfer target --memory cuda:0 --address 0.0.0.0:31999
    python -m engine_runtime.probes.nixl_transfer initiator --memory cuda:0 --address HOST:31999

`pair` runs both here; in two containers, `target` and `initiator` are started one in each. UCX's own words about the
transport it chose (UCX_PROTO_INFO) go to standard error. UCX_TLS and the like come from the environment.
Exit status: 0 right values, 1 it failed, 3 wrong values, 4 it never completed.
"""

import argparse
import importlib
import socket
import struct
import sys
import time
from typing import Any

from engine_runtime.probes.bounded import EXIT_STATUS, WRONG_VALUES, Outcome, Process, run_together, say

REPEATS = 10
CONNECT_SECONDS = 60.0


def main() -> int:
    """Run one side, or both; print the result as JSON; return the exit status."""
    options = _options()
    if options.side == "target":
        return target(options)
    if options.side == "initiator":
        try:
            outcome, said, speed = initiator(options)
        except Exception as error:
            outcome, said, speed = "failed", f"{type(error).__name__}: {error}", None
        _result(options, outcome, said, speed)
        return EXIT_STATUS[outcome]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    module = [sys.executable, "-m", "engine_runtime.probes.nixl_transfer"]
    common = ["--address", address, "--bytes", str(options.bytes), "--limit", str(options.limit)]
    common += ["--plant", options.plant] if options.plant else []
    # The same words that compose.yaml asks UCX for.
    environment = {"UCX_PROTO_INFO": "*remote memory write*"}
    processes = [
        Process([*module, "initiator", "--memory", options.memory, *common], environment),
        Process([*module, "target", "--memory", options.to or options.memory, *common], environment),
    ]
    ended = run_together(processes, {"start": CONNECT_SECONDS + 60, "transfer": options.limit + 5})
    sys.stderr.write("".join(f"{line}\n" for line in processes[0].log))
    _result(options, ended.outcome, ended.said, processes[0].last("bytes_per_second"))
    return EXIT_STATUS[ended.outcome]


def target(options: argparse.Namespace) -> int:
    """Offer memory, wait until the other side has written, and check it."""
    host, port = options.address.rsplit(":", 1)
    with socket.create_server((host, int(port))) as server:
        server.settimeout(CONNECT_SECONDS)
        link, _ = server.accept()
    with link:
        link.settimeout(options.limit + CONNECT_SECONDS)
        torch, memory, agent = _register("target", options, empty=True)
        _send(link, agent.get_agent_metadata())
        _send(link, agent.get_serialized_descs(agent.get_xfer_descs(memory)))
        say(stage="transfer")
        _receive(link)
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)
        if options.plant == "wrong":
            memory[len(memory) // 2] ^= 1
        expected = _pattern(torch, len(memory), memory.device)
        bad = int((memory != expected).sum())
        said = f"{bad} of {len(memory)} eight-byte words arrived wrong" if bad else ""
        _send(link, said.encode())
        if said:
            say(said=said)
    return WRONG_VALUES if bad else 0


def initiator(options: argparse.Namespace) -> tuple[Outcome, str, float | None]:
    """Write into the target's memory, timed, and hear from it whether it arrived.

    Returns:
        How it ended, the words for it, and bytes per second if it was right.
    """
    with _connect(options.address) as link:
        link.settimeout(options.limit + CONNECT_SECONDS)
        _, memory, agent = _register("initiator", options, empty=False)
        peer = agent.add_remote_agent(_receive(link))
        theirs = agent.deserialize_descs(_receive(link))
        say(stage="transfer")
        if options.plant == "hang":
            time.sleep(3600)
        name = peer.decode() if isinstance(peer, bytes) else peer
        handle = agent.initialize_xfer("WRITE", agent.get_xfer_descs(memory), theirs, name)
        deadline = time.monotonic() + options.limit
        # The first transfer also connects.
        if not _write(agent, handle, deadline):
            return "hang", "the first transfer never completed", None
        started = time.perf_counter()
        for _ in range(REPEATS):
            if not _write(agent, handle, deadline):
                return "hang", "a transfer never completed", None
        speed = memory.numel() * 8 * REPEATS / (time.perf_counter() - started)
        _send(link, b"written")
        said = _receive(link).decode()
        agent.release_xfer_handle(handle)
    return ("wrong_values", said, None) if said else ("ok", "", speed)


def _write(agent: Any, handle: Any, deadline: float) -> bool:
    """One transfer; False if it was not done before the deadline.

    Raises:
        RuntimeError: NIXL reports an error.
    """
    state = agent.transfer(handle)
    while state not in {"DONE", "ERR"}:
        if time.monotonic() > deadline:
            return False
        state = agent.check_xfer_state(handle)
    if state == "ERR":
        raise RuntimeError("NIXL reports an error for the transfer")
    return True


def _register(name: str, options: argparse.Namespace, *, empty: bool) -> tuple[Any, Any, Any]:
    torch: Any = importlib.import_module("torch")
    nixl: Any = importlib.import_module("nixl._api")
    device = torch.device(options.memory)
    if device.type == "cuda":
        # UCX takes the current device's context.
        torch.cuda.set_device(device)
    count = options.bytes // 8
    memory = torch.zeros(count, dtype=torch.int64, device=device) if empty else _pattern(torch, count, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
    agent.register_memory(memory)
    return torch, memory, agent


def _pattern(torch: Any, count: int, device: Any) -> Any:
    return torch.arange(count, dtype=torch.int64, device=device) * 0x9E3779B97F4A7C1 + 12345


def _result(options: argparse.Namespace, outcome: str, said: str, speed: float | None) -> None:
    say(probe="nixl_transfer", memory=options.memory, outcome=outcome, said=said, bytes_per_second=speed)


def _connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _send(link: socket.socket, data: bytes) -> None:
    link.sendall(struct.pack(">Q", len(data)) + data)


def _receive(link: socket.socket) -> bytes:
    (length,) = struct.unpack(">Q", _exactly(link, 8))
    return _exactly(link, length)


def _exactly(link: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        piece = link.recv(count - len(data))
        if not piece:
            raise ConnectionError("the other side ended")
        data += piece
    return bytes(data)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=["pair", "target", "initiator"])
    parser.add_argument("--memory", default="cuda:0", help="cpu or cuda:N; of the initiator in a pair")
    parser.add_argument("--to", help="memory of the target in a pair, default the same")
    parser.add_argument("--address", default="127.0.0.1:31999", help="where target and initiator meet")
    parser.add_argument("--bytes", type=int, default=256 * 1024**2)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds all transfers together may last")
    parser.add_argument("--plant", choices=["wrong", "hang"], help="make it go wrong, to test the test")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
