"""What clients of the router's container talk to: passes requests on to the router and lets none hang or vanish.

The router (0.3.2) waits for prefill although decode refused the connection, for as long as prefill waits for decode; it
answers 503 without Retry-After while it knows no engine; and it refuses connections while it starts. So this process
owns the port and runs the router as its child, on an address inside the container:

- a request for which there is no engine or no router waits WAIT_S, then gets 503 with Retry-After;
- when all engines of a kind are dead or hang, requests in flight get an error instead of silence; when one of several
  hangs, those that it has;
- a router that dies is started again, one that hangs is killed;
- on SIGHUP the router is replaced once the requests in flight have ended;
- on SIGTERM new requests get 503 with Retry-After, those in flight may finish.
"""

import argparse
import asyncio
import json
import re
import secrets
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from engine_runtime import jit

ROUTER_PORT = 30001
CONTROL_PORT = 30002
METRICS_PORT = 29000
WAIT_S = 10.0
RETRY_AFTER_S = 10
LOOK_S = 1.0
CONNECT_S = 3.0
# To an engine, on the same bridge: the kernel there answers in less than a millisecond, however busy the process is.
LOOK_CONNECT_S = 1.5
LOOKS = 2
# The router's own probes see an engine that accepts connections and does nothing more. Its verdict counts once it has
# stood, and our own question for a token has had no answer, for this share of SILENCE_S: a busy moment is then no
# explanation.
VERDICT_SHARE = 0.5
# What a prefill that hangs has to come back before its requests are given up, from its last sign of life.
PREFILL_S = 8.0
# An engine shows that it lives by another load snapshot: its scheduler writes one with each prefill batch, with every
# 15th decode step, and when idle at least once a second. Without one for ASK_S it is asked for a token, and hangs if
# neither comes for SILENCE_S, the default of the variable ENGINE_SILENCE. One step of the scheduler must fit: a chunk
# of 8192 tokens is about a second of arithmetic for four GPUs. With the looks' own time it must stay well below the
# 15 s in which a client gets an error. That it compiles is a sign of life too (engine_runtime.jit).
ASK_S = 3.0
SILENCE_S = 10.0
# A look later than this after the one before it was the gate's own pause, which says nothing about engines.
PAUSE_S = 3.0
# SGLang gives its own probe up after 20 s.
TOKEN_S = 20.0
ROUTER_START_S = 30.0
# So often in a row it takes a connection and says nothing within CONNECT_S.
ROUTER_LOOKS = 3
ROUTER_DEATHS = 5
ROUTER_DEATHS_WINDOW_S = 60.0
HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade"),
    }
)
_WORKER = r'\{[^}]*worker="([^"]+)"[^}]*\} ([0-9.]+)$'
_WORKER_HEALTH = re.compile(f"^smg_worker_health{_WORKER}", re.MULTILINE)
_WORKER_REQUESTS = re.compile(f"^smg_worker_requests_active{_WORKER}", re.MULTILINE)


class Lost(Exception):
    """The request cannot be answered any more; the text says why."""


@dataclass(frozen=True)
class Settings:
    """What the gate takes from the router's own arguments.

    Attributes:
        engines: address of each engine → how the router knows it (`url`, `worker_type`, `bootstrap_port`).
        max_payload: bytes of one request.
        grace_s: how long requests in flight may go on after SIGTERM or SIGHUP.
        silence_s: how long an engine may show no sign of life.
    """

    engines: Mapping[str, Mapping[str, Any]]
    max_payload: int
    grace_s: float
    silence_s: float = SILENCE_S


def settings(arguments: Sequence[str], silence_s: float = SILENCE_S) -> Settings:
    """Read the router's arguments; those that the gate does not need are the router's to judge."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--prefill", nargs="+", action="append", default=[])
    parser.add_argument("--decode", nargs=1, action="append", default=[])
    parser.add_argument("--worker-urls", nargs="*", default=[])
    parser.add_argument("--max-payload-size", type=int, default=32 * 1024**2)
    parser.add_argument("--shutdown-grace-period-secs", type=float, default=30.0)
    known, _ = parser.parse_known_args(arguments)
    workers: list[dict[str, Any]] = [{"url": url, "worker_type": "regular"} for url in known.worker_urls]
    for url, *port in known.prefill:
        bootstrap = {"bootstrap_port": int(port[0])} if port and port[0].isdigit() else {}
        workers.append({"url": url, "worker_type": "prefill", **bootstrap})
    workers += [{"url": url, "worker_type": "decode"} for (url,) in known.decode]
    engines = {str(worker["url"]): worker for worker in workers}
    return Settings(engines, known.max_payload_size, known.shutdown_grace_period_secs, silence_s)


@dataclass
class Engine:
    """What the looks at one engine have shown.

    Attributes:
        failed: looks without a connection in a row.
        silent: the last of them got no answer at all, not even a refusal.
        written: when its schedulers wrote the last load snapshots that were seen, by their clock.
        lived: it has shown a sign of life since this process began.
        quiet_s: for how long there has been none.
        hangs: that is too long, and it takes connections. Not one that never lived: it may be starting, or be none that
            the gate can ask.
        sick_since: since when the router calls it unhealthy and nothing else has shown a sign of life, None if it does
            not.
        compiling: its compilers were at work when it was last asked.
        compiled: how much they had written.
        down_since: its last sign of life before it was found dead, hanging or sick for too long, None while it is
            none of these.
    """

    kind: str
    failed: int = 0
    silent: bool = False
    written: tuple[float, ...] = ()
    lived: bool = False
    quiet_s: float = 0.0
    hangs: bool = False
    sick_since: float | None = None
    compiling: bool = False
    compiled: int = -1
    down_since: float | None = None

    def hear(self, written: tuple[float, ...], since_last: float) -> None:
        """Take up a look at its load snapshots.

        Args:
            written: when they were written, one of each scheduler; empty if none could be had. Only that they change
                counts: the wall clock may jump.
            since_last: seconds since the look before.
        """
        moved = bool(written) and (
            len(written) != len(self.written) or all(new != old for new, old in zip(written, self.written, strict=True))
        )
        if moved:
            self.written = written
            self.live()
        else:
            self.quiet_s += min(since_last, PAUSE_S)

    def hear_of_compilers(self, running: bool, written: int) -> None:
        """Take up what its compilers do.

        Args:
            running: they are at work.
            written: how much they have written so far; more than at the last look is a sign of life too.
        """
        self.compiling = running or 0 <= self.compiled < written
        self.compiled = written
        if self.compiling:
            self.work()

    def live(self) -> None:
        """Take up a sign of life of its scheduler."""
        self.lived, self.quiet_s = True, 0.0

    def work(self) -> None:
        """Take up that it generates or compiles: the router's verdict has been overtaken."""
        self.live()
        self.sick_since = None

    def judge(self, now: float, silence_s: float) -> None:
        """Decide whether it is down, from the looks so far."""
        sick = self.sick_since is not None and now - self.sick_since >= VERDICT_SHARE * silence_s
        dead = self.failed >= LOOKS
        # What a dead one had the router itself sends to another.
        self.hangs = self.lived and not dead and self.quiet_s >= silence_s
        if dead or self.hangs or sick:
            self.down_since = self.down_since or now - self.quiet_s
        else:
            self.down_since = None


class Outage(NamedTuple):
    """No engine of a kind is left.

    Attributes:
        since: when the last of them showed its last sign of life.
        hanging: one of them keeps its connections and does nothing with them.
    """

    since: float
    hanging: bool


@dataclass(eq=False)
class Request:
    """A request in flight.

    Attributes:
        begun: when it arrived.
        heard: when the last of its answer came; before that, when it was handed to the router.
        lost: set with the reason once it cannot be answered any more.
        answering: the head of the answer has been sent.
    """

    begun: float
    heard: float
    lost: "asyncio.Future[str]"
    answering: bool = False


def kinds_down(engines: Mapping[str, Engine]) -> dict[str, Outage]:
    """The kinds of which no engine is left."""
    found: dict[str, Outage] = {}
    for kind in {engine.kind for engine in engines.values()}:
        alike = [engine for engine in engines.values() if engine.kind == kind]
        since = [engine.down_since for engine in alike if engine.down_since is not None]
        if len(since) == len(alike):
            hanging = any(engine.silent or engine.hangs or engine.sick_since is not None for engine in alike)
            found[kind] = Outage(max(since), hanging)
    return found


def loss(request: Request, down: Mapping[str, Outage], now: float) -> str | None:
    """Why a request cannot be answered any more, or None."""
    for kind, outage in down.items():
        if kind != "prefill":
            return f"no {kind} is alive"
        # A prefill that died ends its requests, and decode those that waited for it. One that hangs keeps the router
        # waiting, even after decode has given up. Without an answer that has begun nobody here can tell whether decode
        # has the KV cache already.
        if outage.hanging and not request.answering and now - max(outage.since, request.begun) > PREFILL_S:
            return "prefill does not answer"
    return None


def stranded(
    flying: Collection[Request], hanging: Collection[str], held: Mapping[str, int], now: float, silence_s: float
) -> list[Request]:
    """The requests that engines which hang have, while others of their kind serve.

    Nobody says which request is where, only how many each engine has. So these are all that have been silent for as
    long as an engine may be, and none if they are more than the engines have: then some may only take long elsewhere.

    Args:
        hanging: addresses of the engines that hang.
        held: how many requests the router has sent to each engine and not got back, by address.
        silence_s: as in Settings.
    """
    silent = [request for request in flying if now - request.heard >= silence_s]
    return silent if len(silent) <= sum(held.get(url.rstrip("/"), 0) for url in hanging) else []


def snapshot_times(page: Any) -> tuple[float, ...]:
    """When the snapshots on an engine's `/v1/loads` were written, in seconds of its clock; empty if it does not say."""
    try:
        return tuple(float(load["timestamp"]) for load in page["loads"])
    except (KeyError, TypeError, ValueError):
        return ()


def compilations(page: Any) -> tuple[bool, int]:
    """Whether an engine compiles, and how much it has, from its `jit.state`; nothing if it does not say."""
    try:
        return bool(page["running"]), int(page["written"])
    except (KeyError, TypeError, ValueError):
        return False, -1


def unhealthy(metrics: str) -> set[str]:
    """The engines that the router itself calls unhealthy, from its metrics page."""
    return {address.rstrip("/") for address, value in _WORKER_HEALTH.findall(metrics) if float(value) == 0}


def requests_held(metrics: str) -> dict[str, int]:
    """How many requests each engine has, from the router's metrics page."""
    return {address.rstrip("/"): int(float(value)) for address, value in _WORKER_REQUESTS.findall(metrics)}


@dataclass
class Gate:
    """The process's state.

    Attributes:
        command: starts the router.
        key: opens the router's admin routes; the router gets it through its standard input.
        drained: engines that get no new requests, by address.
        held: new requests wait.
        closing: new requests are refused.
        asked: engines that have been asked for a token and have not answered yet.
    """

    settings: Settings
    command: Sequence[str]
    engines: dict[str, Engine] = field(default_factory=dict[str, Engine])
    flying: set[Request] = field(default_factory=set[Request])
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    drained: set[str] = field(default_factory=set[str])
    waiting: int = 0
    held: bool = False
    closing: bool = False
    deaths: list[float] = field(default_factory=list[float])
    asked: dict[str, "asyncio.Future[None]"] = field(default_factory=dict[str, "asyncio.Future[None]"])
    router: asyncio.subprocess.Process | None = None
    session: Any = None

    # ---- requests

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass one request on and its answer back."""
        if self.closing:
            return refusal("the router is being stopped")
        body = await request.read()
        now = time.monotonic()
        flight = Request(now, now, asyncio.get_running_loop().create_future())
        answer: list[web.StreamResponse] = []
        passing = asyncio.ensure_future(self._pass(request, body, flight, answer))
        try:
            await asyncio.wait({passing, flight.lost}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                return passing.result()
            passing.cancel()
            await asyncio.wait({passing})
            return await self._break_off(flight.lost.result(), request, answer)
        finally:
            passing.cancel()
            self.flying.discard(flight)

    async def _pass(
        self, request: web.Request, body: bytes, flight: Request, answer: list[web.StreamResponse]
    ) -> web.StreamResponse:
        deadline = flight.begun + WAIT_S
        # Only questions wait; whoever asks how things are wants to know it now.
        patient = request.method == "POST"
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        # The router makes one too, and keeps it to itself: the engines would log none (deploy trace).
        if "X-Request-Id" not in request.headers:
            headers["X-Request-Id"] = uuid.uuid4().hex
        while True:
            if patient and (obstacle := self._obstacle()):
                if not await self._later(deadline):
                    return refusal(obstacle)
                continue
            self.flying.add(flight)
            flight.heard = time.monotonic()
            try:
                async with self.session.request(
                    request.method,
                    f"http://127.0.0.1:{ROUTER_PORT}{request.raw_path}",
                    headers=headers,
                    data=body or None,
                    allow_redirects=False,
                ) as upstream:
                    if upstream.status != 503 or not patient:
                        return await self._relay(request, upstream, flight, answer)
                    refused = await upstream.read()
            except aiohttp.ClientConnectorError:
                refused = b"the router is starting"
            except aiohttp.ClientError as error:
                if not answer:
                    return refusal(f"the router broke the connection off: {error}", status=502)
                return await self._break_off("the router broke the answer off", request, answer)
            self.flying.discard(flight)
            if not patient or not await self._later(deadline):
                return refusal(refused.decode(errors="replace"))

    def _obstacle(self) -> str | None:
        """Why a request should not even be tried now."""
        if self.held:
            return "the router is being replaced"
        down = kinds_down(self.engines)
        return f"no {' and no '.join(sorted(down))} is alive" if down else None

    async def _later(self, deadline: float) -> bool:
        """Wait a moment; False if there is no time left for another try."""
        if time.monotonic() + 0.25 > deadline:
            return False
        self.waiting += 1
        try:
            await asyncio.sleep(0.25)
        finally:
            self.waiting -= 1
        return True

    async def _relay(
        self, request: web.Request, upstream: Any, flight: Request, answer: list[web.StreamResponse]
    ) -> web.StreamResponse:
        headers = [(name, value) for name, value in upstream.headers.items() if name.lower() not in HOP_BY_HOP]
        response = web.StreamResponse(status=upstream.status, reason=upstream.reason)
        response.headers.extend(headers)
        await response.prepare(request)
        answer.append(response)
        flight.answering = True
        async for piece in upstream.content.iter_any():
            flight.heard = time.monotonic()
            await response.write(piece)
        await response.write_eof()
        return response

    async def _break_off(
        self, reason: str, request: web.Request, answer: list[web.StreamResponse]
    ) -> web.StreamResponse:
        """End a request with an error that cannot be taken for an answer."""
        if not answer:
            return refusal(reason)
        response = answer[0]
        if response.content_type == "text/event-stream":
            await response.write(f"data: {json.dumps(error_body(503, reason))}\n\n".encode())
        # Without the end of the body, the client's library reports it too.
        if request.transport:
            request.transport.close()
        return response

    # ---- engines

    async def look(self) -> None:
        """Look at the engines for ever, and give up requests that have lost theirs."""
        self.engines = {url: Engine(str(worker["worker_type"])) for url, worker in self.settings.engines.items()}
        hung, last = 0, time.monotonic()
        while True:
            began = time.monotonic()
            since_last, last = began - last, began
            await asyncio.gather(*(self._look_at(url, engine, since_last) for url, engine in self.engines.items()))
            await self._keep_drained()
            metrics, hangs = await asyncio.gather(self._router_metrics(), self._router_hangs())
            sick = unhealthy(metrics)
            hung = hung + 1 if hangs else 0
            if hung >= ROUTER_LOOKS and self.router and self.router.returncode is None:
                say("router_hangs")
                self.router.kill()
            now = time.monotonic()
            for url, engine in self.engines.items():
                engine.sick_since = (engine.sick_since or now) if url.rstrip("/") in sick else None
                hung_before = engine.hangs
                engine.judge(now, self.settings.silence_s)
                if engine.hangs != hung_before:
                    say("engine_hangs" if engine.hangs else "engine_lives", engine=url)
            down = kinds_down(self.engines)
            for flight in [*self.flying]:
                if not flight.lost.done() and (reason := loss(flight, down, now)):
                    flight.lost.set_result(reason)
            hanging = [url for url, engine in self.engines.items() if engine.hangs]
            for flight in stranded(self.flying, hanging, requests_held(metrics), now, self.settings.silence_s):
                if not flight.lost.done():
                    flight.lost.set_result("the engine that has this request hangs")
            await asyncio.sleep(max(0.0, LOOK_S - (time.monotonic() - began)))

    async def _look_at(self, url: str, engine: Engine, since_last: float) -> None:
        await self._connect(url, engine)
        engine.hear(() if engine.failed else await self._snapshots(url), since_last)
        if engine.failed or not engine.quiet_s:
            engine.compiling = False
        if engine.failed or (engine.quiet_s < ASK_S and engine.sick_since is None):
            return
        engine.hear_of_compilers(*compilations(await self._page(url, jit.ROUTE)))
        if not engine.compiling and url not in self.asked:
            self.asked[url] = asyncio.ensure_future(self._ask(url, engine))

    async def _snapshots(self, url: str) -> tuple[float, ...]:
        return snapshot_times(await self._page(url, "/v1/loads?include=core"))

    async def _page(self, url: str, path: str) -> Any:
        """A page of JSON from an engine, None if it does not answer at once."""
        limit = aiohttp.ClientTimeout(total=LOOK_CONNECT_S)
        try:
            async with self.session.get(f"{url.rstrip('/')}{path}", timeout=limit) as page:
                return await page.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    async def _ask(self, url: str, engine: Engine) -> None:
        """Let an engine generate a token, which it skips while it answers requests: the answer is a sign of life."""
        try:
            async with self.session.get(
                f"{url.rstrip('/')}/health", timeout=aiohttp.ClientTimeout(total=TOKEN_S)
            ) as answer:
                if answer.status == 200:
                    engine.work()
        except (aiohttp.ClientError, TimeoutError):
            pass
        finally:
            self.asked.pop(url, None)

    async def _connect(self, url: str, engine: Engine) -> None:
        parts = urlsplit(url)
        try:
            _, writer = await asyncio.wait_for(
                asyncio.open_connection(parts.hostname, parts.port or 80), timeout=LOOK_CONNECT_S
            )
        except (OSError, TimeoutError) as error:
            engine.failed += 1
            engine.silent = not isinstance(error, (ConnectionRefusedError, socket.gaierror))
        else:
            engine.failed, engine.silent = 0, False
            writer.close()

    async def _router_metrics(self) -> str:
        try:
            limit = aiohttp.ClientTimeout(total=CONNECT_S)
            async with self.session.get(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=limit) as page:
                return await page.text()
        except (aiohttp.ClientError, TimeoutError):
            return ""

    # ---- the router

    async def keep_router(self) -> int:
        """Run the router for ever; returns when it dies again and again."""
        while True:
            self.router = await asyncio.create_subprocess_exec(*self.command, stdin=asyncio.subprocess.PIPE)
            if self.router.stdin:
                self.router.stdin.write(f"{self.key}\n".encode())
                self.router.stdin.close()
            code = await self.router.wait()
            if self.closing:
                return 0
            now = time.monotonic()
            if not self.held:
                self.deaths = [when for when in self.deaths if now - when < ROUTER_DEATHS_WINDOW_S] + [now]
                say("router_died", code=code, deaths=len(self.deaths))
            if len(self.deaths) >= ROUTER_DEATHS:
                return code or 1
            await asyncio.sleep(min(4.0, 0.1 * 2 ** len(self.deaths)))

    async def replace_router(self) -> None:
        """Hold new requests, let those in flight finish, and start the router anew."""
        if self.held or self.router is None:
            return
        self.held = True
        try:
            say("replacing_router", in_flight=len(self.flying))
            await self._drained()
            old = self.router
            old.terminate()
            deadline = time.monotonic() + ROUTER_START_S
            while time.monotonic() < deadline and (self.router is old or not await self._router_answers()):
                await asyncio.sleep(0.1)
        finally:
            self.held = False
        say("replaced_router")

    async def _router_hangs(self) -> bool:
        """Whether the router takes connections and does not answer; one that starts refuses them."""
        limit = aiohttp.ClientTimeout(total=CONNECT_S)
        try:
            async with self.session.get(f"http://127.0.0.1:{ROUTER_PORT}/liveness", timeout=limit):
                return False
        except TimeoutError:
            return True
        except aiohttp.ClientError:
            return False

    async def _router_answers(self) -> bool:
        try:
            limit = aiohttp.ClientTimeout(total=CONNECT_S)
            async with self.session.get(f"http://127.0.0.1:{ROUTER_PORT}/readiness", timeout=limit) as page:
                return page.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _drained(self) -> None:
        deadline = time.monotonic() + self.settings.grace_s
        while self.flying and time.monotonic() < deadline:
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Refuse new requests, let those in flight finish, and end the router."""
        self.closing = True
        say("closing", in_flight=len(self.flying))
        await self._drained()
        if self.router and self.router.returncode is None:
            self.router.terminate()
            try:
                await asyncio.wait_for(self.router.wait(), 5)
            except TimeoutError:
                self.router.kill()

    # ---- what the controller asks

    async def control(self, request: web.Request) -> web.StreamResponse:
        """GET /: what is in flight, what waits, how the engines are. POST /drain or /restore: the engine in `url`."""
        if request.method == "POST":
            url = request.query.get("url", "")
            if url not in self.engines or request.path not in ("/drain", "/restore"):
                return web.json_response({"error": f"no such engine or action: {request.path_qs}"}, status=404)
            if request.path == "/drain":
                self.drained.add(url)
                await self._keep_drained()
            else:
                self.drained.discard(url)
                await self._admin("POST", "/workers", dict(self.settings.engines[url]))
            say(request.path.strip("/"), engine=url)
        engines = {
            url: {
                "alive": engine.down_since is None,
                "hangs": engine.hangs,
                "compiles": engine.compiling,
                "drained": url in self.drained,
            }
            for url, engine in self.engines.items()
        }
        known = await self._workers()
        return web.json_response(
            {
                "in_flight": len(self.flying),
                "waiting": self.waiting,
                "replacing": self.held,
                "engines": engines,
                "router_knows": sorted(known),
            }
        )

    async def _workers(self) -> dict[str, str]:
        """The engines that the router sends requests to: address → the router's name for it."""
        listed: dict[str, Any] = await self._admin("GET", "/workers") or {}
        return {item["url"]: item["id"] for item in listed.get("workers", []) if item.get("is_healthy")}

    async def _keep_drained(self) -> None:
        """Take the drained engines out of the router, which brings them back when it starts."""
        if self.drained:
            for url, name in (await self._workers()).items():
                if url in self.drained:
                    await self._admin("DELETE", f"/workers/{name}")

    async def _admin(self, method: str, path: str, body: object = None) -> Any:
        """Ask one of the router's admin routes; None if it does not answer."""
        try:
            async with self.session.request(
                method,
                f"http://127.0.0.1:{ROUTER_PORT}{path}",
                json=body,
                headers={"Authorization": f"Bearer {self.key}"},
                timeout=aiohttp.ClientTimeout(total=CONNECT_S),
            ) as answer:
                return await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error in the form that OpenAI's clients read."""
    return {"error": {"type": "Service Unavailable", "code": status, "message": message}}


def refusal(message: str, status: int = 503) -> web.Response:
    """An answer that says to try again later."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    return web.json_response(error_body(status, message), status=status, headers=headers)


def say(event: str, **facts: object) -> None:
    """One line of the log."""
    sys.stderr.write(json.dumps({"event": event, **facts}) + "\n")


@asynccontextmanager
async def listening(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], host: str, port: int, max_size: int
) -> AsyncGenerator[None]:
    """Serve every path with one handler; its task ends with the client's connection."""
    application = web.Application(client_max_size=max_size)
    application.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, host, port, backlog=1024, reuse_address=True).start()
    try:
        yield
    finally:
        await runner.cleanup()


async def serve(gate: Gate, host: str, port: int) -> int:
    """Run gate and router until SIGTERM or until the router cannot be kept alive; returns the exit code."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tasks: set[asyncio.Task[Any]] = set()
    loop.add_signal_handler(signal.SIGHUP, lambda: tasks.add(asyncio.ensure_future(gate.replace_router())))
    # A kept connection may be one to the router of before.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=limits, auto_decompress=False) as gate.session,
        listening(gate.handle, host, port, gate.settings.max_payload),
        listening(gate.control, "127.0.0.1", CONTROL_PORT, 0),
    ):
        keeping, looking = asyncio.ensure_future(gate.keep_router()), asyncio.ensure_future(gate.look())
        stopping = asyncio.ensure_future(stop.wait())
        done, _ = await asyncio.wait({keeping, looking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await gate.close()
        for task in (looking, *tasks, *gate.asked.values()):
            task.cancel()
        # A look that failed is a fault of ours: end, and be started again.
        return keeping.result() if keeping in done else int(looking in done)


def run(arguments: Sequence[str], command: Sequence[str], host: str, port: int, silence_s: float = SILENCE_S) -> int:
    """Run the gate in this process until it ends; returns the exit code.

    Args:
        arguments: the router's.
        command: starts the router on ROUTER_PORT.
        host, port: where clients reach the gate.
        silence_s: how long an engine may show no sign of life.
    """
    return asyncio.run(serve(Gate(settings(arguments, silence_s), command), host, port))
