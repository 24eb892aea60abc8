"""The gate as a process, with stand-ins for router and engine that do what the real ones were seen to do."""

import asyncio
import json
import operator
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from engine_runtime import jit
from engine_runtime.gate import (
    LOOKS,
    PAUSE_S,
    PREFILL_S,
    SILENCE_S,
    VERDICT_SHARE,
    Engine,
    Gate,
    Outage,
    Request,
    compilations,
    kinds_down,
    loss,
    requests_held,
    settings,
    snapshot_times,
    stranded,
    unhealthy,
)
from hypothesis import given
from hypothesis import strategies as st

ENGINE_ROOT = Path(__file__).parents[2] / "engine"
# A router that answers what a file tells it to.
ROUTER = """
import asyncio, json, pathlib, sys
from aiohttp import web
mode = pathlib.Path(sys.argv[2])
async def handle(request):
    now = mode.read_text()
    if request.path == "/workers":
        return web.json_response({"workers": []})
    if request.path == "/readiness" or (request.path, now) == ("/liveness", "wait"):
        return web.Response(text="ready")
    if now == "none":
        return web.json_response({"error": {"code": "server_selection_failed"}}, status=503)
    if now in ("hang", "wait"):
        await asyncio.sleep(1000)
    if now == "die":
        sys.stderr.flush(); import os; os._exit(3)
    if now == "stream":
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for number in range(1000):
            await answer.write(f"data: {number}\\n\\n".encode())
            await asyncio.sleep(0.1)
    body = await request.read()
    return web.json_response({"path": request.raw_path, "method": request.method, "size": len(body),
                              "key": request.headers.get("Authorization")})
app = web.Application(client_max_size=1 << 30)
app.router.add_route("*", "/{path:.*}", handle)
assert sys.stdin.readline().strip()
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, handler_cancellation=True)
"""
START = """
import sys
from engine_runtime import gate
port, router, control, engine = map(int, sys.argv[1:5])
gate.ROUTER_PORT, gate.CONTROL_PORT, gate.METRICS_PORT = router, control, 1
gate.WAIT_S = 3.0
arguments = ["--prefill", f"http://127.0.0.1:{engine}", "8998", "--decode", f"http://127.0.0.1:{engine}",
             "--max-payload-size=100000", "--shutdown-grace-period-secs=3"]
sys.exit(gate.run(arguments, [sys.executable, *sys.argv[5:]], "127.0.0.1", port, silence_s=5.0))
"""


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Standin)
        loads, compilations = self.path.startswith("/v1/loads"), self.path == jit.ROUTE
        written = time.time() if self.server.writes_snapshots else 1.0
        page: dict[str, object] = {"loads": [{"timestamp": written}]} if loads else self.server.compilations
        body = json.dumps(page).encode()
        self.send_response(200 if loads or compilations or self.server.generates else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: object = "-", size: object = "-") -> None:
        pass


class Standin(ThreadingHTTPServer):
    """Of an engine what the gate looks at: load snapshots, whether it generates a token and what it compiles."""

    daemon_threads = True
    writes_snapshots = True
    generates = True

    def __init__(self, port: int) -> None:
        self.compilations: dict[str, object] = {}
        super().__init__(("127.0.0.1", port), Answers)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def hang(self) -> None:
        self.writes_snapshots = self.generates = False


class Started:
    """A gate with its router and an engine."""

    def __init__(self, folder: Path) -> None:
        self.mode = folder / "mode"
        self.answer("ok")
        self.port, self.router, self.control, self.engine_port = free_ports(4)
        (folder / "router.py").write_text(ROUTER)
        self.engine = Standin(self.engine_port)
        ports = [str(port) for port in (self.port, self.router, self.control, self.engine_port)]
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *ports, str(folder / "router.py"), ports[1], str(self.mode)],
            cwd=ENGINE_ROOT,
            stderr=subprocess.DEVNULL,
            # Gate and router end together.
            start_new_session=True,
        )
        self.url = f"http://127.0.0.1:{self.port}"

    def answer(self, mode: str) -> None:
        self.mode.write_text(mode)

    def wake_engine(self) -> None:
        self.engine = Standin(self.engine_port)

    def kill_engine(self) -> None:
        self.engine.shutdown()
        self.engine.server_close()

    def ask(self) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/chat/completions", json={"a": 1}, timeout=30, trust_env=False)

    def view(self) -> dict[str, Any]:
        return httpx.get(f"http://127.0.0.1:{self.control}/", timeout=5, trust_env=False).json()

    def until(self, condition: Callable[[], bool], patience: float = 20) -> None:
        deadline = time.monotonic() + patience
        while True:
            with suppress(httpx.HTTPError):
                if condition():
                    return
            assert time.monotonic() < deadline
            time.sleep(0.05)


@contextmanager
def started(folder: Path) -> Generator[Started]:
    gate = Started(folder)
    try:
        gate.until(lambda: gate.ask().status_code == 200)
        yield gate
    finally:
        with suppress(ProcessLookupError):
            os.killpg(gate.process.pid, signal.SIGKILL)
        gate.process.wait()
        gate.kill_engine()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Started]:
    with started(tmp_path) as made:
        yield made


pytestmark = pytest.mark.slow


def test_a_request_reaches_the_router_as_it_is(gate: Started) -> None:
    answer = httpx.request(
        "PUT", f"{gate.url}/a%2Fb/../c?x=1&x=2", content=b"x" * 1000, headers={"Authorization": "Bearer k"}
    )
    found = answer.json()
    assert (found["method"], found["size"], found["key"]) == ("PUT", 1000, "Bearer k")
    assert found["path"].endswith("c?x=1&x=2")
    assert httpx.post(f"{gate.url}/v1/chat/completions", content=b"x" * 200_000).status_code == 413


def test_without_an_engine_a_request_waits_and_is_served_when_it_comes(gate: Started) -> None:
    gate.answer("none")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(gate.ask)
        gate.until(lambda: gate.view()["waiting"] == 1)
        gate.answer("ok")
        assert asked.result().status_code == 200


def test_without_an_engine_for_long_it_gets_503_and_when_to_come_again(gate: Started) -> None:
    gate.answer("none")
    begun = time.monotonic()
    answer = gate.ask()
    assert answer.status_code == 503
    assert int(answer.headers["Retry-After"]) > 0
    assert 2 < time.monotonic() - begun < 10
    # Whoever only asks how things are is told at once.
    begun = time.monotonic()
    assert httpx.get(f"{gate.url}/health").status_code == 503
    assert time.monotonic() - begun < 2


def test_a_request_that_hangs_because_its_engine_died_gets_an_error(gate: Started) -> None:
    gate.answer("wait")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(gate.ask)
        gate.until(lambda: gate.view()["in_flight"] == 1)
        gate.kill_engine()
        begun = time.monotonic()
        answer = asked.result()
    assert answer.status_code == 503
    assert "alive" in answer.text
    assert time.monotonic() - begun < 15
    gate.answer("ok")
    gate.wake_engine()
    gate.until(lambda: gate.ask().status_code == 200)


def test_a_request_whose_engine_takes_connections_and_does_nothing_gets_an_error(gate: Started) -> None:
    gate.answer("wait")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(gate.ask)
        gate.until(lambda: gate.view()["in_flight"] == 1)
        gate.engine.hang()
        begun = time.monotonic()
        answer = asked.result()
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "10")
    assert time.monotonic() - begun < 12
    assert {engine["hangs"] for engine in gate.view()["engines"].values()} == {True}
    gate.answer("ok")
    assert gate.ask().status_code == 503
    gate.engine.writes_snapshots = True
    gate.until(lambda: gate.ask().status_code == 200)


def test_an_engine_that_generates_does_not_hang_whatever_its_snapshots_say(gate: Started) -> None:
    gate.engine.writes_snapshots = False
    until = time.monotonic() + 8
    while time.monotonic() < until:
        assert gate.ask().status_code == 200
        assert {engine["hangs"] for engine in gate.view()["engines"].values()} == {False}
        time.sleep(0.3)


def test_an_engine_that_compiles_does_not_hang_until_it_has_ended(gate: Started) -> None:
    gate.engine.compilations = {"running": ["ptxas"], "written": 0}
    gate.answer("wait")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(gate.ask)
        gate.until(lambda: gate.view()["in_flight"] == 1)
        gate.engine.hang()
        gate.until(lambda: all(engine["compiles"] for engine in gate.view()["engines"].values()))
        time.sleep(9)
        assert not any(engine["hangs"] for engine in gate.view()["engines"].values())
        assert not asked.done()
        # What is written counts as well, between one compiler and the next.
        gate.engine.compilations = {"running": [], "written": 1}
        time.sleep(4)
        assert not asked.done()
        assert asked.result().status_code == 503
    assert {(engine["hangs"], engine["compiles"]) for engine in gate.view()["engines"].values()} == {(True, False)}


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=20))
def test_the_routers_verdict_counts_unless_the_engine_works(looks: list[tuple[bool, bool, bool]]) -> None:
    engine, stood = Engine("decode"), 0.0
    for now, (sick, compiles, generates) in enumerate(looks):
        engine.sick_since = (engine.sick_since if engine.sick_since is not None else float(now)) if sick else None
        engine.hear_of_compilers(compiles, 0)
        if generates:
            engine.work()
        engine.judge(float(now), SILENCE_S)
        stood = stood + 1 if sick and not compiles and not generates else 0
        assert (engine.down_since is not None) == (stood > VERDICT_SHARE * SILENCE_S)
        assert engine.compiling == compiles


def test_the_looks_tell_an_engine_that_is_gone_from_one_that_is_silent() -> None:
    async def looked(url: str) -> Engine:
        engine = Engine("prefill")
        await Gate(settings([]), ())._connect(url, engine)  # pyright: ignore[reportPrivateUsage]
        return engine

    (port,) = free_ports(1)
    refused = asyncio.run(looked(f"http://127.0.0.1:{port}"))
    assert (refused.failed, refused.silent) == (1, False)
    with socket.create_server(("127.0.0.1", port), backlog=0), ExitStack() as held:
        # With a full queue the kernel drops whoever else wants to connect.
        for _ in range(4):
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        silent = asyncio.run(looked(f"http://127.0.0.1:{port}"))
    assert (silent.failed, silent.silent) == (1, True)


def test_a_stream_whose_engine_died_ends_with_an_error_and_not_like_an_answer(gate: Started) -> None:
    gate.answer("stream")
    received = b""
    with (
        pytest.raises(httpx.RemoteProtocolError),
        httpx.stream("POST", f"{gate.url}/v1/chat/completions", json={}, timeout=30) as answer,
    ):
        for piece in answer.iter_raw():
            if not received:
                gate.kill_engine()
            received += piece
    last = [line for line in received.decode().splitlines() if line.startswith("data:")][-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503
    assert b"[DONE]" not in received


def test_a_client_that_hangs_up_ends_its_request_at_the_router(gate: Started) -> None:
    gate.answer("hang")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{gate.url}/v1/chat/completions", json={}, timeout=1)
    gate.until(lambda: gate.view()["in_flight"] == 0)


def test_a_router_that_dies_is_started_again_and_nobody_notices(gate: Started) -> None:
    gate.answer("die")
    assert gate.ask().status_code == 502
    gate.answer("ok")
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(gate.ask) for _ in range(8)]
        assert {answer.result().status_code for answer in asked} == {200}


def test_a_router_that_hangs_is_killed_and_started_again(gate: Started) -> None:
    (router,) = psutil.Process(gate.process.pid).children()
    router.suspend()
    begun = time.monotonic()
    assert gate.ask().status_code == 502
    assert time.monotonic() - begun < 15
    assert gate.ask().status_code == 200


def test_on_sighup_the_router_is_replaced_and_no_request_fails(gate: Started) -> None:
    with ThreadPoolExecutor(4) as pool:
        stop = time.monotonic() + 4

        def ask_on() -> set[int]:
            found: set[int] = set()
            while time.monotonic() < stop:
                found.add(gate.ask().status_code)
            return found

        asked = [pool.submit(ask_on) for _ in range(4)]
        time.sleep(0.5)
        gate.process.send_signal(signal.SIGHUP)
        gate.until(lambda: bool(gate.view()["replacing"]))
        gate.until(lambda: not gate.view()["replacing"])
        assert set().union(*(future.result() for future in asked)) == {200}


def test_on_sigterm_what_is_in_flight_may_finish_and_new_requests_are_told_to_come_again(gate: Started) -> None:
    gate.answer("hang")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(gate.ask)
        gate.until(lambda: gate.view()["in_flight"] == 1)
        gate.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        refused = gate.ask()
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "10")
        # Longer than the grace: it is cut, and not silently.
        assert asked.result().status_code == 502
    assert gate.process.wait(20) == 0


# ---- the rules alone


def test_the_engines_are_those_of_the_routers_arguments() -> None:
    found = settings(["--pd-disaggregation", "--prefill", "http://p:1", "8998", "--decode", "http://d:1", "--x=1"])
    assert found.engines == {
        "http://p:1": {"url": "http://p:1", "worker_type": "prefill", "bootstrap_port": 8998},
        "http://d:1": {"url": "http://d:1", "worker_type": "decode"},
    }
    assert list(settings(["--worker-urls", "http://a:1", "http://b:1", "--policy=x"]).engines) == [
        "http://a:1",
        "http://b:1",
    ]


def test_the_routers_verdict_is_read_from_its_metrics() -> None:
    page = 'smg_worker_health{worker="http://a:1"} 1\nsmg_worker_health{worker="http://b:1"} 0\n# x\n'
    assert unhealthy(page) == {"http://b:1"}
    page = 'smg_worker_requests_active{worker="http://a:1/"} 3\nsmg_worker_requests_active{worker="http://b:1"} 0\n'
    assert requests_held(page) == {"http://a:1": 3, "http://b:1": 0}


@given(st.lists(st.floats(0, 40), max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_what_an_engine_of_several_has_that_hangs_is_given_up_and_nothing_that_may_be_elsewhere(
    silent_for: list[float], hanging_has: int, other_has: int
) -> None:
    async def requests() -> list[Request]:
        future = asyncio.get_running_loop().create_future
        return [Request(0.0, 100.0 - silence, future()) for silence in silent_for]

    flying = asyncio.run(requests())
    held = {"http://a:1": hanging_has, "http://b:1": other_has}
    found = stranded(flying, ["http://a:1/"], held, 100.0, SILENCE_S)
    silent = [request for request in flying if 100.0 - request.heard >= SILENCE_S]
    assert found == (silent if len(silent) <= hanging_has else [])
    assert stranded(flying, [], held, 100.0, SILENCE_S) == []


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=20))
def test_an_engine_is_down_after_looks_in_a_row_or_a_lasting_verdict_and_up_at_once(
    looks: list[tuple[bool, bool]],
) -> None:
    engine = Engine("decode")
    failed = sick = 0
    for now, (fails, is_sick) in enumerate(looks):
        engine.failed = engine.failed + 1 if fails else 0
        engine.sick_since = (engine.sick_since if engine.sick_since is not None else float(now)) if is_sick else None
        engine.judge(float(now), SILENCE_S)
        failed, sick = (failed + 1 if fails else 0), (sick + 1 if is_sick else 0)
        assert (engine.down_since is not None) == (failed >= LOOKS or sick > VERDICT_SHARE * SILENCE_S)


@given(
    st.lists(
        st.tuples(st.floats(0.5, 100), st.lists(st.sampled_from((1.0, 2.0, -3600.0)), max_size=2)),
        min_size=1,
        max_size=30,
    ),
    st.floats(4, 60),
)
def test_an_engine_hangs_after_silence_that_was_looked_at_and_lives_when_every_scheduler_has_written(
    looks: list[tuple[float, list[float]]], limit: float
) -> None:
    engine = Engine("decode")
    now, quiet, lived, last = 0.0, 0.0, False, ()
    for pause, written in looks:
        now += pause
        engine.hear(tuple(written), pause)
        engine.judge(now, limit)
        alive = bool(written) and not (len(written) == len(last) and any(map(operator.eq, written, last)))
        # A wall clock that jumps changes nothing, and neither does a pause in which nobody looked.
        quiet, last = (0.0, tuple(written)) if alive else (quiet + min(pause, PAUSE_S), last)
        lived = lived or alive
        assert engine.hangs == (engine.down_since is not None) == (lived and quiet >= limit)
        if engine.down_since is not None:
            assert now - engine.down_since >= quiet - 1e-6


def test_what_is_not_a_load_is_no_sign_of_life() -> None:
    assert snapshot_times({"loads": [{"timestamp": 2.5}, {"timestamp": 3}]}) == (2.5, 3.0)
    for page in ("null", "[]", "{}", '{"loads": null}', '{"loads": [{}]}', '{"loads": [{"timestamp": "x"}]}'):
        assert snapshot_times(json.loads(page)) == ()


def test_what_does_not_say_what_it_compiles_compiles_nothing() -> None:
    assert compilations({"running": ["nvcc"], "written": 3}) == (True, 3)
    for page in ("null", "[]", "{}", '{"running": [], "written": "x"}', '{"running": []}'):
        assert compilations(json.loads(page)) == (False, -1)


def test_a_kind_is_down_only_when_all_its_engines_are() -> None:
    engines = {"a": Engine("regular", down_since=1.0), "b": Engine("regular")}
    assert kinds_down(engines) == {}
    engines["b"].down_since = 5.0
    assert kinds_down(engines) == {"regular": Outage(5.0, False)}
    engines["a"].silent = True
    assert kinds_down(engines) == {"regular": Outage(5.0, True)}
    engines["a"].silent, engines["b"].hangs = False, True
    assert kinds_down(engines) == {"regular": Outage(5.0, True)}


def test_an_engine_that_takes_no_connections_is_dead_and_does_not_hang() -> None:
    engine = Engine("regular", failed=LOOKS, lived=True, quiet_s=10 * SILENCE_S)
    engine.judge(1000.0, SILENCE_S)
    assert engine.down_since is not None and not engine.hangs


def test_a_prefill_that_hangs_takes_what_has_got_no_answer_and_a_dead_one_nothing() -> None:
    async def lost() -> "asyncio.Future[str]":
        return asyncio.get_running_loop().create_future()

    future = asyncio.run(lost())
    hanging, late = {"prefill": Outage(10.0, True)}, 10.0 + PREFILL_S + 1
    assert loss(Request(9.0, 9.0, future), hanging, 12.0) is None
    assert loss(Request(9.0, 9.0, future), hanging, late)
    assert loss(Request(9.0, 9.0, future, answering=True), hanging, late) is None
    assert loss(Request(late - 1, late - 1, future), hanging, late) is None
    assert loss(Request(9.0, 9.0, future), {"prefill": Outage(10.0, False)}, late) is None
    assert loss(Request(9.0, 9.0, future, answering=True), {"decode": Outage(10.0, False)}, 10.0)
