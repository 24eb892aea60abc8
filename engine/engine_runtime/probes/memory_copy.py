"""Copies on each GPU and between each two, their values checked and their bandwidth measured.

    python -m engine_runtime.probes.memory_copy --device cuda

Prints one JSON object for each GPU and each ordered pair. Exit status: 0 all right, 1 it failed, 3 wrong values,
4 a copy never completed.
"""

import argparse
import importlib
import sys
import time
from typing import Any

from engine_runtime.probes.bounded import EXIT_STATUS, FAILED, WRONG_VALUES, Process, run_together, say

REPEATS = 10


def main() -> int:
    """Run the copies in a process of their own, print its results, return the exit status."""
    options = _options()
    if options.inside:
        return copies(options)
    module = [sys.executable, "-m", "engine_runtime.probes.memory_copy", *sys.argv[1:], "--inside"]
    process = Process(module)
    ended = run_together([process], {"start": 120.0, "copies": options.limit})
    results = [message for message in process.messages if "kind" in message]
    for result in results:
        say(probe="memory_copy", **result)
    if ended.outcome in {"hang", "failed"}:
        say(probe="memory_copy", kind="ended", outcome=ended.outcome, said=ended.said, at=process.last("next"))
    return EXIT_STATUS[ended.outcome]


def copies(options: argparse.Namespace) -> int:
    """Copy on each device, then between each ordered pair."""
    torch: Any = importlib.import_module("torch")
    count = options.count or (torch.cuda.device_count() if options.device == "cuda" else 1)
    if not count:
        say(said="no CUDA device")
        return FAILED
    devices = [torch.device(f"cuda:{number}" if options.device == "cuda" else "cpu") for number in range(count)]
    say(stage="copies")
    wrong = False
    for number, device in enumerate(devices):
        say(next={"gpu": number})
        speed, correct = _copy(torch, device, device, options)
        # A copy on one device reads and writes every byte there.
        say(kind="copy", gpu=number, bytes_per_second=2 * speed, correct=correct)
        wrong |= not correct
    for source in range(count):
        for target in range(count):
            if source == target:
                continue
            say(next={"source": source, "target": target})
            speed, correct = _copy(torch, devices[source], devices[target], options)
            access = options.device == "cuda" and torch.cuda.can_device_access_peer(source, target)
            say(
                kind="peer",
                source=source,
                target=target,
                bytes_per_second=speed,
                correct=correct,
                peer_access=access,
            )
            wrong |= not correct
    return WRONG_VALUES if wrong else 0


def _copy(torch: Any, source: Any, target: Any, options: argparse.Namespace) -> tuple[float, bool]:
    """Bytes per second of a copy, and whether every byte arrived."""
    count = options.bytes // 8
    made = _pattern(torch, count, source)
    there = torch.zeros(count, dtype=torch.int64, device=target)
    there.copy_(made)
    _wait(torch, source, target)
    started = time.perf_counter()
    for _ in range(REPEATS):
        there.copy_(made)
    _wait(torch, source, target)
    seconds = time.perf_counter() - started
    if options.plant == "wrong":
        there[count // 2] ^= 1
    # Made anew where it arrived: a copy back could undo the damage.
    return options.bytes * REPEATS / seconds, bool(torch.equal(there, _pattern(torch, count, target)))


def _pattern(torch: Any, count: int, device: Any) -> Any:
    """Different in every eight bytes, the same on every device."""
    return torch.arange(count, dtype=torch.int64, device=device) * 0x9E3779B97F4A7C1 + 12345


def _wait(torch: Any, *devices: Any) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--count", type=int, help="default: every GPU; one on a CPU")
    parser.add_argument("--bytes", type=int, default=256 * 1024**2)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds all copies together may last")
    parser.add_argument("--plant", choices=["wrong"], help="make it go wrong, to test the test")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
