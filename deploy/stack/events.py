"""What a long command reports while it works; the command line decides how that looks."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Step = Literal[
    "host", "image", "caches", "model", "start", "accept", "warm", "compile", "push", "stop", "clean", "heal", "drain"
]


@dataclass(frozen=True)
class Event:
    """One step of `up` (or one role within `start`) has begun, come further, or ended.

    Attributes:
        detail: what it is busy with, or what it found; may be empty.
        role: the role this is about; empty for the step as a whole.
        done: units finished so far, or None where a step has no measure.
        total: units in all, or None.
        seconds: how long it took, on `finished` and `failed`.
    """

    step: Step
    state: Literal["started", "progress", "finished", "failed"]
    detail: str = ""
    role: str = ""
    done: int | None = None
    total: int | None = None
    seconds: float | None = None


Report = Callable[[Event], None]


class Running:
    """A step under way: lets its body say what it is doing and what came of it."""

    def __init__(self, name: Step, report: Report) -> None:
        self.name: Step = name
        self.report = report
        self.outcome = ""

    def progress(self, detail: str, done: int | None = None, total: int | None = None) -> None:
        self.report(Event(self.name, "progress", detail, done=done, total=total))


@contextmanager
def step(name: Step, report: Report) -> Generator[Running]:
    """Report the beginning and the end of a step, and how long it took."""
    begun = time.monotonic()
    running = Running(name, report)
    report(Event(name, "started"))
    try:
        yield running
    except BaseException as error:
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else ""
        report(Event(name, "failed", why, seconds=time.monotonic() - begun))
        raise
    report(Event(name, "finished", running.outcome, seconds=time.monotonic() - begun))
