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

    def stage(self) -> str:
        """The stage it reached last."""
        return next((str(message["stage"]) for message in reversed(self.messages) if "stage" in message), "start")

    def take(self, line: str) -> None:
        """Sort a line into messages and log."""
        try:
            message = json.loads(line) if line.startswith("{") else None
        except ValueError:
            message = None
        if isinstance(message, dict):
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
                reached = min((process.stage() for process in processes), key=_place(order))
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


def _place(order: list[str]) -> Any:
    return lambda stage: order.index(stage) if stage in order else len(order)


def _verdict(processes: Sequence[Process]) -> Ended:
    wrong = next((process for process in processes if process.status == WRONG_VALUES), None)
    if wrong:
        return Ended("wrong_values", next((str(m["said"]) for m in reversed(wrong.messages) if "said" in m), ""))
    failed = [process for process in processes if process.status]
    if failed:
        # The first to fail is the cause; the others lose their peer.
        bad = min(failed, key=lambda process: process.ended_at)
        said = next((str(m["said"]) for m in reversed(bad.messages) if "said" in m), "")
        return Ended("failed", said or (bad.log[-1] if bad.log else f"exit status {bad.status}"))
    return Ended("ok")
