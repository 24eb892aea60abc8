"""Turns what `docker buildx build --progress=rawjson` writes into events."""

import base64
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

Phase = Literal["registry", "packages", "bootstrap", "rootfs", "engine", "modules", "patches", "kernels", "export"]

# The Dockerfile's stages, by what they do for a person who waits.
PHASE_OF_STAGE: dict[str, Phase] = {
    "bootstrap": "bootstrap",
    "rootfs-build": "rootfs",
    "rootfs": "rootfs",
    "torch": "engine",
    "engine": "engine",
    "modules": "modules",
    "patched": "patches",
    "wheels": "kernels",
    "kernels": "kernels",
    "runtime": "kernels",
}

# And what each of them is at, in words; the instruction of the Dockerfile says nothing to a person.
WORK_OF_STAGE = {
    "bootstrap": "unpacking Debian's essential packages",
    "rootfs-build": "installing Debian's packages",
    "rootfs": "taking over the root file system",
    "torch": "installing PyTorch and CUDA",
    "engine": "installing SGLang and the other wheels",
    "modules": "compiling SGLang's modules for sm_120",
    "patched": "patching SGLang",
    "wheels": "building our packages",
    "kernels": "compiling our kernels for sm_120",
    "runtime": "installing what runs around SGLang",
}


@dataclass(frozen=True)
class BuildEvent:
    """One step's progress.

    Attributes:
        phase: what the build is busy with; phases come in this order, and some may be missing.
        step: the step in words, stable across its events (a row of a progress display).
        state: `cached` is finished at once, from an earlier build.
        message: a log line, or why the step failed; else empty.
        done: units finished so far (bytes), or None where a step has no measure.
        total: units in all, or None.
        seconds: how long the step took, on `finished`.
    """

    phase: Phase
    step: str
    state: Literal["started", "progress", "log", "cached", "finished", "failed"]
    message: str = ""
    done: int | None = None
    total: int | None = None
    seconds: float | None = None


def read_objects(lines: Iterable[str]) -> Iterator[dict[str, Any] | str]:
    """Split buildx's output into its JSON objects, on one line or indented over several, and lines of plain text."""
    buffer: list[str] = []
    for line in lines:
        if not buffer and not line.startswith("{"):
            yield line.rstrip("\n")
            continue
        buffer.append(line)
        if line.startswith("}") or (len(buffer) == 1 and line.rstrip().endswith("}")):
            yield json.loads("".join(buffer))
            buffer = []


class BuildProgress:
    """Follows one build.

    Attributes:
        failure: the failed step's event, once there is one.
    """

    def __init__(self) -> None:
        self.failure: BuildEvent | None = None
        self._steps: dict[str, tuple[Phase, str]] = {}
        self._reported: set[tuple[str, str]] = set()
        self._begun_lines: dict[str, str] = {}

    def events(self, status: dict[str, Any]) -> Iterator[BuildEvent]:
        """What one object of buildx's output says that was not said before."""
        for vertex in status.get("vertexes", []):
            yield from self._vertex(vertex)
        for transfer in status.get("statuses", []):
            step = self._steps.get(transfer["vertex"])
            if step and transfer.get("current"):
                total = transfer.get("total") or None
                yield BuildEvent(*step, "progress", transfer.get("name", ""), transfer["current"], total)
        for log in status.get("logs", []):
            if step := self._steps.get(log["vertex"]):
                yield from self._log(log["vertex"], step, base64.b64decode(log["data"]).decode(errors="replace"))

    def _log(self, digest: str, step: tuple[Phase, str], text: str) -> Iterator[BuildEvent]:
        """Whole lines only: output comes in pieces that end anywhere."""
        *lines, rest = (self._begun_lines.pop(digest, "") + text).split("\n")
        if rest:
            self._begun_lines[digest] = rest
        for line in lines:
            if line.strip():
                yield BuildEvent(*step, "log", line.rstrip())

    def _vertex(self, vertex: dict[str, Any]) -> Iterator[BuildEvent]:
        digest = vertex["digest"]
        step = step_of(vertex["name"])
        if step is None:
            return
        self._steps[digest] = step
        if vertex.get("error"):
            if self._first(digest, "failed"):
                self.failure = BuildEvent(*step, "failed", vertex["error"])
                yield self.failure
        elif vertex.get("cached"):
            if self._first(digest, "end"):
                yield BuildEvent(*step, "cached")
        elif vertex.get("completed") and vertex.get("started"):
            if self._first(digest, "end"):
                took = datetime.fromisoformat(vertex["completed"]) - datetime.fromisoformat(vertex["started"])
                yield BuildEvent(*step, "finished", seconds=took.total_seconds())
        elif vertex.get("started") and self._first(digest, "started"):
            yield BuildEvent(*step, "started")

    def _first(self, digest: str, what: str) -> bool:
        new = (digest, what) not in self._reported
        self._reported.add((digest, what))
        return new


def step_of(name: str) -> tuple[Phase, str] | None:
    """Phase and words for a vertex such as `[engine 1/1] RUN …`; None for buildx's own housekeeping."""
    if name.startswith("exporting"):
        return "export", name
    stage, _, number = name.removeprefix("[").partition("]")[0].partition(" ")
    if name.startswith("[") and stage in PHASE_OF_STAGE:
        return PHASE_OF_STAGE[stage], WORK_OF_STAGE[stage] + ("" if number in ("", "1/1") else f" ({number})")
    return None
