import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import DeployError
from deploy.image.registry import (
    Client,
    NotInRegistry,
    Registry,
    RegistryUnreachable,
    digest_of,
    parse_manifest,
    parse_registry,
)

DIGEST = f"sha256:{'1' * 64}"
CONTENT = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "c", "digest": DIGEST, "size": 1},
        "layers": [{"mediaType": "l", "digest": DIGEST, "size": 2}],
    }
).encode()


@pytest.mark.parametrize(
    ("address", "name", "base"),
    [
        ("registry.lan:5000", "registry.lan:5000/deepseek-v4-flash-sm120", "https://registry.lan:5000/v2/"),
        ("registry.lan/team/a/", "registry.lan/team/a/deepseek-v4-flash-sm120", "https://registry.lan/v2/team/a/"),
        ("http://10.0.0.1:5000", "10.0.0.1:5000/deepseek-v4-flash-sm120", "http://10.0.0.1:5000/v2/"),
        ("127.0.0.1:5000", "127.0.0.1:5000/deepseek-v4-flash-sm120", "http://127.0.0.1:5000/v2/"),
        ("localhost", "localhost/deepseek-v4-flash-sm120", "http://localhost/v2/"),
        ("[::1]:5000", "[::1]:5000/deepseek-v4-flash-sm120", "http://[::1]:5000/v2/"),
        ("https://127.0.0.1:5000", "127.0.0.1:5000/deepseek-v4-flash-sm120", "https://127.0.0.1:5000/v2/"),
    ],
)
def test_an_address_says_where_the_image_lies_and_how_it_is_reached(address: str, name: str, base: str) -> None:
    registry = parse_registry(address)
    assert registry.name == name
    assert registry.base == base + "deepseek-v4-flash-sm120"


@pytest.mark.parametrize("address", ["", "a b", "ftp://host", "host:port", "host/UPPER", "host/../x", "user@host"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(DeployError, match="names no registry"):
        parse_registry(address)


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.text(),
        lambda s: st.dictionaries(
            st.sampled_from(["config", "layers", "digest", "size", "mediaType"]),
            s | st.lists(s, max_size=2),
            max_size=4,
        ),
    ).map(lambda value: json.dumps(value).encode())
)
def test_whatever_a_registry_sends_is_a_manifest_or_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="not an image's manifest"):
        parse_manifest(content)


def client(answer: Callable[[httpx.Request], httpx.Response], registry: Registry | None = None) -> Client:
    made = Client(registry or parse_registry("registry.example"))
    made.http = httpx.Client(transport=httpx.MockTransport(answer), auth=made.http.auth, follow_redirects=True)
    return made


def test_a_manifest_is_read_by_its_digest() -> None:
    found = client(lambda request: httpx.Response(200, content=CONTENT)).manifest(digest_of(CONTENT))
    assert found.digest == digest_of(CONTENT)
    assert found.config.digest == DIGEST
    assert [layer.size for layer in found.layers] == [2]


def test_another_manifest_than_asked_for_is_refused_with_both_digests() -> None:
    with pytest.raises(DeployError) as raised:
        client(lambda request: httpx.Response(200, content=CONTENT)).manifest(DIGEST)
    assert DIGEST in raised.value.why
    assert digest_of(CONTENT) in raised.value.why


def test_a_missing_image_is_told_from_a_registry_that_fails() -> None:
    with pytest.raises(NotInRegistry):
        client(lambda request: httpx.Response(404)).manifest("tag")
    for answer in (httpx.Response(500, text="disk full"), httpx.Response(200, text="<html>a portal</html>")):
        with pytest.raises(RegistryUnreachable):
            client(lambda request, answer=answer: answer).manifest("tag")


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], None]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    def store(config: dict[str, Any]) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))

    return store


BASIC = "Basic " + base64.b64encode(b"user:secret").decode()
STORED = {"auths": {"registry.example": {"auth": base64.b64encode(b"user:secret").decode()}}}


def test_a_registry_with_passwords_gets_what_docker_login_stored(login: Callable[[dict[str, Any]], None]) -> None:
    login(STORED)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.headers.get("Authorization") == BASIC:
            return httpx.Response(200, content=CONTENT)
        return httpx.Response(401, headers={"WWW-Authenticate": 'Basic realm="x"'})

    assert client(answer).manifest("tag").digest == digest_of(CONTENT)


@pytest.mark.parametrize("known", [True, False])
def test_a_registry_with_tokens_is_asked_for_one(login: Callable[[dict[str, Any]], None], known: bool) -> None:
    login(STORED if known else {})
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "auth.example":
            asked.append(request)
            return httpx.Response(200, json={"token": "abc"})
        if request.headers.get("Authorization") == "Bearer abc":
            return httpx.Response(200, content=CONTENT)
        challenge = 'Bearer realm="https://auth.example/token",service="r",scope="repository:x:pull"'
        return httpx.Response(401, headers={"WWW-Authenticate": challenge})

    with client(answer) as made:
        made.manifest("tag")
        made.manifest("tag")
    (request,) = asked
    assert dict(request.url.params) == {"service": "r", "scope": "repository:x:pull"}
    assert request.headers.get("Authorization") == (BASIC if known else None)


def test_a_helper_that_docker_login_used_is_asked(
    login: Callable[[dict[str, Any]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login({"credsStore": "test"})
    helper = tmp_path / "docker-credential-test"
    helper.write_text(
        '#!/bin/sh\nread host; [ "$host" = registry.example ] && echo \'{"Username":"user","Secret":"secret"}\'\n'
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    seen: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("Authorization"))
        return httpx.Response(200 if seen[-1] else 401, content=CONTENT, headers={"WWW-Authenticate": "Basic realm=x"})

    client(answer).manifest("tag")
    assert seen == [None, BASIC]


def test_a_registry_that_lets_nobody_in_says_how_to_log_in(login: Callable[[dict[str, Any]], None]) -> None:
    login({})
    with pytest.raises(RegistryUnreachable) as raised:
        client(lambda request: httpx.Response(401, headers={"WWW-Authenticate": "Basic realm=x"})).manifest("tag")
    assert raised.value.fix == "docker login registry.example"


def test_a_password_does_not_follow_a_blob_to_another_host(login: Callable[[dict[str, Any]], None]) -> None:
    login(STORED)
    elsewhere: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "storage.example":
            elsewhere.append(request.headers.get("Authorization"))
            return httpx.Response(200, content=b"blob")
        if "Authorization" not in request.headers:
            return httpx.Response(401, headers={"WWW-Authenticate": "Basic realm=x"})
        return httpx.Response(307, headers={"Location": "https://storage.example/blob"})

    with client(answer) as made:
        assert made.http.get(made.blob_address(DIGEST)).content == b"blob"
    assert elsewhere == [None]
