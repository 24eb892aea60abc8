"""What the image brings compiled, and how much an engine had to compile beyond it.

Triton's cache writes each compilation of this container down (`sm120_kernels.baked`). The other compilers are counted
by the files in their folders that were not there at the start, or were others: ninja writes a stale module anew in its
place. Roles of one host share these folders, so each of them counts what either compiled. `python -m
engine_runtime.jit` prints how much each compiler has written so far.

Who must tell an engine that compiles, for minutes, from one that hangs asks `state`: the gate through the engine's
server, the health probe in the container.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

BAKED_SGLANG = Path("/opt/baked/sglang-jit")
TRITON_LOG, TRITON_BEGUN = Path("/tmp/sm120_kernels/compiled"), ".begun"
REPORT = Path("/tmp/engine_runtime/jit.json")
# By compiler: the variable that names its folder, the part of that folder which is its own, and how the one file ends
# that it writes for each compilation.
FOLDERS = {
    "sglang": ("SGLANG_JIT_CACHE_DIR", "", ".so"),
    "flashinfer": ("FLASHINFER_WORKSPACE_BASE", ".cache/flashinfer", ".so"),
    "tilelang": ("TILELANG_CACHE_DIR", "", ".so"),
    "deep-gemm": ("SGLANG_DG_CACHE_DIR", "", ".cubin"),
    "cute": ("SGLANG_CACHE_DIR", "cute_aot", ".o"),
    "tvm-ffi": ("TVM_FFI_CACHE_DIR", "", ".so"),
    "inductor": ("TORCHINDUCTOR_CACHE_DIR", "", ".so"),
}
SECONDS_BEFORE_READY, SECONDS_AFTER = 2.0, 60.0
ROUTE = "/engine_runtime/compilations"
"""On the engine's server: `state`."""
COMPILERS = frozenset({"nvcc", "ninja", "ptxas", "ptxas-blackwell", "cc1plus"})
"""Programs that compile, as the kernel names their processes; what nvcc starts it waits for."""
COMPILATION_S = 300.0
"""One that takes longer is stuck: as long as SGLang lets a batch take (`--watchdog-timeout` of compose.yaml)."""

Entry = tuple[str, int]
"""A compiled file: its path, and when it was written in nanoseconds since 1970."""


def link_baked(baked: Path, cache: Path) -> int:
    """Let SGLang's cache find the modules that the image brings; the image itself cannot be written to.

    Args:
        baked: TARGET/MODULE/build-KEY/deps-KEY, folders as the cache has them.
        cache: where links to them go. Links that lead nowhere, to another image's modules, are removed: one of them
            hides all other builds of its module.

    Returns:
        How many modules are linked.
    """
    for link in cache.glob("*/*/build-*/deps-*"):
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
    leaves = [leaf for leaf in baked.glob("*/*/build-*/deps-*") if leaf.is_dir()]
    for leaf in leaves:
        link = cache / leaf.relative_to(baked)
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            link.symlink_to(leaf)
        except FileExistsError:
            continue
    return len(leaves)


def entries(environment: Mapping[str, str]) -> dict[str, set[Entry]]:
    """The compiled files in each compiler's folder. Links are not followed: they lead to what was baked."""
    found: dict[str, set[Entry]] = {}
    for name, (variable, below, ending) in FOLDERS.items():
        if environment.get(variable):
            walk = os.walk(Path(environment[variable], below))
            paths = (f"{path}/{file}" for path, _, files in walk for file in files if file.endswith(ending))
            found[name] = {entry for entry in map(_entry, paths) if entry}
    return found


def _entry(path: str) -> Entry | None:
    try:
        return path, Path(path).stat().st_mtime_ns
    except FileNotFoundError:
        # A compiler that runs beside this moved it into place.
        return None


def count(before: Mapping[str, set[Entry]], environment: Mapping[str, str], log: Path = TRITON_LOG) -> dict[str, int]:
    """Compilations by compiler.

    Args:
        before: `entries` when the engine started.
        log: what Triton's cache wrote down.
    """
    now = entries(environment)
    return {"triton": len(_lines(log))} | {name: len(found - before.get(name, set())) for name, found in now.items()}


def running(log: Path = TRITON_LOG) -> list[str]:
    """What is being compiled in this container: names of compilers' processes, and `triton` for each of its kernels.

    Args:
        log: what Triton's cache wrote down.
    """
    now = time.time()
    found = [
        str(process.info["name"])
        for process in psutil.process_iter(["name", "create_time"])
        if process.info["name"] in COMPILERS and now - (process.info["create_time"] or now) < COMPILATION_S
    ]
    begun, done = _lines(log.with_suffix(TRITON_BEGUN)), _lines(log)
    finished = {line.split()[-1] for line in done if line}
    recent = [key for when, key in map(str.split, begun) if time.monotonic() - float(when) < COMPILATION_S]
    return sorted(found + ["triton" for key in recent if key not in finished])


def state() -> dict[str, object]:
    """What is being compiled, and how much has been: either shows that an engine without an answer is at work."""
    return {"running": running(), "written": sum(count({}, os.environ).values())}


def main() -> None:
    """Print how much each compiler has written so far, as JSON."""
    written = count({}, os.environ)
    sys.stdout.write(json.dumps(written) + "\n")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def words(counts: Mapping[str, int]) -> str:
    """Counts for people: `3 (triton 2, flashinfer 1)`."""
    some = ", ".join(f"{name} {number}" for name, number in counts.items() if number)
    return f"{sum(counts.values())}" + (f" ({some})" if some else "")


def write_report(at_start: Mapping[str, int], since: Mapping[str, int], report: Path = REPORT) -> None:
    """Put the counts where `deploy verify` and `deploy status` read them."""
    report.parent.mkdir(parents=True, exist_ok=True)
    partial = report.with_suffix(".part")
    partial.write_text(json.dumps({"at_start": dict(at_start), "since": dict(since)}))
    partial.replace(report)


def follow(
    ready: Callable[[], bool],
    environment: Mapping[str, str],
    say: Callable[[str], None],
    log: Path = TRITON_LOG,
    report: Path = REPORT,
) -> None:
    """Count while the engine starts, report once it is ready, and go on reporting what it compiles as it serves.

    Args:
        ready: whether the engine serves.
        say: writes a line into the container's log.
        log, report: as `count` and `write_report` have them.
    """
    before = entries(environment)
    while not ready():
        time.sleep(SECONDS_BEFORE_READY)
    at_start = count(before, environment, log)
    say(f"engine_runtime: compiled at start: {words(at_start)}")
    known: dict[str, int] = {}
    while True:
        now = count(before, environment, log)
        since = {name: number - at_start.get(name, 0) for name, number in now.items()}
        if since != known:
            if any(since.values()):
                say(f"engine_runtime: compiled since the start: {words(since)}")
            write_report(at_start, since, report)
            known = since
        time.sleep(SECONDS_AFTER)


def begin(ready: Callable[[], bool], environment: Mapping[str, str]) -> None:
    """Link what the image brings, then count in the background for as long as this process lives."""

    def say(text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    if environment.get("SGLANG_JIT_CACHE_DIR"):
        try:
            link_baked(BAKED_SGLANG, Path(environment["SGLANG_JIT_CACHE_DIR"]))
        except OSError as error:
            # A full volume: what is in it already may be enough.
            say(f"engine_runtime: what the image has compiled cannot be linked: {error}")

    threading.Thread(target=follow, args=(ready, dict(environment), say), daemon=True, name="jit-count").start()


if __name__ == "__main__":
    main()
