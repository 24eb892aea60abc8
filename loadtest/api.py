"""Small requests beside the load: models, probes, server information, metrics pages."""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx

from loadtest.errors import BenchError

LARGEST_BODY = 16 * 2**20
LONGEST_BODY_S = 120.0


class _Bounded(httpx.SyncByteStream):
    """A body that ends with an error where it is too long, in bytes or in seconds."""

    def __init__(self, stream: httpx.SyncByteStream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        size, deadline = 0, time.monotonic() + LONGEST_BODY_S
        for piece in self._stream:
            size += len(piece)
            if size > LARGEST_BODY:
                raise httpx.ReadError(f"the answer is longer than {LARGEST_BODY // 2**20} MiB")
            if time.monotonic() > deadline:
                raise httpx.ReadError(f"the answer did not end within {LONGEST_BODY_S:.0f} s")
            yield piece

    def close(self) -> None:
        self._stream.close()


def bound(response: httpx.Response) -> None:
    """Let no body fill the memory or last for ever: a response hook for httpx, whose own limit is for a silence."""
    if isinstance(response.stream, httpx.SyncByteStream):
        response.stream = _Bounded(response.stream)


class Api:
    """An HTTP client for one base URL; every failure is a BenchError that says what to do."""

    def __init__(
        self, url: str, *, api_key: str | None = None, ca_file: Path | None = None, timeout: float = 30.0
    ) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            verify: ssl.SSLContext | bool = ssl.create_default_context(cafile=str(ca_file)) if ca_file else True
            parsed = httpx.URL(self.url)
        except (OSError, ssl.SSLError) as error:
            raise BenchError(
                f"cannot use the CA file {ca_file}", str(error), "give a PEM file with --ca-file"
            ) from None
        except httpx.InvalidURL as error:
            raise BenchError(f"not a URL: {url!r}", str(error), "for example http://127.0.0.1:8000") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise BenchError(f"not a URL: {url!r}", "it needs http:// or https:// and a host", "http://127.0.0.1:8000")
        if parsed.userinfo:
            raise BenchError(
                "the URL holds a user name or password",
                "it would be in every report of this run",
                "name a file that holds the API key: --api-key-file FILE",
            )
        self._client = httpx.Client(
            headers=headers, verify=verify, timeout=timeout, trust_env=False, event_hooks={"response": [bound]}
        )

    def close(self) -> None:
        self._client.close()

    def get(self, path: str) -> httpx.Response:
        return self._send("GET", path, None)

    def get_json(self, path: str) -> dict[str, Any]:
        return self._object(self.get(path))

    def post_json(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._object(self._send("POST", path, body))

    def _object(self, response: httpx.Response) -> dict[str, Any]:
        try:
            value: Any = response.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise BenchError(
                f"{response.request.url} did not answer with a JSON object",
                f"it answered {response.text[:120]!r}",
                "check that the URL is that of an OpenAI-compatible server",
            )
        return cast("dict[str, Any]", value)

    def _send(self, method: str, path: str, body: dict[str, Any] | None) -> httpx.Response:
        url = self.url + path
        try:
            response = self._client.request(method, url, json=body)
        except httpx.ConnectError as error:
            if "CERTIFICATE" in str(error).upper() or "SSL" in str(error).upper():
                raise BenchError(
                    f"TLS with {self.url} failed",
                    str(error),
                    "give the server's CA with --ca-file, or use its http:// URL",
                ) from None
            raise BenchError(
                f"cannot reach {self.url}", str(error), "start the server (deploy up) or correct the URL"
            ) from None
        except httpx.TimeoutException:
            raise BenchError(f"{url} did not answer in time", "", "look at the server's log (deploy logs)") from None
        except httpx.HTTPError as error:
            raise BenchError(
                f"{url} broke off", str(error) or type(error).__name__, "look at the server's log"
            ) from None
        if response.status_code in (401, 403):
            raise BenchError(
                f"{self.url} refused the API key (HTTP {response.status_code})",
                "none was given, or it is a wrong one",
                "name the file that holds it: --api-key-file FILE",
            )
        if response.status_code >= 400:
            raise BenchError(f"{url} answered HTTP {response.status_code}", response.text[:300].strip(), "")
        return response
