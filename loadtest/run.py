"""One level of load: start the generator, wait until steady, measure a window, stop, wait for the last answers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from loadtest import steady
from loadtest.errors import BenchError
from loadtest.samples import Sample, Tick, from_line
from loadtest.scrape import GpuSample, Snapshot, Watcher
from loadtest.workload import Plan, Trace

BIN = 0.5
LOCUSTFILE = Path(__file__).with_name("locustfile.py")


@dataclass(frozen=True)
class Level:
    """What one generator run does: `users` in a closed loop, or the plan's rate or trace. Times in seconds."""

    name: str
    users: int
    duration: float
    ramp: float = 0.0
    warmup_limit: float = 300.0
    drain_limit: float = 120.0


@dataclass
class Observed:
    """All that was seen of one level. `begin` and `end` of the window are wall clock."""

    level: Level
    started: float
    begin: float = 0.0
    end: float = 0.0
    steady: bool = False
    complete: bool = False
    failure: str | None = None
    samples: list[Sample] = field(default_factory=list[Sample])
    ticks: list[Tick] = field(default_factory=list[Tick])
    snapshots: list[Snapshot] = field(default_factory=list[Snapshot])
    gpus: list[GpuSample] = field(default_factory=list[GpuSample])


@dataclass(frozen=True)
class Progress:
    """For the live table: what goes on, how long it takes (None: unknown), and what was seen so far."""

    phase: str
    elapsed: float
    left: float | None
    observed: Observed


class Generator:
    """Locust in a process of its own, so that nothing here disturbs its clock."""

    def __init__(self, plan_file: Path, samples: Path, log: Path, level: Level, processes: int) -> None:
        spawn_rate = level.users / level.ramp if level.ramp else min(level.users, 100)
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary"]
        command += ["-u", str(level.users), "-r", f"{spawn_rate:g}", "--stop-timeout", f"{level.drain_limit:g}"]
        command += ["--plan", str(plan_file), "--samples", str(samples), "--stop-with-parent"]
        if processes > 1:
            port = str(free_port())
            command += ["--processes", str(processes), "--master-bind-host", "127.0.0.1"]
            command += ["--master-bind-port", port, "--master-port", port]
        self._samples = samples
        self._offset = 0
        self._log_path = log
        self._log = log.open("wb")
        # A session of its own: Ctrl-C in the terminal is ours to handle, not the generator's.
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def read(self) -> list[Sample | Tick]:
        """Records written since the last call."""
        try:
            with self._samples.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [from_line(line.decode()) for line in complete.splitlines()]

    def ended(self) -> str | None:
        """None while it runs, else why it ended."""
        code = self._process.poll()
        if code is None:
            return None
        last = [line for line in self._log_lines() if line.strip()][-1:]
        return self.lost() or f"the generator ended with code {code}: {' '.join(last)[:300]}"

    def lost(self) -> str | None:
        """Why samples are missing, if they are."""
        for line in self._log_lines():
            _, found, why = line.partition("cannot write samples")
            if found:
                return found + why
        return None

    def _log_lines(self) -> list[str]:
        return self._log_path.read_text(encoding="utf-8", errors="replace").splitlines()

    def stop(self) -> None:
        """Asks it to let its requests finish and to end."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def wait(self, limit: float) -> bool:
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Ends it, whatever it does."""
        if self._process.poll() is None:
            self.stop()
            if not self.wait(3):
                with contextlib.suppress(ProcessLookupError):
                    # The group holds the generator and its workers and nothing else.
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._log.close()


def free_port() -> int:
    """A port nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def observe(
    plan: Plan,
    level: Level,
    folder: Path,
    watcher: Watcher,
    report: Callable[[Progress], None] = lambda _: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Observed:
    """Runs one level and returns what was seen; `complete` is False when it was interrupted or the generator failed.

    Writes `plan.json`, `samples.jsonl` and `generator.log` into `folder`. Raises BenchError when nothing was measured.
    """
    first_snapshot, first_gpu = len(watcher.snapshots), len(watcher.gpus)
    watcher.take()
    seen = Observed(level, started=time.time())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plan_file = folder / "plan.json"
        plan_file.write_text(plan.model_dump_json(indent=1), encoding="utf-8")
        generator = Generator(plan_file, folder / "samples.jsonl", folder / "generator.log", level, plan.generators)
    except OSError as error:
        raise BenchError(f"cannot write in {folder}", error.strerror or str(error), "choose another: --out") from None
    try:
        if _warm_up(plan, level, generator, seen, report, interrupted):
            seen.complete = _window(plan, level, generator, seen, report, interrupted)
        generator.stop()
        until = time.time() + (level.drain_limit + 10 if seen.complete else 3)
        while not generator.wait(0.25) and time.time() < until and not (interrupted() and seen.complete):
            _collect(generator, seen)
            report(Progress("last answers", time.time() - seen.end, until - time.time(), seen))
        seen.failure = seen.failure or generator.lost()
        seen.complete = seen.complete and seen.failure is None
    finally:
        generator.close()
        _collect(generator, seen)
        if seen.complete:
            _settle(watcher)
        seen.snapshots = watcher.snapshots[first_snapshot:]
        seen.gpus = watcher.gpus[first_gpu:]
    return seen


def _collect(generator: Generator, seen: Observed) -> None:
    for record in generator.read():
        if isinstance(record, Sample):
            seen.samples.append(record)
        else:
            seen.ticks.append(record)


def _warm_up(
    plan: Plan,
    level: Level,
    generator: Generator,
    seen: Observed,
    report: Callable[[Progress], None],
    interrupted: Callable[[], bool],
) -> bool:
    """Waits until the load is steady, at most the warm-up limit; False when the run is over already."""
    replay = isinstance(plan.workload, Trace)
    limit = level.warmup_limit + level.ramp
    while True:
        time.sleep(BIN)
        _collect(generator, seen)
        now = time.time()
        report(Progress("warm-up", now - seen.started, None, seen))
        seen.failure = generator.ended()
        if seen.failure is not None or interrupted():
            seen.begin = seen.end = now
            return False
        if seen.ticks and replay:
            seen.begin, seen.steady = seen.ticks[0].at, True
            return True
        if seen.ticks and is_steady(seen, level, plan):
            seen.begin, seen.steady = now, True
            return True
        if now - seen.started > limit:
            seen.begin = now
            return True


def is_steady(seen: Observed, level: Level, plan: Plan) -> bool:
    """All users are there, each had time for a request, the full rate is reached, and the token rate is steady."""
    finished = sum(1 for sample in seen.samples if sample.ok)
    users = sum(tick.users for tick in latest(seen.ticks))
    if plan.rate is None and (users < level.users or finished < level.users):
        return False
    if finished < 1 or time.time() - seen.started < plan.ramp:
        return False
    return steady.truncation(token_rates(seen.ticks)) is not None


def latest(ticks: list[Tick]) -> list[Tick]:
    """The last tick of each worker."""
    return list({tick.worker: tick for tick in ticks}.values())


def token_rates(ticks: list[Tick]) -> list[float]:
    """Arrivals a second in bins of BIN seconds, all workers together; the unfinished last bin is left out."""
    if not ticks:
        return []
    begin = min(tick.at for tick in ticks)
    bins: dict[int, float] = {}
    last: dict[str, int] = {}
    for tick in ticks:
        slot = int((tick.at - begin) / BIN + 0.5)
        bins[slot] = bins.get(slot, 0.0) + (tick.arrivals - last.get(tick.worker, 0)) / BIN
        last[tick.worker] = tick.arrivals
    return [bins.get(slot, 0.0) for slot in range(max(bins))]


def _window(
    plan: Plan,
    level: Level,
    generator: Generator,
    seen: Observed,
    report: Callable[[Progress], None],
    interrupted: Callable[[], bool],
) -> bool:
    """Lets the window pass; True when it was complete."""
    replay = len(_trace_rows(plan))
    until = seen.begin + level.duration if not replay else float("inf")
    while True:
        now = time.time()
        left = until - now
        if replay and sum(tick.finished + tick.failed for tick in latest(seen.ticks)) >= replay:
            seen.end = max((s.finished for s in seen.samples), default=now) + 1e-6
            return True
        if left <= 0:
            seen.end = until
            return True
        time.sleep(min(BIN, left))
        _collect(generator, seen)
        report(Progress("window", time.time() - seen.begin, None if replay else left, seen))
        seen.failure = generator.ended()
        if seen.failure is not None or interrupted():
            seen.end = time.time()
            return False


def _trace_rows(plan: Plan) -> list[object]:
    if not isinstance(plan.workload, Trace):
        return []
    text = Path(plan.workload.path).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip()]


def _settle(watcher: Watcher) -> None:
    """The engines' counters lag their answers a little: waits until two snapshots agree, at most five seconds."""
    before = _counts(watcher.take())
    for _ in range(10):
        time.sleep(0.5)
        now = _counts(watcher.take())
        if now == before:
            return
        before = now


def _counts(snapshots: list[Snapshot]) -> dict[str, tuple[float | None, ...]]:
    names = ("requests", "generation_tokens")
    return {s.engine: tuple((s.values or {}).get(name) for name in names) for s in snapshots}


def check_disk(folder: Path, needed: int) -> None:
    """Raises BenchError when the folder's disk has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BenchError(
            f"too little disk for the samples in {folder}",
            f"{free // 2**20} MiB free, {needed // 2**20} MiB may be needed",
            "free some space or choose another folder with --out FOLDER",
        )
