"""The error that a person can mend."""


class BenchError(Exception):
    """What happened, why as far as it is known, and what to do about it (one line each)."""

    def __init__(self, message: str, why: str = "", fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.why = why
        self.fix = fix
