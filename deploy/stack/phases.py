"""Reads a role's own log: how far its start has come, and why it failed."""

import re
from collections.abc import Iterable

# What SGLang 0.5.23 and its router log, in the order in which a start passes through it.
PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("starting Python", re.compile(r"")),
    ("starting ranks", re.compile(r"server_args=|ServerArgs\(")),
    ("joining ranks", re.compile(r"Init (parallel|torch distributed) begin")),
    ("loading weights", re.compile(r"Load weight begin")),
    ("allocating KV cache", re.compile(r"Load weight end")),
    ("capturing graphs", re.compile(r"Capture .*(graph|begin)", re.IGNORECASE)),
    ("starting scheduler", re.compile(r"Memory pool end|max_total_num_tokens=|Uvicorn running")),
    ("warming up", re.compile(r"Start of pd disaggregation warmup")),
    ("ready", re.compile(r"The server is fired up and ready to roll")),
)
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_ERROR = re.compile(
    r"\b(error|exception|traceback|fatal|critical|killed|out of memory|refus\w+|cannot)\b", re.IGNORECASE
)
_TRACEBACK = "Traceback (most recent call last)"


def phase(log: str) -> str:
    """The last phase whose mark the log carries."""
    return next(name for name, mark in reversed(PHASES) if mark.search(log))


def later(one: str, other: str) -> str:
    """Of two phases the one that comes later in a start."""
    order = [name for name, _ in PHASES]
    return max(one, other, key=order.index)


def relevant(log: str, most: int = 12) -> list[str]:
    """The lines of a failed role's log that say why: the end of its last traceback, else its last errors, else its end.

    Args:
        log: the role's output, oldest line first.
        most: lines to return at most.
    """
    lines = [line.rstrip() for line in plain(log).splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    if starts:
        return _tail(_traceback(lines[starts[-1] :]), most)
    errors = [line for line in lines if _ERROR.search(line)]
    return _tail(errors or lines, most)


def plain(text: str) -> str:
    """Text without terminal escape codes."""
    return _ESCAPE.sub("", text)


def _traceback(lines: list[str]) -> list[str]:
    """A traceback: its head, the indented frames, and the exception's own line."""
    end = next((number for number, line in enumerate(lines[1:], 1) if not line[:1].isspace()), len(lines) - 1)
    return lines[: end + 1]


def _tail(lines: Iterable[str], most: int) -> list[str]:
    return list(lines)[-most:]
