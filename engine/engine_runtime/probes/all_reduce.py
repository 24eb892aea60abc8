"""A real all-reduce over all ranks with a time limit, its values checked.

    python -m engine_runtime.probes.all_reduce --device cuda --peer-to-peer off

Exit status: 0 right values, 1 it failed, 3 wrong values, 4 it never completed.
"""

import argparse
import importlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_runtime.probes.bounded import EXIT_STATUS, FAILED, WRONG_VALUES, Process, run_together, say

SMALL_BYTES = 12 * 1024
"""What decode reduces at batch 1: hidden size 4096 in bf16, and a little more."""
SMALL_REPEATS = 20
LARGE_REPEATS = 5
STARTING_SECONDS = 120.0
_PERIOD = 1000


def main() -> int:
    """Start the ranks, print the result as JSON, return the exit status."""
    options = _options()
    if options.rank is not None:
        status = rank(options)
        sys.stdout.flush()
        # Tearing a communicator down can hang as well, and there is nothing left to save.
        os._exit(status)
    ranks = options.ranks or _device_count(options.device)
    if ranks < 2:
        say(probe="all_reduce", outcome="failed", said=f"{ranks} {options.device} devices; an all-reduce needs two")
        return FAILED
    environment = {"NCCL_P2P_DISABLE": "0" if options.peer_to_peer == "on" else "1"}
    if options.device == "cpu":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*sys.argv[1:], "--ranks", str(ranks), "--meet", str(Path(folder) / "store")]
        module = [sys.executable, "-m", "engine_runtime.probes.all_reduce"]
        processes = [Process([*module, *arguments, "--rank", str(number)], environment) for number in range(ranks)]
        limits = {"start": STARTING_SECONDS, "first": options.limit, "small": options.limit, "large": options.limit}
        ended = run_together(processes, limits)
    say(
        probe="all_reduce",
        device=options.device,
        ranks=ranks,
        peer_to_peer=options.peer_to_peer == "on",
        outcome=ended.outcome,
        said=ended.said,
        seconds=processes[0].last("seconds"),
        bytes_per_second=processes[0].last("bytes_per_second"),
    )
    return EXIT_STATUS[ended.outcome]


def rank(options: argparse.Namespace) -> int:
    """One rank: reduce small buffers, then large ones, and compare every element."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    world, me = options.ranks, options.rank
    device = torch.device(f"cuda:{me}" if options.device == "cuda" else "cpu")
    if options.device == "cuda":
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if options.device == "cuda" else "gloo",
        init_method=f"file://{options.meet}",
        rank=me,
        world_size=world,
    )
    # Every rank is here before the clock of the first all-reduce starts.
    say(stage="first")
    if options.plant == "hang" and me == world - 1:
        time.sleep(3600)
    if options.plant == "crash" and me == world - 1:
        raise RuntimeError("planted crash")

    def reduce(count: int, repeats: int) -> tuple[float, str]:
        base = torch.arange(count, device=device, dtype=torch.float32) % _PERIOD
        # Whole numbers far below 2^24: float32 sums them exactly in any order.
        right = base * world + world * (world + 1) / 2
        taken = 0.0
        for _ in range(repeats):
            mine = base + (me + 1)
            _wait(torch, device)
            started = time.perf_counter()
            distributed.all_reduce(mine)
            _wait(torch, device)
            taken += time.perf_counter() - started
            if options.plant == "wrong" and me == 0:
                mine[count // 2] += 1
            wrong = (mine != right).nonzero().flatten()
            if len(wrong):
                first = int(wrong[0])
                return taken, (
                    f"rank {me}: {len(wrong)} of {count} elements wrong, the first at {first}: "
                    f"{float(mine[first])} instead of {float(right[first])}"
                )
        return taken / repeats, ""

    seconds = 0.0
    for stage, count, repeats in (
        ("first", SMALL_BYTES // 4, 1),
        ("small", SMALL_BYTES // 4, SMALL_REPEATS),
        ("large", options.bytes // 4, LARGE_REPEATS),
    ):
        say(stage=stage)
        seconds, wrong = reduce(count, repeats)
        if wrong:
            say(said=wrong)
            return WRONG_VALUES
    say(seconds=seconds, bytes_per_second=options.bytes / seconds)
    return 0


def _wait(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_count(device: str) -> int:
    if device == "cpu":
        return 2
    torch: Any = importlib.import_module("torch")
    return int(torch.cuda.device_count())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, help="default: every GPU; two on a CPU")
    parser.add_argument("--peer-to-peer", choices=["on", "off"], default="on")
    parser.add_argument("--bytes", type=int, default=64 * 1024**2, help="size of the large buffer")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds each stage may last")
    parser.add_argument("--plant", choices=["wrong", "hang", "crash"], help="make it go wrong, to test the test")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
