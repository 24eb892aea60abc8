"""The error that a person can mend."""

from typing import ClassVar


class BenchError(Exception):
    """What happened, why as far as it is known, and what to do about it (one line each)."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, why: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.why = why
        self.fix = fix


class NoResult(BenchError):
    """What is named as a run is none."""

    exit_code = 2
