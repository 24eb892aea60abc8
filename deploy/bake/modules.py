"""Compiles on a host without a GPU what the image leaves to nvcc on the first GPU host, for the artifact beside it."""

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.bake import artifact, container
from deploy.image.registry import Client
from deploy.lock.model import ImageLock
from deploy.stack.state import State

GPU = "sm_120"
"""What `compile_modules.py` compiles for."""
JOB_BYTES = 3 << 30
"""Memory to count for a compiler: those of CUTLASS's kernels take the most."""
STEP = re.compile(r"\[(\d+)/(\d+)\] ")

Report = Callable[[str, int | None, int | None], None]


@dataclass(frozen=True)
class Module:
    """One compiled module.

    Attributes:
        seconds: of all its compilers together.
        size: bytes.
    """

    name: str
    seconds: float
    size: int


@dataclass
class Heard:
    """What a compiling container has printed.

    Attributes:
        modules: that are complete.
        complaints: lines in which a compiler says why it failed.
    """

    modules: list[Module] = field(default_factory=list[Module])
    complaints: list[str] = field(default_factory=list[str])

    def line(self, text: str, report: Report) -> None:
        """Take one line in."""
        if match := STEP.match(text):
            # What follows is a compiler's command; its last file is what it makes.
            report(Path(text.split()[-1]).name[:60], int(match[1]), int(match[2]))
        elif text.startswith("{"):
            facts: Any = json.loads(text)
            self.modules.append(Module(facts["module"], facts["seconds"], facts["bytes"]))
            report(f"{facts['module']} is complete", None, None)
        elif "error" in text.lower():
            self.complaints.append(text)


def jobs_that_fit(processors: int, memory: int) -> int:
    """Compilers at a time.

    Args:
        memory: free, in bytes.
    """
    return max(1, min(processors, memory // JOB_BYTES))


def workshop(image: ImageLock) -> str:
    """The project in whose cache an image's modules are compiled. It stays when it is interrupted."""
    return f"dsv4-modules-{image.inputs[:16]}"


def compile_missing(image: ImageLock, name: str, names: Sequence[str], jobs: int, report: Report) -> list[Module]:
    """Compile the modules that neither an earlier run nor the locked cache has; these.

    Args:
        name: what Docker calls the image.
        names: of modules; all if empty.
        report: called with words, and with steps done and in all.

    Raises:
        DeployError: a compiler fails.
    """
    heard = Heard()
    container.compile_modules(
        workshop(image), name, names, jobs, lambda text: heard.line(text, report), lambda: heard.complaints
    )
    return heard.modules


def take_over(image: ImageLock, name: str, client: Client) -> str:
    """Begin with the locked cache, so that nothing of a GPU host's gets lost. Returns in words what was done."""
    with tempfile.TemporaryDirectory() as folder:
        return artifact.restore(workshop(image), image, name, GPU, client, State(Path(folder)))


def clear(image: ImageLock) -> None:
    """Remove the workshop."""
    container.remove_volume(workshop(image))
