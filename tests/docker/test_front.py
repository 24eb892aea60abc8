"""The real front, attacked, with a stand-in for the router behind it that says what got through."""

import http.client
import json
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from checks import check_confinement
from conftest import Project, docker, new_project
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FILES = ("compose.yaml", "compose.front.yaml", "tests/docker/front-standin.yaml")
KEYS = {"alice": "sk-of-alice-0123456789", "bob": "sk-of-bob-9876543210", "carol": "sk-of-carol-5555555555"}
OPEN_ROUTES = ("/health", "/liveness", "/readiness")
GET_ROUTES = ("/v1/models", "/get_model_info", "/get_server_info", "/engine_metrics")
POST_ROUTES = ("/v1/chat/completions", "/v1/completions", "/generate", "/v1/tokenize", "/v1/detokenize")
# Of the router and of the engines behind it (sglang/srt/entrypoints/http_server.py), and what a scanner tries.
NOT_THERE = (
    *("/", "/workers", "/flush_cache", "/get_loads", "/wasm", "/v1/tokenizers", "/parse/reasoning", "/ha/status"),
    *("/v1/responses", "/v1/conversations", "/v1/embeddings", "/v1/rerank", "/v1/classify", "/health_generate"),
    *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed"),
    *("/set_internal_state", "/get_internal_state", "/server_info", "/start_profile", "/stop_profile"),
    *("/release_memory_occupation", "/resume_memory_occupation", "/abort_request", "/pause_generation"),
    *("/load_lora_adapter", "/unload_lora_adapter", "/open_session", "/close_session", "/configure_logging"),
    *("/init_weights_update_group", "/get_weights_by_name", "/slow_down", "/metrics", "/docs", "/openapi.json"),
    *("/freeze_gc", "/dump_cache", "/clear_hicache_storage_backend", "/.env", "/.git/config", "/etc/passwd"),
)
PATH_TRICKS = (
    *("//health", "/health/", "/health/../workers", "/health/..%2fworkers", "/health%00", "/health;/workers"),
    *("/./health", "/HEALTH", "/%68ealth", "/v1/models/../../workers", "/v1//models", "/v1/models%2f..%2f..%2fworkers"),
    *("/liveness#/workers", "/readiness\\..\\workers", "http://router:30000/workers", "/v1/models/tiny"),
)
HEADER_SECONDS, SILENCE_SECONDS = 2, 3
REQUESTS_A_MINUTE, CONCURRENT = 30, 2
# One for all: making a client takes longer than asking. Not kept alive: the front is stopped and started.
CLIENT = httpx.Client(timeout=30, trust_env=False, headers={"Connection": "close"})


def start(project: Project) -> None:
    project.compose("up", "--detach", "--no-deps", "--wait", "--wait-timeout", "60", "router", "front")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("# who may ask\n" + "".join(f"{key} {name}\n" for name, key in KEYS.items()))
    return path


@pytest.fixture(scope="module")
def project(image: str, keys: Path) -> Iterator[Project]:
    made = new_project(
        *FILES,
        IMAGE=image,
        MODEL_PATH="/var/empty",
        API_KEY_FILE=str(keys),
        CLIENT_HEADER_SECONDS=str(HEADER_SECONDS),
        CLIENT_SILENCE_SECONDS=str(SILENCE_SECONDS),
        REQUESTS_PER_MINUTE=str(REQUESTS_A_MINUTE),
        CONCURRENT_REQUESTS=str(CONCURRENT),
        STOP_GRACE_PERIOD="20s",
    )
    try:
        start(made)
        yield made
    finally:
        made.down()


@pytest.fixture(scope="module")
def port(project: Project) -> int:
    return int(project.variables["PORT"])


def ask(port: int, method: str, path: str, who: str = "", **headers: str) -> httpx.Response:
    authorization = {"Authorization": f"Bearer {KEYS.get(who, who)}"} if who else {}
    return CLIENT.request(method, f"http://127.0.0.1:{port}{path}", headers={**authorization, **headers})


def post(port: int, who: str, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEYS[who]}"}
    return CLIENT.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, headers=headers)


def send(port: int, data: bytes, patience_s: float = 10) -> bytes:
    """What comes back for these bytes, until the other side closes or is silent."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=patience_s) as connection:
        try:
            connection.sendall(data)
            while block := connection.recv(65536):
                answer += block
        except (TimeoutError, ConnectionError):
            pass
    return answer


def status(answer: bytes) -> int:
    return int(answer.split()[1]) if answer.startswith(b"HTTP/") else 0


def arrived(project: Project) -> list[Any]:
    """What reached the stand-in so far, and that a client was gone before its answer was."""
    return [json.loads(line) for line in project.log("router").splitlines() if line.startswith("{")]


def reached(project: Project) -> int:
    return len([seen for seen in arrived(project) if "path" in seen])


def test_health_is_open_and_every_other_route_asks_for_a_key(project: Project, port: int) -> None:
    for path in OPEN_ROUTES:
        assert ask(port, "GET", path).status_code == 200
    before = reached(project)
    for path in (*GET_ROUTES, *POST_ROUTES, *NOT_THERE):
        for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "PATCH"):
            answer = ask(port, method, path)
            assert answer.status_code == 401, (method, path)
            assert answer.headers["www-authenticate"] == "Bearer"
    assert reached(project) == before


@pytest.mark.parametrize(
    "header",
    [
        *("Bearer", "Bearer sk-wrong", "Basic c2s6", "bearer: x", f"Basic {KEYS['alice']}", KEYS["alice"]),
        *(f"Bearer {KEYS['alice']}x", f"Bearer {KEYS['alice'][:-1]}", f"Bearer {KEYS['alice'].upper()}"),
        *("Bearer alice", "Bearer *", "Bearer %00", f"Bearer {KEYS['alice']} {KEYS['bob']}", "Bearer " + "a" * 8000),
    ],
)
def test_what_is_not_exactly_a_key_opens_nothing(port: int, header: str) -> None:
    assert ask(port, "GET", "/v1/models", Authorization=header).status_code == 401


def test_a_key_opens_the_routes_that_there_are_and_no_other(project: Project, port: int) -> None:
    for path in GET_ROUTES:
        assert ask(port, "GET", path, "alice").status_code == 200
        assert ask(port, "POST", path, "alice").status_code == 405
    for path in POST_ROUTES:
        assert ask(port, "GET", path, "alice").status_code == 405
    before = reached(project)
    for path in NOT_THERE:
        for method in ("GET", "POST", "PUT", "DELETE"):
            assert ask(port, method, path, "alice").status_code == 404, (method, path)
    assert reached(project) == before


@pytest.mark.parametrize("path", PATH_TRICKS)
@pytest.mark.parametrize("who", ["", "alice"])
def test_no_spelling_of_a_path_reaches_another_route(project: Project, port: int, path: str, who: str) -> None:
    before = reached(project)
    line = f"Authorization: Bearer {KEYS[who]}\r\n" if who else ""
    answer = send(port, f"GET {path} HTTP/1.1\r\nHost: x\r\n{line}Connection: close\r\n\r\n".encode())
    assert status(answer) in (400, 401, 404), answer
    assert reached(project) == before


def test_the_router_sees_the_request_id_and_nothing_that_names_or_steers(port: int) -> None:
    sent = {
        "X-Request-Id": "order-66.a_b",
        "Cookie": "session=1",
        "X-Forwarded-For": "10.0.0.1",
        "X-Smg-Routing-Key": "decode",
        "X-Data-Parallel-Rank": "0",
        "Forwarded": "for=10.0.0.1",
        "Proxy-Authorization": "Basic eDp5",
    }
    answer = ask(port, "GET", "/v1/models", "alice", **sent)
    seen = {name.lower(): value for name, value in answer.json()["headers"].items()}
    assert seen["x-request-id"] == answer.headers["x-request-id"] == "order-66.a_b"
    assert not {name.lower() for name in sent} - {"x-request-id"} & seen.keys()
    assert "authorization" not in seen
    assert not [name for name in answer.headers if name.startswith("access-control") or name == "server"]


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, '"}', "%0a", "ü", "a,b", "$(id)"])
def test_a_request_id_that_could_do_harm_is_replaced(port: int, bad: str) -> None:
    answer = send(
        port,
        f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['alice']}\r\n"
        f"X-Request-Id: {bad}\r\nConnection: close\r\n\r\n".encode(),
    )
    head, _, body = answer.partition(b"\r\n\r\n")
    seen = {name.lower(): value for name, value in json.loads(body)["headers"].items()}["x-request-id"]
    assert len(seen) == 36
    assert f"x-request-id: {seen}".encode() in head


def test_one_key_at_its_limit_of_requests_in_flight_leaves_the_others_alone(port: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(post, port, "bob", sleep=2) for _ in range(CONCURRENT)]
        time.sleep(0.7)
        refused = post(port, "bob")
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "concurrency_limit"
        assert int(refused.headers["retry-after"]) > 0
        assert post(port, "alice").status_code == 200
        assert ask(port, "GET", "/v1/models", "bob").status_code == 200
        assert [answer.result().status_code for answer in running] == [200] * CONCURRENT
    assert post(port, "bob").status_code == 200


def test_requests_on_one_connection_count_while_they_last_and_no_longer(port: int) -> None:
    headers = {"Authorization": f"Bearer {KEYS['bob']}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers) as client:
        answers = [client.post("/v1/chat/completions", json={}).status_code for _ in range(3 * CONCURRENT)]
    assert answers == [200] * len(answers)


def test_one_key_at_its_limit_of_requests_a_minute_leaves_the_others_alone(port: int) -> None:
    answers = [post(port, "carol") for _ in range(REQUESTS_A_MINUTE + 5)]
    assert [answer.status_code for answer in answers] == [200] * REQUESTS_A_MINUTE + [429] * 5
    assert answers[-1].json()["error"]["type"] == "rate_limit"
    assert post(port, "alice").status_code == 200


def test_a_request_that_is_too_large_is_refused_before_it_is_sent(project: Project, port: int) -> None:
    before = reached(project)
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['alice']}\r\nContent-Length: "
    for size in (2097153, 10**9, 10**12, 2**63 - 1):
        assert status(send(port, f"{head}{size}\r\n\r\n{'x' * 200}".encode())) == 413
    for size in ("2" * 40, "-1", "0x10", "1e9", "", "1, 2"):
        assert status(send(port, f"{head}{size}\r\n\r\n{{}}".encode())) == 400, size
    assert reached(project) == before


def test_a_client_that_sends_its_headers_slowly_is_cut_off_and_disturbs_nobody(port: int) -> None:
    slow = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(200)]
    try:
        for connection in slow:
            connection.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nX-A: ")
        begun = time.monotonic()
        assert post(port, "alice").status_code == 200
        assert time.monotonic() - begun < 1
        ended = 0
        while time.monotonic() - begun < HEADER_SECONDS + 4 and not ended:
            for connection in slow[:100]:
                try:
                    connection.sendall(b"a")
                except OSError:
                    ended += 1
            time.sleep(0.5)
        assert time.monotonic() - begun < HEADER_SECONDS + 3
        for connection in slow[100:]:
            assert status(connection.recv(4096)) in (0, 408)
    finally:
        for connection in slow:
            connection.close()


def test_a_client_that_stops_in_its_body_is_cut_off(project: Project, port: int) -> None:
    before = reached(project)
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEYS['alice']}\r\nContent-Length: "
    begun = time.monotonic()
    assert status(send(port, f"{head}1000\r\n\r\n{{".encode(), 20)) == 408
    assert time.monotonic() - begun < HEADER_SECONDS + 2
    assert reached(project) == before


def test_a_client_that_does_not_read_is_cut_off_and_the_router_hears_of_it(project: Project, port: int) -> None:
    body = json.dumps({"pieces": 4000, "size": 65536}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
            % (KEYS["alice"].encode(), len(body), body)
        )
        deadline = time.monotonic() + SILENCE_SECONDS + 8
        while {"broken": True} not in arrived(project) and time.monotonic() < deadline:
            time.sleep(0.5)
    assert {"broken": True} in arrived(project)


def test_a_first_token_may_take_longer_than_a_client_may_be_silent(port: int) -> None:
    assert post(port, "alice", sleep=SILENCE_SECONDS + 2).status_code == 200


def test_pieces_of_an_answer_are_passed_on_as_they_come(port: int) -> None:
    headers = {"Authorization": f"Bearer {KEYS['alice']}"}
    times = list[float]()
    with httpx.stream(
        "POST", f"http://127.0.0.1:{port}/generate", json={"pieces": 5, "pause": 0.3}, headers=headers
    ) as answer:
        for _ in answer.iter_raw():
            times.append(time.monotonic())
    assert len(times) >= 5
    assert times[-1] - times[0] > 1


SMUGGLED = b"GET /workers HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 5\r\nContent-Length: 6\r\n",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n",
        b"Content-Length: +5\r\n",
        b"X: y\rContent-Length: 5\r\n",
        b"X: a\r\n b\r\nTransfer-Encoding: chunked\r\n",
        b"\x00: y\r\n",
    ],
)
def test_no_second_request_is_smuggled_behind_a_first(project: Project, port: int, headers: bytes) -> None:
    authorization = f"Authorization: Bearer {KEYS['alice']}\r\n".encode()
    request = b"POST /generate HTTP/1.1\r\nHost: x\r\n" + authorization + headers + b"\r\n0\r\n\r\n" + SMUGGLED
    send(port, request, 1)
    assert "/workers" not in {seen.get("path") for seen in arrived(project)}
    assert post(port, "alice").status_code == 200


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from([b"GET", b"POST", b"get", b"G", b"PRI", b"CONNECT"]) | st.binary(max_size=12),
    path=st.sampled_from([p.encode() for p in (*OPEN_ROUTES, *GET_ROUTES, *POST_ROUTES, *NOT_THERE)])
    | st.binary(max_size=60),
    headers=st.lists(st.tuples(st.binary(max_size=30), st.binary(max_size=60)), max_size=5),
    body=st.binary(max_size=300),
)
def test_bytes_without_a_key_get_nothing_but_health(
    project: Project, port: int, method: bytes, path: bytes, headers: list[tuple[bytes, bytes]], body: bytes
) -> None:
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
    answer = send(
        port, method + b" " + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n" + lines + b"\r\n" + body, 0.2
    )
    if status(answer) == 200:
        assert (method, path.decode()) in [(b"GET", route) for route in OPEN_ROUTES]


def test_after_all_that_it_serves_and_nothing_but_known_routes_got_through(project: Project, port: int) -> None:
    assert post(port, "alice").status_code == 200
    known = {*OPEN_ROUTES, *GET_ROUTES, *POST_ROUTES}
    assert {seen["path"].partition("?")[0] for seen in arrived(project) if "path" in seen} <= known
    assert docker("inspect", "--format", "{{.RestartCount}}", project.container("front")).strip() == "0"


def test_the_log_is_a_json_line_a_request_and_holds_no_secret(project: Project, port: int) -> None:
    ask(port, "GET", f"/v1/models?key={KEYS['bob']}", "alice", **{"X-Request-Id": "find-me"})
    time.sleep(0.5)
    log = project.log("front")
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert len(lines) > 100
    found = next(line for line in lines if line["request_id"] == "find-me")
    assert (found["client"], found["method"], found["path"], found["status"]) == ("alice", "GET", "/v1/models", 200)
    assert not [key for key in KEYS.values() if key in log]


def test_no_key_shows_in_the_containers_configuration_or_processes(project: Project) -> None:
    seen = json.dumps(project.inspect("front")) + project.execute("front", "sh", "-c", "cat /proc/[0-9]*/cmdline")
    seen += project.execute("front", "sh", "-c", "tr '\\0' '\\n' < /proc/1/environ") + project.fetch(
        "front", "http://127.0.0.1:29100/metrics"
    )
    assert not [key for key in KEYS.values() if key in seen]


def test_the_front_is_confined_and_only_it_reaches_the_router(project: Project, port: int) -> None:
    check_confinement(project, "front")
    assert docker("port", project.container("router")) == ""
    assert docker("port", project.container("front")).split() == ["30000/tcp", "->", f"127.0.0.1:{port}"]
    networks = project.inspect("router")["NetworkSettings"]["Networks"]
    assert sorted(networks) == [f"{project.name}_engines", f"{project.name}_inner"]
    for network in networks.values():
        assert not answers(network["IPAddress"], 30000)
    assert answers(project.inspect("front")["NetworkSettings"]["Networks"][f"{project.name}_front"]["IPAddress"], 30000)


def answers(address: str, port: int) -> bool:
    """Whether a user of this host gets to a /liveness there. A gateway may answer something else."""
    try:
        return httpx.get(f"http://{address}:{port}/liveness", timeout=2, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def test_a_stop_lets_requests_in_flight_finish(project: Project, port: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, port, "alice", sleep=4)
        time.sleep(1)
        project.compose("stop", "front")
        assert running.result().status_code == 200
    with pytest.raises(httpx.TransportError):
        ask(port, "GET", "/health")
    start(project)


def test_without_a_router_the_answer_is_503_at_once_and_says_when_to_come_back(project: Project, port: int) -> None:
    project.compose("stop", "--timeout", "1", "router")
    begun = time.monotonic()
    answer = ask(port, "GET", "/v1/models", "alice")
    assert (answer.status_code, answer.headers["retry-after"]) in [(503, "5")]
    assert time.monotonic() - begun < 7
    start(project)
    deadline = time.monotonic() + 10
    while ask(port, "GET", "/v1/models", "alice").status_code != 200:
        assert time.monotonic() < deadline, "the front does not find the router again"
        time.sleep(0.2)


def test_with_a_certificate_there_is_tls_and_nothing_else(project: Project, port: int, tmp_path: Path) -> None:
    certificate, private = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-keyout", str(private), "-out", str(certificate), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    private.chmod(0o444)
    files = {"TLS_CERTIFICATE_FILE": str(certificate), "TLS_KEY_FILE": str(private), "SECRETS_CHANGED": "tls"}
    with_tls = Project(project.name, project.files, {**project.variables, **files})
    start(with_tls)
    trust = ssl.create_default_context(cafile=str(certificate))
    headers = {"Authorization": f"Bearer {KEYS['alice']}"}
    answer = httpx.get(f"https://127.0.0.1:{port}/v1/models", headers=headers, verify=trust)
    assert answer.status_code == 200
    assert "max-age" in answer.headers["strict-transport-security"]
    assert status(send(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", 2)) != 200
    old = ssl.create_default_context(cafile=str(certificate))
    old.minimum_version, old.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, ssl.TLSVersion.TLSv1_1
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=old, timeout=5)
    with pytest.raises(OSError):
        connection.request("GET", "/health")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("", "without a key"), ("a b c\n", "line 1"), ("k x\nk y\n", "line 2 of the API keys repeats")],
)
def test_a_key_file_that_is_not_one_is_refused_with_its_line(
    image: str, tmp_path: Path, content: str, complaint: str
) -> None:
    (tmp_path / "keys").write_text(content)
    done = subprocess.run(
        [
            *("docker", "run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp"),
            *("--volume", f"{tmp_path / 'keys'}:/run/secrets/api_key:ro", image),
            *("python", "-m", "engine_runtime.launch", "front"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
