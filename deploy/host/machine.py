"""The two things a probe may do on a host: run a command with a time limit, and look at files.

`Machine` is what the probe needs; `LocalMachine` (in probe_host.py, which may start processes) is the real one.
"""

from typing import Literal, NamedTuple, Protocol


class Ran(NamedTuple):
    """How a command ended. `missing`: there is no such command. `slow`: it did not end within its limit."""

    end: Literal["ok", "failed", "missing", "slow"]
    out: str = ""
    err: str = ""

    @property
    def text(self) -> str:
        """Both streams."""
        return f"{self.out}\n{self.err}" if self.err else self.out


class Machine(Protocol):
    """A host to look at. No method raises, none blocks longer than its limit."""

    def run(self, *command: str) -> Ran:
        """Run a command; C locale, no input."""
        ...

    def read(self, path: str) -> str | None:
        """The text of a file, None if it cannot be read."""
        ...

    def entries(self, path: str) -> list[str]:
        """Names in a folder, sorted; empty if it cannot be read."""
        ...

    def target(self, path: str) -> str | None:
        """Where a path leads once every symbolic link is followed, None if it does not exist."""
        ...
