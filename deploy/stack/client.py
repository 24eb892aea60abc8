"""Asks the router one question and reads the answer as it comes."""

import os
import ssl
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from deploy.errors import DeployError
from deploy.spec.profiles import ALL_ENGINES, FRONT, ROUTER
from deploy.stack.state import read_keys
from loadtest.sse import EventParser, Usage, read_event

CONNECT_S, SILENCE_S = 5.0, 60.0


class RequestFailed(DeployError):
    """The router did not answer a request as it should."""

    exit_code = 4


@dataclass(frozen=True)
class Endpoint:
    """Where the stack answers.

    Attributes:
        url: without a path, for example `http://127.0.0.1:30000`.
        model: the name to ask for.
        api_key_file: file with the keys, of which the first is sent; None for no key.
        certificate: what the server must show; None without TLS.
    """

    url: str
    model: str
    api_key_file: Path | None = None
    certificate: Path | None = None

    def headers(self) -> dict[str, str]:
        if not self.api_key_file:
            return {}
        return {"Authorization": f"Bearer {read_keys(self.api_key_file)[0]}"}

    def ready(self) -> bool:
        """Does the router say that it can take requests?"""
        try:
            with _client(self) as client:
                return client.get("/readiness", timeout=CONNECT_S).is_success
        except httpx.HTTPError:
            return False


def endpoint(config: dict[str, Any]) -> Endpoint:
    """Read the address, model name and key file of an effective compose configuration."""
    services: dict[str, Any] = config["services"]
    port: dict[str, Any] = services.get(FRONT, services[ROUTER])["ports"][0]
    host = str(port.get("host_ip") or "127.0.0.1")
    address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    prefix = "--served-model-name="
    engine = next(services[name] for name in ALL_ENGINES if name in services)
    names = [item for item in map(str, engine["command"]) if item.startswith(prefix)]
    key, certificate = _secret(config, "api_key"), _secret(config, "tls_certificate")
    scheme = "https" if certificate else "http"
    return Endpoint(
        url=f"{scheme}://{f'[{address}]' if ':' in address else address}:{port['published']}",
        model=names[0].removeprefix(prefix) if names else "default",
        api_key_file=key,
        certificate=certificate,
    )


def _secret(config: dict[str, Any], name: str) -> Path | None:
    file = str(config["secrets"].get(name, {}).get("file", os.devnull))
    return None if file == os.devnull else Path(file)


def stream(
    target: Endpoint,
    question: str,
    *,
    max_tokens: int,
    temperature: float = 0.0,
    ignore_end: bool = False,
    silence_s: float = SILENCE_S,
) -> Generator[str, None, Usage]:
    """Stream the answer to one question.

    Args:
        max_tokens: the longest answer, in tokens.
        ignore_end: go on to `max_tokens` even if the model ends earlier (SGLang's `ignore_eos`).
        silence_s: how long the server may say nothing.

    Yields:
        Pieces of the answer as they arrive, reasoning left out.

    Returns:
        The server's own token counts.

    Raises:
        RequestFailed: no connection, an HTTP error, an error inside the stream, or a stream without usage.
    """
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if ignore_end else {}),
    }
    usage: Usage | None = None
    parser = EventParser()
    try:
        with _client(target, silence_s) as client, client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise _refused(response)
            for block in response.iter_bytes():
                for data in parser.feed(block):
                    seen = read_event("chat", data)
                    if seen.error:
                        raise RequestFailed("the answer broke off", seen.error, "deploy logs")
                    usage = seen.usage or usage
                    if seen.text:
                        yield seen.text
    except httpx.ConnectError as error:
        raise RequestFailed(
            f"nothing answers on {target.url}", str(error), "deploy status, or start it: deploy up"
        ) from error
    except httpx.TimeoutException as error:
        raise RequestFailed(
            f"{target.url} was silent for {silence_s:.0f} s", "an engine may be stuck or dead", "deploy status"
        ) from error
    except (httpx.HTTPError, ValueError) as error:
        raise RequestFailed("the answer broke off", str(error) or type(error).__name__, "deploy logs") from error
    if usage is None:
        raise RequestFailed("the answer ended without token counts", "the stream was cut", "deploy logs")
    return usage


def _client(target: Endpoint, silence_s: float = SILENCE_S) -> httpx.Client:
    # trust_env off: a proxy set in the shell must not see requests to this host.
    timeout = httpx.Timeout(silence_s, connect=CONNECT_S)
    headers = {**target.headers(), "X-Request-Id": f"deploy-{uuid.uuid4().hex}"}
    return httpx.Client(
        base_url=target.url, headers=headers, timeout=timeout, trust_env=False, verify=trust(target.certificate)
    )


def trust(certificate: Path | None) -> ssl.SSLContext | bool:
    """Trust this certificate and no other, whatever name it is for: the controller asks on this host's own address."""
    if certificate is None:
        return True
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _refused(response: httpx.Response) -> RequestFailed:
    fixes = {401: "check api_key_file under [router]", 403: "check api_key_file under [router]", 503: "deploy status"}
    return RequestFailed(
        f"the router answered HTTP {response.status_code}",
        response.text.strip()[:500] or response.reason_phrase,
        fixes.get(response.status_code, "deploy logs router"),
    )
