"""Run the processes of a probe with time limits, so that a hang is an answer and never a wait."""

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

OK, FAILED, WRONG_VALUES, HANG = 0, 1, 3, 4
Outcome = Literal["ok", "failed", "wrong_values", "hang"]
EXIT_STATUS: dict[Outcome, int] = {"ok": OK, "failed": FAILED, "wrong_values": WRONG_VALUES, "hang": HANG}
GRACE_SECONDS = 2.0
"""Others may still say something after the first process failed."""
_LAST_LINES = 50


def say(**values: Any) -> None:
    """Print one JSON object as a line."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


@dataclass
class Process:
    """A process of a probe and what it said.

    Attributes:
        messages: JSON objects it printed.
        log: its other lines, the last ones.
        status: exit status, None while it runs.
        ended_at: when, on the monotonic clock.
    """

    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    log: list[str] = field(default_factory=list[str])
    status: int | None = None
    ended_at: float = 0.0

    def place(self, stages: list[str]) -> int:
        """How far it came: the position of the last of these stages that it named, 0 before it names one."""
        named = [message["stage"] for message in self.messages if "stage" in message]
        return max((stages.index(stage) for stage in named if stage in stages), default=0)

    def last(self, key: str) -> Any:
        """The latest value it gave for a key, None if it gave none."""
        return next((message[key] for message in reversed(self.messages) if key in message), None)

    def take(self, line: str) -> None:
        """Sort a line into messages and log."""
        try:
            message: dict[str, Any] | None = json.loads(line) if line.startswith("{") else None
        except (ValueError, RecursionError):
            message = None
        if message is not None:
            self.messages.append(message)
        elif line.strip():
            self.log = [*self.log, line.rstrip()][-_LAST_LINES:]


@dataclass(frozen=True)
class Ended:
    """How a group of processes ended; `said` explains everything but "ok"."""

    outcome: Outcome
    said: str = ""


def run_together(processes: Sequence[Process], limits: Mapping[str, float]) -> Ended:
    """Run processes side by side until all end, one fails, or a stage lasts too long.

    Args:
        limits: seconds that each stage may last; a stage begins when the slowest process enters it. "start" is the
            first.

    Returns:
        "hang" names the stage; "wrong_values" and "failed" carry the words of the process that said so.
    """
    running = [
        subprocess.Popen(
            process.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | process.environment,
            start_new_session=True,
        )
        for process in processes
    ]
    order = list(limits)
    pending: dict[int, bytes] = {}
    stage, deadline = order[0], time.monotonic() + limits[order[0]]
    failed_at: float | None = None
    try:
        with selectors.DefaultSelector() as selector:
            for number, child in enumerate(running):
                assert child.stdout
                selector.register(child.stdout, selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select(0.1):
                    number: int = key.data
                    piece = os.read(key.fd, 65536)
                    *whole, pending[number] = (pending.get(number, b"") + piece).split(b"\n")
                    for line in whole if piece else [pending[number]]:
                        processes[number].take(line.decode(errors="replace"))
                    if not piece:
                        selector.unregister(key.fileobj)
                        processes[number].status = running[number].wait()
                        processes[number].ended_at = time.monotonic()
                reached = order[min(process.place(order) for process in processes)]
                if reached != stage:
                    stage, deadline = reached, time.monotonic() + limits[reached]
                now = time.monotonic()
                if failed_at is None and any(process.status for process in processes):
                    failed_at = now
                if failed_at is not None and now > failed_at + GRACE_SECONDS:
                    break
                if failed_at is None and now > deadline:
                    return Ended("hang", f"{stage}: not done after {limits[stage]:.0f} s")
    finally:
        for child in running:
            if child.poll() is None:
                child.kill()
            # A process that hangs in the driver cannot be killed: it is left behind.
            try:
                child.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                continue
    return _verdict(processes)


def _verdict(processes: Sequence[Process]) -> Ended:
    wrong = next((process for process in processes if process.status == WRONG_VALUES), None)
    if wrong:
        return Ended("wrong_values", str(wrong.last("said") or ""))
    failed = [process for process in processes if process.status]
    if failed:
        # The first to fail is the cause; the others lose their peer.
        bad = min(failed, key=lambda process: process.ended_at)
        return Ended("failed", str(bad.last("said") or (bad.log[-1] if bad.log else f"exit status {bad.status}")))
    return Ended("ok")
