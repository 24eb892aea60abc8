"""A server with known behaviour to test the load generator against. It computes nothing and stands in for no engine.

    python -m loadtest.testserver --port 0

The model name of a request chooses one of `SCENARIOS`. For each response the server keeps when it handed each token to
its socket (`GET /truth`); on one machine that clock is also the client's. `GET /metrics` counts what an SGLang server
would count, `POST /restart` sets those counters back to zero, `POST /stray` is work that is not the generator's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

EPOCH = time.time() - time.perf_counter()


@dataclass(frozen=True)
class Scenario:
    """Times in seconds. `tokens_per_chunk` > 1 is speculation; `pieces` > 1 sends each event in that many writes."""

    first: float = 0.05
    gap: float = 0.025
    tokens_per_chunk: int = 1
    pieces: int = 1
    empty_deltas: int = 0
    reasoning: int = 0
    comments: bool = False
    continuous_usage: bool = False
    report_usage: bool = True
    crlf: bool = False
    header_delay: float = 0.0
    status: int = 200
    cut_after: int | None = None
    error_after: int | None = None
    endless: bool = False
    silent: bool = False
    garbage: bool = False
    short_by: int = 0
    lockstep: bool = False
    slow_start: float = 0.0


SCENARIOS: dict[str, Scenario] = {
    "plain": Scenario(),
    "speculative": Scenario(tokens_per_chunk=3, gap=0.06),
    "speculative-counted": Scenario(tokens_per_chunk=3, gap=0.06, continuous_usage=True),
    "split": Scenario(pieces=2),
    "shredded": Scenario(pieces=7, crlf=True),
    "empty": Scenario(empty_deltas=2),
    "reasoning": Scenario(reasoning=8),
    "comments": Scenario(comments=True),
    "no-usage": Scenario(report_usage=False),
    "slow-headers": Scenario(header_delay=0.2),
    "busy": Scenario(status=429),
    "overloaded": Scenario(status=503),
    "cut": Scenario(cut_after=5),
    "error": Scenario(error_after=5),
    "endless": Scenario(endless=True),
    "silent": Scenario(silent=True),
    "garbage": Scenario(garbage=True),
    "short": Scenario(short_by=3),
    "lockstep": Scenario(lockstep=True, gap=0.04),
    "warming": Scenario(slow_start=4.0),
    "brisk": Scenario(first=0.01, gap=0.01),
}


@dataclass
class Counters:
    """The counters of an SGLang server that the generator compares with its own."""

    requests: int = 0
    prompt: int = 0
    generation: int = 0
    running: int = 0


@dataclass
class Truth:
    """One response as sent: wall-clock seconds, as in samples."""

    prompt: str
    received: float
    headers: float | None = None
    tokens: list[float] = field(default_factory=list[float])
    kinds: str = ""
    end: float | None = None


class Server:
    """One process-wide state; each connection is served by `serve`."""

    def __init__(self, api_key: str | None = None) -> None:
        self.api_key = api_key
        self.counters = Counters()
        self.truth: list[Truth] = []
        self.begin = time.perf_counter()
        self._steps: dict[float, asyncio.Future[None]] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        received = EPOCH + time.perf_counter()
        method, path, _ = head.split(" ", 2)
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.split("\r\n")[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.api_key and path.startswith("/v1") and headers.get("authorization") != f"Bearer {self.api_key}":
            _answer(writer, 401, {"error": {"message": "Unauthorized"}})
        elif method == "POST" and path in ("/v1/chat/completions", "/generate"):
            return await self._completion(json.loads(body), path == "/generate", received, writer)
        else:
            self._other(path, writer)
        await writer.drain()
        return headers.get("connection", "").lower() != "close"

    def _other(self, path: str, writer: asyncio.StreamWriter) -> None:
        match path:
            case "/v1/models":
                _answer(writer, 200, {"object": "list", "data": [{"id": name} for name in SCENARIOS]})
            case "/truth":
                _answer(writer, 200, [vars(truth) for truth in self.truth])
                self.truth = []
            case "/metrics":
                _answer(writer, 200, self._metrics(), "text/plain; version=0.0.4")
            case "/restart":
                self.counters = Counters(running=self.counters.running)
                _answer(writer, 200, {})
            case "/stray":
                self.counters.requests += 1
                self.counters.prompt += 7
                self.counters.generation += 11
                _answer(writer, 200, {})
            case "/server_info":
                _answer(writer, 200, {"version": "0.0.0", "model_path": "/model", "disaggregation_mode": "null"})
            case _:
                _answer(writer, 404, {"error": {"message": f"no {path} here"}})

    def _metrics(self) -> str:
        counts = self.counters
        counters = {"num_requests": counts.requests, "prompt_tokens": counts.prompt}
        counters |= {"generation_tokens": counts.generation}
        gauges = {"num_running_reqs": counts.running, "num_queue_reqs": 0, "token_usage": 0.25}
        lines: list[str] = []
        for name, value in counters.items():
            lines += [f"# TYPE sglang:{name}_total counter"]
            lines += [f'sglang:{name}_total{{model_name="test",is_streaming="true"}} {value}']
        for name, value in gauges.items():
            lines += [f"# TYPE sglang:{name} gauge", f'sglang:{name}{{model_name="test"}} {value}']
        return "\n".join(lines) + "\n"

    async def _completion(
        self, body: dict[str, Any], generate: bool, received: float, writer: asyncio.StreamWriter
    ) -> bool:
        name = str(body.get("model") or "plain")
        if name not in SCENARIOS:
            _answer(writer, 404, {"error": {"message": f"The model `{name}` does not exist."}})
            return True
        scenario = SCENARIOS[name]
        if scenario.status != 200:
            _answer(writer, scenario.status, {"error": {"message": "try again later"}})
            return True
        if generate:
            prompt = str(body["text"])
            count = int(body["sampling_params"]["max_new_tokens"])
        else:
            prompt = "\n".join(message["content"] for message in body["messages"])
            count = int(body.get("max_tokens") or body["max_completion_tokens"])
        if not body.get("stream"):
            self._whole(writer, prompt, count, generate)
            return True
        truth = Truth(prompt, received)
        self.truth.append(truth)
        self.counters.running += 1
        try:
            stream = _Stream(writer, truth, scenario, generate, prompt_tokens(prompt))
            await asyncio.sleep(scenario.header_delay)
            stream.headers()
            if scenario.silent:
                await asyncio.sleep(3600)
            finished = await self._tokens(stream, scenario, max(1, count - scenario.short_by))
            await writer.drain()
            if not finished:
                return False
        finally:
            self.counters.running -= 1
        self.counters.requests += 1
        self.counters.prompt += prompt_tokens(prompt)
        self.counters.generation += len(truth.tokens)
        stream.end()
        return True

    def _whole(self, writer: asyncio.StreamWriter, prompt: str, count: int, generate: bool) -> None:
        """An answer that is not streamed, as the length probes ask for."""
        self.counters.requests += 1
        self.counters.prompt += prompt_tokens(prompt)
        self.counters.generation += count
        usage = {"prompt_tokens": prompt_tokens(prompt), "completion_tokens": count}
        text = " word" * count
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "length"}
        _answer(writer, 200, {"text": text, "meta_info": usage} if generate else {"choices": [choice], "usage": usage})

    async def _tokens(self, stream: _Stream, scenario: Scenario, count: int) -> bool:
        """Sends the tokens on time. False when the scenario cuts the stream."""
        slow = 4.0 if time.perf_counter() - self.begin < scenario.slow_start else 1.0
        due = time.perf_counter() + scenario.first * slow
        sent = 0
        while (sent < count or scenario.endless) and not stream.writer.is_closing():
            if scenario.lockstep:
                await self._step(scenario.gap)
            elif (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            elif sent % 64 == 63:
                await stream.writer.drain()
                await asyncio.sleep(0)
            if scenario.comments:
                stream.raw(b": keep-alive\n\n")
            for _ in range(scenario.empty_deltas):
                stream.delta(0, sent, "content")
            batch = scenario.tokens_per_chunk if scenario.endless else min(scenario.tokens_per_chunk, count - sent)
            kind = "reasoning_content" if sent < scenario.reasoning else "content"
            await stream.pieces(batch, sent + batch, kind)
            sent += batch
            due += scenario.gap * slow
            if scenario.garbage and sent >= 3:
                stream.raw(b"data: {not json\n\n")
            if scenario.error_after is not None and sent >= scenario.error_after:
                stream.raw(b'data: {"error":{"message":"out of memory","code":500}}\n\n')
                return True
            if scenario.cut_after is not None and sent >= scenario.cut_after:
                return False
        return True

    async def _step(self, gap: float) -> None:
        """All lockstep streams wake together, as one engine step answers all of its requests."""
        step = self._steps.get(gap)
        if step is None or step.done():
            loop = asyncio.get_running_loop()
            step = self._steps[gap] = loop.create_future()
            loop.call_later(gap, step.set_result, None)
        await asyncio.shield(step)


def prompt_tokens(prompt: str) -> int:
    """This server's tokenizer: a word is a token, and its template costs five."""
    return len(prompt.split()) + 5


class _Stream:
    """Writes one response and notes when."""

    def __init__(
        self, writer: asyncio.StreamWriter, truth: Truth, scenario: Scenario, generate: bool, prompt: int
    ) -> None:
        self.writer = writer
        self.truth = truth
        self.scenario = scenario
        self.generate = generate
        self.prompt = prompt
        self.newline = b"\r\n" if scenario.crlf else b"\n"

    def headers(self) -> None:
        self.truth.headers = EPOCH + time.perf_counter()
        self.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        if not self.generate:
            self.raw(self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))

    def raw(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def delta(self, tokens: int, total: int, kind: str) -> None:
        self.raw(self._delta(tokens, total, kind))

    async def pieces(self, tokens: int, total: int, kind: str) -> None:
        """One event of `tokens` tokens, in as many writes as the scenario says; it counts when the last is out."""
        data = self._delta(tokens, total, kind)
        size = -(-len(data) // self.scenario.pieces)
        parts = [data[k : k + size] for k in range(0, len(data), size)]
        for part in parts[:-1]:
            self.raw(part)
            await asyncio.sleep(0.001)
        now = EPOCH + time.perf_counter()
        self.raw(parts[-1])
        self.truth.tokens += [now] * tokens
        self.truth.kinds += ("r" if kind == "reasoning_content" else "c") * tokens

    def end(self) -> None:
        if not self.generate:
            self.raw(self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}))
            if self.scenario.report_usage:
                self.raw(self._event({"choices": [], "usage": self._usage(len(self.truth.tokens))}))
        self.truth.end = EPOCH + time.perf_counter()
        self.raw(b"data: [DONE]" + self.newline * 2)
        self.writer.write(b"0\r\n\r\n")

    def _delta(self, tokens: int, total: int, kind: str) -> bytes:
        text = " word" * tokens
        if self.generate:
            meta = {"completion_tokens": total, "prompt_tokens": self.prompt, "finish_reason": None}
            return self._event({"text": text, "meta_info": meta})
        event: dict[str, Any] = {"choices": [{"index": 0, "delta": {kind: text}, "finish_reason": None}]}
        if self.scenario.continuous_usage:
            event["usage"] = self._usage(total)
        return self._event(event)

    def _usage(self, completion: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": completion,
            "total_tokens": self.prompt + completion,
        }

    def _event(self, event: dict[str, Any]) -> bytes:
        if not self.generate:
            event = {"id": "1", "object": "chat.completion.chunk", "model": "test", **event}
        return b"data: " + json.dumps(event).encode() + self.newline * 2


def _answer(writer: asyncio.StreamWriter, status: int, body: object, kind: str = "application/json") -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} Test\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def run(port: int, ready: Callable[[int], None], api_key: str | None, certificate: str | None) -> None:
    """Serves on loopback until cancelled; calls `ready` with the port."""
    tls = None
    if certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate)
    server = await asyncio.start_server(Server(api_key).serve, "127.0.0.1", port, ssl=tls, backlog=1024)
    ready(cast("tuple[str, int]", server.sockets[0].getsockname())[1])
    async with server:
        await server.serve_forever()


@contextmanager
def running(*arguments: str) -> Generator[str]:
    """A server in a process of its own, for tests; gives its base URL."""
    command = [sys.executable, "-m", "loadtest.testserver", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield f"{'https' if '--certificate' in arguments else 'http'}://127.0.0.1:{port}"
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description="test server for the load generator")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--api-key-file")
    parser.add_argument("--certificate", help="PEM file with certificate and key: serve TLS")
    options = parser.parse_args()
    key = None
    if options.api_key_file:
        with open(options.api_key_file, encoding="utf-8") as file:  # noqa: PTH123
            key = file.read().strip()

    def ready(port: int) -> None:
        print(port, flush=True)  # noqa: T201

    asyncio.run(run(options.port, ready, key, options.certificate))


if __name__ == "__main__":
    main()
