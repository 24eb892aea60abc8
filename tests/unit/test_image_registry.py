import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import DeployError
from deploy.image.named_registry import registry_client
from deploy.image.registry import (
    Client,
    NoRegistry,
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
    with pytest.raises(NoRegistry, match="names no registry"):
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


@pytest.mark.parametrize(
    "headers",
    [
        {"Location": f"http://{'a' * 300}.example/"},
        {"Location": "http://[::1"},
        {"Location": "file:///etc/passwd"},
    ],
)
def test_a_registry_that_sends_us_nowhere_does_not_answer(headers: dict[str, str]) -> None:
    with pytest.raises(RegistryUnreachable, match="does not answer"):
        client(lambda _: httpx.Response(302, headers=headers)).manifest("tag")


@pytest.mark.parametrize("realm", ["http://[::1", f"https://{'a' * 300}.example"])
def test_a_challenge_that_names_no_address_is_refused(login: Callable[[dict[str, Any]], None], realm: str) -> None:
    login({})
    challenge = {"WWW-Authenticate": f'Bearer realm="{realm}"'}
    with pytest.raises(RegistryUnreachable):
        client(lambda _: httpx.Response(401, headers=challenge)).manifest("tag")


@pytest.mark.parametrize("token", [b"<html>", b"[]", b"null", b"[" * 100_000])
def test_a_service_that_sends_no_token_is_named(login: Callable[[dict[str, Any]], None], token: bytes) -> None:
    login({})
    challenge = {"WWW-Authenticate": 'Bearer realm="https://auth.lan/"'}

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.host == "auth.lan":
            return httpx.Response(200, content=token)
        return httpx.Response(401, headers=challenge)

    with pytest.raises(RegistryUnreachable, match="sent no token"):
        client(answer).manifest("tag")


def test_a_manifest_without_end_is_not_read_to_its_end() -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while sent < 100 << 20:
            sent += 1 << 20
            yield b"[" * (1 << 20)

    with pytest.raises(RegistryUnreachable, match="more than"):
        client(lambda _: httpx.Response(200, content=endless())).manifest("tag")
    assert sent <= 5 << 20


def test_a_registry_that_takes_blobs_nowhere_is_none() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404 if request.method == "HEAD" else 202)

    with pytest.raises(RegistryUnreachable, match="does not answer as a registry"):
        client(answer).put_blob(b"x")


def test_a_registry_of_the_command_line_needs_no_deploy_toml(tmp_path: Path) -> None:
    with registry_client("registry.lan:5000/team", tmp_path / "missing.toml") as made:
        assert made.registry.host == "registry.lan:5000"
    (tmp_path / "deploy.toml").write_text('profile = "cpu"\n')
    with pytest.raises(NoRegistry, match="no registry is named") as caught:
        registry_client(None, tmp_path / "deploy.toml")
    assert caught.value.exit_code == 2
