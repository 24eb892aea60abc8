"""Locust users that stream completions, and the recorder of what they see.

    locust -f loadtest/locustfile.py --plan plan.json                      web UI on :8089
    locust -f loadtest/locustfile.py --plan plan.json --headless -u 16     headless
    … --master / --worker, or --processes 4                                distributed (plan made with --processes 4)

`deploy bench … --write-plan plan.json` writes the plan; `deploy bench` does it all. Workers on other machines need the
plan file too, and clocks that agree: samples carry the wall clock of the machine that took them.
"""

# Locust's events and parser are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

import itertools
import logging
import os
import random
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gevent
from gevent.lock import BoundedSemaphore
from gevent.pool import Group
from locust import User, events, runners, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

from loadtest import workload
from loadtest.client import EPOCH, new_sample, perform
from loadtest.samples import Sample, Tick, to_line
from loadtest.stream import Connection, Limits

TICK = 0.5
LAG_TIMER = 0.01
FAILURE_PAUSE = 0.1

runners.WORKER_REPORT_INTERVAL = TICK
log = logging.getLogger("loadtest")


class Recorder:
    """Counts what goes on in this process and queues what is to be written."""

    def __init__(self) -> None:
        self.worker = "local"
        self.queue: deque[Sample | Tick] = deque()
        self.users = self.in_flight = self.arrivals = self.started = self.finished = self.failed = self.backlog = 0
        self.lag = self.late = 0.0
        self._cpu = time.process_time()
        self._at = time.perf_counter()

    def read(self, arrivals: int, late: float) -> None:
        self.arrivals += arrivals
        self.late = max(self.late, late)

    def watch_lag(self) -> None:
        """Runs for ever: how late does a timer fire?"""
        while True:
            before = time.perf_counter()
            gevent.sleep(LAG_TIMER)
            self.lag = max(self.lag, time.perf_counter() - before - LAG_TIMER)

    def tick(self) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        tick = Tick(
            at=EPOCH + now,
            worker=self.worker,
            users=self.users,
            in_flight=self.in_flight,
            arrivals=self.arrivals,
            started=self.started,
            finished=self.finished,
            failed=self.failed,
            lag=self.lag,
            late=self.late,
            cpu=(cpu - self._cpu) / max(1e-9, now - self._at),
            backlog=self.backlog,
        )
        self._cpu, self._at = cpu, now
        self.lag = self.late = 0.0
        self.queue.append(tick)

    def tick_for_ever(self) -> None:
        while True:
            gevent.sleep(TICK)
            self.tick()


class Setup:
    """The plan and what it refers to, read once a process."""

    plan: workload.Plan
    api_key: str | None = None
    prompts: list[list[dict[str, str]]]
    trace: list[workload.TraceRow]
    indices: Iterator[int]
    stopping = False

    @classmethod
    def read(cls, path: str, worker: int) -> None:
        cls.plan = workload.Plan.model_validate_json(Path(path).read_text(encoding="utf-8"))
        if cls.plan.api_key_file:
            cls.api_key = Path(cls.plan.api_key_file).read_text(encoding="utf-8").strip()
        kind = cls.plan.workload
        if isinstance(kind, workload.Prompts):
            cls.prompts = workload.read_prompts(Path(kind.path).read_text(encoding="utf-8"), kind.path)
        elif isinstance(kind, workload.Trace):
            cls.trace = workload.read_trace(Path(kind.path).read_text(encoding="utf-8"), kind.path, kind.speed)
        cls.indices = itertools.count(worker, cls.plan.generators)
        cls.stopping = False


recorder = Recorder()


def connect() -> Connection:
    limits = Limits(silence=Setup.plan.silence_timeout, total=Setup.plan.request_timeout)
    return Connection(Setup.plan.url, api_key=Setup.api_key, ca_file=Setup.plan.ca_file, limits=limits)


def stream(
    connection: Connection, request: workload.Request, environment: Environment, scheduled: float | None = None
) -> str:
    """Sends one request, records its sample, tells Locust about it and returns the answer's text."""
    sample = new_sample(request, recorder.worker, scheduled)
    recorder.started += 1
    recorder.in_flight += 1
    try:
        text = perform(connection, Setup.plan, request, sample, recorder.read)
    finally:
        recorder.in_flight -= 1
        recorder.finished += sample.ok
        recorder.failed += not sample.ok and sample.error != "cancelled"
        recorder.queue.append(sample)
        if sample.error != "cancelled":
            fire(environment, sample)
    if not sample.ok and scheduled is None:
        # A closed loop would otherwise hammer a server that is down as fast as it refuses.
        gevent.sleep(FAILURE_PAUSE)
    return text


def fire(environment: Environment, sample: Sample) -> None:
    """Locust's own statistics (web UI): the request, and its first token as an entry of its own."""
    error = None if sample.ok else RuntimeError(f"{sample.error}: {sample.detail}")
    common: dict[str, Any] = {"response_length": sample.completion_tokens or 0, "context": {}}
    environment.events.request.fire(
        request_type="SSE", name="end to end", response_time=sample.end * 1000, exception=error, **common
    )
    if sample.first_token is not None:
        environment.events.request.fire(
            request_type="SSE", name="first token", response_time=sample.first_token * 1000, exception=None, **common
        )


class StreamingUser(User):
    """Closed loop: one request after another. Open loop (a rate or a trace in the plan): starts requests on time."""

    def on_start(self) -> None:
        self.connection = connect()
        self.session = 0
        recorder.users += 1

    def on_stop(self) -> None:
        recorder.users -= 1
        self.connection.close()

    @task
    def load(self) -> None:
        plan = Setup.plan
        if isinstance(plan.workload, workload.Trace):
            self.replay(plan)
        elif plan.rate is not None:
            self.arrive(plan, plan.rate / plan.generators)
        elif isinstance(plan.workload, workload.Synthetic) and plan.workload.turns > 1:
            self.converse(plan, plan.workload)
        else:
            stream(self.connection, request_of(plan, next(Setup.indices)), self.environment)

    def converse(self, plan: workload.Plan, kind: workload.Synthetic) -> None:
        session = next(Setup.indices)
        history: list[dict[str, str]] = []
        for turn in range(kind.turns):
            if Setup.stopping:
                return
            request = workload.turn_request(plan, kind, session, turn, history)
            answer = stream(self.connection, request, self.environment)
            history = [*request.messages, {"role": "assistant", "content": answer}]

    def arrive(self, plan: workload.Plan, rate: float) -> None:
        rng = random.Random(f"{plan.seed}:{recorder.worker}:arrivals")
        units = 0.0
        begin = time.perf_counter()

        def due() -> Iterator[tuple[float, workload.Request]]:
            nonlocal units
            while True:
                units += rng.expovariate(1.0)
                yield begin + workload.arrival(units, rate, plan.ramp), request_of(plan, next(Setup.indices))

        self.send_on_time(due())

    def replay(self, plan: workload.Plan) -> None:
        begin = time.perf_counter()
        rows = Setup.trace
        mine = itertools.takewhile(lambda k: k < len(rows), Setup.indices)
        self.send_on_time((begin + rows[k].at, request_of(plan, k)) for k in mine)

    def send_on_time(self, due: Iterator[tuple[float, workload.Request]]) -> None:
        """Starts each request at its time whether or not earlier ones have ended; waits for them at the end."""
        idle: list[Connection] = []
        flights = Group()

        def send(request: workload.Request, when: float) -> None:
            connection = idle.pop() if idle else connect()
            recorder.backlog -= 1
            stream(connection, request, self.environment, scheduled=when)
            idle.append(connection)

        try:
            for when, request in due:
                while not Setup.stopping and (wait := when - time.perf_counter()) > 0:
                    gevent.sleep(min(wait, 0.2))
                if Setup.stopping:
                    break
                recorder.backlog += 1
                flights.spawn(send, request, when)
            flights.join()
        except gevent.GreenletExit:
            flights.kill()
            raise
        while not Setup.stopping:
            gevent.sleep(0.2)


def request_of(plan: workload.Plan, index: int) -> workload.Request:
    match plan.workload:
        case workload.Synthetic() as kind:
            return workload.synthetic_request(plan, kind, index)
        case workload.Prompts() as kind:
            return workload.prompt_request(plan, kind, Setup.prompts, index)
        case workload.Trace():
            return workload.trace_request(plan, Setup.trace, index)


@events.init_command_line_parser.add_listener
def add_arguments(parser: LocustArgumentParser) -> None:
    parser.add_argument("--plan", default="plan.json", help="what to send, as `deploy bench --write-plan` writes it")
    parser.add_argument("--stop-with-parent", action="store_true", help="end when the process that started this ends")
    parser.add_argument("--samples", default="samples.jsonl", help="file for the samples (master and local only)")


class Writer:
    """Writes records on the process that owns the samples file."""

    def __init__(self, path: str, environment: Environment) -> None:
        self._path = Path(path)
        self._path.write_bytes(b"")
        self._environment = environment
        self._failed = False

    def write(self, lines: list[str]) -> None:
        if self._failed or not lines:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        except OSError as error:
            self._failed = True
            log.error("cannot write samples: %s", error.strerror)
            self._environment.process_exit_code = 74
            if self._environment.runner is not None:
                gevent.spawn(self._environment.runner.quit)


taking = BoundedSemaphore()


def take_lines() -> list[str]:
    """Serialises what is queued, letting the sockets go first between records; one caller at a time, so that the
    last one at the end of the process has everything."""
    with taking:
        lines: list[str] = []
        while recorder.queue:
            lines.append(to_line(recorder.queue.popleft()))
            gevent.sleep(0)
        return lines


def stop_with_parent(runner: runners.Runner) -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        gevent.sleep(1)
    log.error("the process that started the generator is gone")
    runner.quit()


@events.init.add_listener
def set_up(environment: Environment, **_: object) -> None:
    options = environment.parsed_options
    runner = environment.runner
    assert options is not None and runner is not None
    environment.stop_timeout = environment.stop_timeout or 120.0
    worker = runner.worker_index if isinstance(runner, runners.WorkerRunner) else 0
    if isinstance(runner, runners.WorkerRunner):
        recorder.worker = f"worker-{worker}"
    Setup.read(options.plan, max(0, worker))
    StreamingUser.host = Setup.plan.url

    with suppress(PermissionError):
        # A generator that waits for a core measures itself. It needs little of one; where it may, it goes first.
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    if options.stop_with_parent:
        gevent.spawn(stop_with_parent, runner)
    if not isinstance(runner, runners.MasterRunner):
        gevent.spawn(recorder.watch_lag)
        gevent.spawn(recorder.tick_for_ever)

    if isinstance(runner, runners.WorkerRunner):

        def report(data: dict[str, Any], **_: object) -> None:
            data["samples"] = take_lines()

        environment.events.report_to_master.add_listener(report)
        return

    writer = Writer(options.samples, environment)
    if isinstance(runner, runners.MasterRunner):

        def collect(client_id: str, data: dict[str, Any], **_: object) -> None:
            writer.write(data.pop("samples", []))

        environment.events.worker_report.add_listener(collect)
        return

    def flush_for_ever() -> None:
        while True:
            gevent.sleep(TICK / 2)
            writer.write(take_lines())

    gevent.spawn(flush_for_ever)

    def last(**_: object) -> None:
        recorder.tick()
        writer.write(take_lines())

    environment.events.quit.add_listener(last)


@events.test_start.add_listener
def on_test_start(**_: object) -> None:
    Setup.stopping = False


@events.test_stopping.add_listener
def on_test_stopping(**_: object) -> None:
    Setup.stopping = True
