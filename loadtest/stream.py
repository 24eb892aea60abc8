"""One HTTP/1.1 connection for streamed POSTs on gevent sockets.

The time of a token is the time its bytes reached this machine: the kernel stamps them (SO_TIMESTAMPNS, socket(7)), so
a busy generator reads late but does not measure late. Through TLS there are no such stamps and it is the time of the
socket read; the greenlet then yields once before it parses, so that when one engine step answers many streams at once
all of them are read, and stamped, before any is parsed. HTTP is parsed by llhttp (C, through geventhttpclient).
"""

from __future__ import annotations

import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import gevent
from gevent import select as gevent_select
from gevent import socket as gevent_socket
from gevent import ssl as gevent_ssl
from geventhttpclient.response import HTTPParseError, HTTPResponse

from loadtest.samples import ErrorKind

READ_SIZE = 16384
SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python has no name for it
_TIMESPEC = struct.Struct("qq")


class StreamError(Exception):
    """A request that failed: `kind` as in samples, `status` of the response if there was one."""

    def __init__(self, kind: ErrorKind, detail: str, status: int | None = None) -> None:
        super().__init__(detail)
        self.kind: ErrorKind = kind
        self.detail = detail
        self.status = status


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds to wait: for the connection, for the next byte, for the whole request."""

    connect: float = 10.0
    silence: float = 300.0
    total: float = 1800.0


class _Response(HTTPResponse):
    """Hands the body on in pieces instead of keeping it."""

    def take(self) -> bytes:
        body = bytes(self._body_buffer)
        self._body_buffer.clear()
        return body


class Connection:
    """A keep-alive connection to one server. Not shared between greenlets."""

    def __init__(self, url: str, *, api_key: str | None, ca_file: str | None, limits: Limits) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http(s) URL: {url!r}")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._base = parts.path.rstrip("/")
        self._tls = gevent_ssl.create_default_context(cafile=ca_file) if parts.scheme == "https" else None
        self._limits = limits
        self._sock: gevent_socket.socket | None = None
        head = f"Host: {parts.netloc.rpartition('@')[2]}\r\n"
        head += "Content-Type: application/json\r\nAccept: text/event-stream\r\n"
        if api_key:
            head += f"Authorization: Bearer {api_key}\r\n"
        self._head = head

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def post(
        self, path: str, body: bytes, on_headers: Callable[[float], None], on_body: Callable[[float, bytes], None]
    ) -> None:
        """Sends `body`, calls `on_headers` once and `on_body` for each read that brought body bytes.

        Raises StreamError. Whatever `on_body` raises ends the request and goes up; the connection is then closed.
        """
        total = gevent.Timeout(self._limits.total)
        clean = False
        try:
            with total:
                self._exchange(path, body, on_headers, on_body)
            clean = True
        except gevent.Timeout as timeout:
            if timeout is not total:
                raise
            raise StreamError("timeout", f"no end of the response within {self._limits.total:g} s") from None
        finally:
            if not clean:
                self.close()

    def _exchange(
        self, path: str, body: bytes, on_headers: Callable[[float], None], on_body: Callable[[float, bytes], None]
    ) -> None:
        sock = self._connected()
        request = f"POST {self._base}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n".encode()
        response = _Response("POST")
        refusal = bytearray()
        try:
            sock.sendall(request + body)
            while not response.message_complete:
                block, now = self._receive(sock)
                if not block:
                    if _ends_here(response):
                        break
                    where = "inside the stream" if response.headers_complete else "before the response"
                    raise StreamError("cut", f"the connection was closed {where}", _status(response))
                begun = response.headers_complete
                response.feed(block)
                if response.headers_complete and not begun and response.status_code >= 200:
                    on_headers(now)
                piece = response.take()
                if not piece:
                    continue
                if response.status_code == 200:
                    on_body(now, piece)
                elif len(refusal) < 2000:
                    refusal += piece
        except TimeoutError:
            raise StreamError("timeout", f"no byte for {self._limits.silence:g} s", _status(response)) from None
        except HTTPParseError as error:
            raise StreamError("protocol", f"not HTTP: {error}", _status(response)) from error
        except OSError as error:
            raise StreamError("cut", f"the connection broke: {error.strerror or error}", _status(response)) from error
        if response.should_close():
            self.close()
        if response.status_code != 200:
            text = refusal.decode(errors="replace").strip()
            raise StreamError("http", f"HTTP {response.status_code}: {text[:500]}", response.status_code)

    def _receive(self, sock: gevent_socket.socket) -> tuple[bytes, float]:
        """Next bytes and when they arrived, on the clock of `time.perf_counter`."""
        if self._tls is not None:
            block = sock.recv(READ_SIZE)
            now = time.perf_counter()
            gevent.sleep(0)
            return block, now
        block, stamps, _, _ = sock.recvmsg(READ_SIZE, 64)
        now = time.perf_counter()
        for level, kind, value in stamps:
            if level == gevent_socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(value) == _TIMESPEC.size:
                seconds, nanoseconds = _TIMESPEC.unpack(value)
                late = time.time() - seconds - nanoseconds * 1e-9
                # Outside of this the wall clock was set between arrival and read.
                if 0 <= late < 5:
                    now -= late
        return block, now

    def _connected(self) -> gevent_socket.socket:
        if self._sock is not None:
            # An idle connection that became readable was closed by the server: that is no failed request.
            readable, _, _ = gevent_select.select([self._sock], [], [], 0)
            if not readable:
                return self._sock
            self.close()
        try:
            sock = gevent_socket.create_connection((self._host, self._port), timeout=self._limits.connect)
            sock.setsockopt(gevent_socket.IPPROTO_TCP, gevent_socket.TCP_NODELAY, 1)
            if self._tls is None:
                sock.setsockopt(gevent_socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            else:
                sock = self._tls.wrap_socket(sock, server_hostname=self._host)
        except ssl.SSLError as error:
            raise StreamError("tls", f"TLS with {self._host}:{self._port} failed: {error.reason or error}") from error
        except TimeoutError:
            raise StreamError(
                "timeout", f"no connection to {self._host}:{self._port} within {self._limits.connect:g} s"
            ) from None
        except OSError as error:
            raise StreamError(
                "connect", f"cannot connect to {self._host}:{self._port}: {error.strerror or error}"
            ) from error
        sock.settimeout(self._limits.silence)
        self._sock = sock
        return sock


def _ends_here(response: HTTPResponse) -> bool:
    """Is a closed connection the proper end of this response (one without length and chunks)?"""
    try:
        response.feed(b"")
    except HTTPParseError:
        return False
    return response.message_complete


def _status(response: HTTPResponse) -> int | None:
    return response.status_code if response.headers_complete else None
