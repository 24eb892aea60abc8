"""The real stack with front, TLS and page of metrics, attacked by clients with and without a key, and observed."""

import contextlib
import json
import re
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from checks import ENGINES, check_confinement
from conftest import ROOT, Project, docker, free_port, new_project, running
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from deploy.stack.accept import Acceptance
from deploy.stack.compose import RoleState
from deploy.stack.exposition import accepted, roles
from deploy.stack.trace import trace

# Outside `make test`: five minutes.
pytestmark = pytest.mark.quiet

FILES = ("compose.yaml", "compose.cpu.yaml", "compose.front.yaml", "compose.metrics.yaml")
KEY = "sk-of-the-security-test-0123456789"
PROMPT = "a prompt that no log may hold"
SERVICES = (*ENGINES, "router", "front", "exporter")
PROGRAMS = ROOT / ".cache/programs/usr/bin"
# Not there until it happens, until there is a GPU, until a draft is guessed; or Prometheus's own.
LATER = {
    "up",
    "sglang:num_transfer_failed_reqs_total",
    "sglang:num_bootstrap_failed_reqs_total",
    "sglang:num_retracted_requests_total",
    "sm120_kernels_calls_total",
}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    made = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-out", str(made[0]), "-keyout", str(made[1]), "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    made[1].chmod(0o444)
    return made


@pytest.fixture(scope="module")
def project(
    image: str, model: Path, certificate: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    folder = tmp_path_factory.mktemp("state")
    (folder / "keys").write_text(f"{KEY} tester\n")
    (folder / "metrics").mkdir(mode=0o755)
    folder.chmod(0o755)
    targets = [(name, port) for name in ENGINES for port in (30000, 19090)] + [("router", 29000), ("front", 29100)]
    variables = {
        "IMAGE": image,
        "MODEL_PATH": str(model),
        "API_KEY_FILE": str(folder / "keys"),
        "TLS_CERTIFICATE_FILE": str(certificate[0]),
        "TLS_KEY_FILE": str(certificate[1]),
        "METRICS_PORT": str(free_port()),
        "METRICS_FOLDER": str(folder / "metrics"),
        "METRICS_TARGETS": " ".join(f"{name}=http://{name}:{port}/metrics" for name, port in targets),
    }
    with running(new_project(*FILES, **variables)) as started:
        yield started


@pytest.fixture(scope="module")
def client(project: Project, certificate: tuple[Path, Path]) -> Iterator[httpx.Client]:
    trust = ssl.create_default_context(cafile=str(certificate[0]))
    base = f"https://127.0.0.1:{project.variables['PORT']}"
    with httpx.Client(base_url=base, verify=trust, timeout=60, trust_env=False) as made:
        yield made


def headers(**more: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json", **more}


def ask(client: httpx.Client, **changes: Any) -> httpx.Response:
    body = {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 8, "temperature": 0}
    given_headers = changes.pop("headers", {})
    return client.post("/v1/chat/completions", json=body | changes, headers=headers(**given_headers))


def page(project: Project) -> str:
    return httpx.get(f"http://127.0.0.1:{project.variables['METRICS_PORT']}/metrics", timeout=30).text


def test_every_container_is_confined_and_publishes_what_it_should_on_loopback(project: Project) -> None:
    for service in SERVICES:
        check_confinement(project, service)
        published = docker("port", project.container(service)).split("\n")[0]
        wanted = {"front": f"30000/tcp -> 127.0.0.1:{project.variables['PORT']}"}
        wanted["exporter"] = f"9400/tcp -> 127.0.0.1:{project.variables['METRICS_PORT']}"
        assert published == wanted.get(service, "")
        assert project.inspect(service)["HostConfig"]["LogConfig"]["Config"] == {"max-size": "50m", "max-file": "5"}


def test_the_engines_keep_their_admin_routes_to_themselves(project: Project, client: httpx.Client) -> None:
    # The engine itself has them, so this is no test of routes that nobody knows.
    answer = project.fetch("decode", "http://127.0.0.1:30000/openapi.json")
    there = {path: list(methods) for path, methods in json.loads(answer)["paths"].items()}
    assert {"/flush_cache", "/update_weights_from_disk", "/set_internal_state", "/abort_request"} <= there.keys()
    public = {"/v1/models", "/v1/chat/completions", "/v1/completions", "/generate", "/health", "/v1/tokenize"}
    public |= {"/v1/detokenize", "/get_model_info", "/get_server_info"}
    for path, methods in there.items():
        if path in public or "{" in path:
            continue
        for method in methods:
            assert client.request(method, path).status_code == 401, path
            assert client.request(method, path, headers=headers()).status_code == 404, path


def test_no_other_container_of_the_host_reaches_an_engine_or_the_router(project: Project, image: str) -> None:
    addresses = [
        network["IPAddress"]
        for service in (*ENGINES, "router")
        for network in project.inspect(service)["NetworkSettings"]["Networks"].values()
    ]
    script = (
        "import sys, urllib.request as r\n"
        "for a in sys.argv[1:]:\n"
        "  try: print(a, r.urlopen(f'http://{a}:30000/health', timeout=2).status)\n"
        "  except Exception as e: print(a, 'no')"
    )
    reached = docker("run", "--rm", "--entrypoint", "python", image, "-c", script, *addresses)
    assert reached.split("\n")[:-1] == [f"{address} no" for address in addresses]


BAD_BODIES = {
    "nothing": b"",
    "half": b'{"model":',
    "deep": b"[" * 100_000,
    "deep messages": b'{"model":"tiny","messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "many answers": b'{"model":"tiny","n":100000000,"messages":[{"role":"user","content":"x"}]}',
    "negative": b'{"model":"tiny","max_tokens":-5,"messages":[{"role":"user","content":"x"}]}',
    "no number": b'{"model":"tiny","temperature":1e999,"messages":[{"role":"user","content":"x"}]}',
    "no text": b'{"model":"tiny","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "surrogate": b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}',
    "a list": b"[1, 2]",
    "wrong kind": b'{"model":{"a":1},"messages":"x"}',
    "beyond the context": b'{"model":"tiny","messages":[{"role":"user","content":"' + b"x " * 20_000 + b'"}]}',
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_a_body_that_is_no_request_gets_a_4xx_and_breaks_nothing(client: httpx.Client, name: str) -> None:
    answer = client.post("/v1/chat/completions", content=BAD_BODIES[name], headers=headers())
    assert 400 <= answer.status_code < 500, answer.text
    assert "Traceback" not in answer.text
    assert ask(client).status_code == 200


def test_a_request_cannot_choose_the_engine_that_its_cache_comes_from(project: Project, client: httpx.Client) -> None:
    steering = {"bootstrap_host": "192.0.2.9", "bootstrap_port": 1, "bootstrap_room": 5}
    answer = client.post(
        "/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 2}, **steering}, headers=headers()
    )
    assert answer.status_code == 200, answer.text
    assert "192.0.2.9" not in project.log("decode")


def test_code_in_a_request_is_not_run(client: httpx.Client) -> None:
    # SGLang unpickles this when it is switched on.
    body = {"text": "x", "custom_logit_processor": '{"callable": "80049503"}', "sampling_params": {"max_new_tokens": 2}}
    answer = client.post("/generate", json=body, headers=headers())
    assert answer.status_code in (200, 400)
    assert ask(client).status_code == 200


def test_the_largest_prompts_at_once_cost_the_others_seconds_and_no_engine(
    project: Project, client: httpx.Client
) -> None:
    limit = 2097152
    assert client.post("/generate", content=b"x" * (limit + 1), headers=headers()).status_code == 413
    largest = b'{"text":"' + b"x" * (limit - 100) + b'","sampling_params":{"max_new_tokens":2}}'
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(client.post, "/generate", content=largest, headers=headers()) for _ in range(3)]
        time.sleep(0.5)
        beside = ask(client)
        answers = [answer.result().status_code for answer in running]
    assert 200 not in answers
    # A probe that comes late takes an engine out of the router for a moment; it must come back by itself.
    deadline = time.monotonic() + 60
    while beside.status_code != 200:
        assert time.monotonic() < deadline, beside.text
        time.sleep(1)
        beside = ask(client)
    for service in ENGINES:
        assert project.inspect(service)["RestartCount"] == 0
        assert not project.inspect(service)["State"]["OOMKilled"]


def test_a_body_in_chunks_without_end_is_ended(project: Project, client: httpx.Client) -> None:
    def endless() -> Iterator[bytes]:
        yield b'{"text":"'
        for _ in range(64):
            yield b"x" * 65536

    # It may be cut off while it is still sending.
    with contextlib.suppress(httpx.TransportError):
        assert client.post("/generate", content=endless(), headers=headers()).status_code in (400, 413)
    assert ask(client).status_code == 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("model", "messages", "max_tokens", "temperature", "top_p", "n", "stop", "stream", "tools", "response_format")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/generate", "/v1/tokenize", "/v1/detokenize"]),
    fields=st.dictionaries(st.sampled_from([*FIELDS, "text", "prompt", "sampling_params", "tokens"]), JSON, max_size=4),
)
def test_no_json_gets_a_5xx_or_a_traceback(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    body = {"model": "tiny", "max_tokens": 1, **fields}
    answer = client.post(path, content=json.dumps(body, allow_nan=True), headers=headers())
    # 501: a route of another backend; 503 would be an engine that is gone.
    assert answer.status_code < 500 or answer.status_code == 501, (body, answer.text)
    assert "Traceback" not in answer.text


PUBLIC = (
    *("/v1/chat/completions", "/v1/completions", "/generate", "/v1/tokenize", "/v1/detokenize", "/v1/models"),
    *("/get_model_info", "/get_server_info", "/health"),
)


def test_what_sglangs_own_schema_allows_and_forbids_gets_no_5xx(
    project: Project, client: httpx.Client, certificate: tuple[Path, Path], tmp_path: Path
) -> None:
    program = ROOT / ".cache/schemathesis/bin/schemathesis"
    if not program.exists():
        pytest.fail("no schemathesis: make test-docker brings it, or: make .cache/schemathesis/.synced")
    schema = json.loads(project.fetch("decode", "http://127.0.0.1:30000/openapi.json"))
    # The engine has some of them under another name as well.
    schema["paths"] = {path: schema["paths"][path] for path in PUBLIC if path in schema["paths"]}
    assert len(schema["paths"]) >= 5, schema["paths"].keys()
    (tmp_path / "openapi.json").write_text(json.dumps(schema))
    # 501: a route of another backend.
    configuration = "[checks.not_a_server_error]\nexpected-statuses = ['2xx', '3xx', '4xx', 501]\n"
    (tmp_path / "schemathesis.toml").write_text(configuration)
    command = [str(program), "run", "openapi.json", "--url", str(client.base_url), "--tls-verify", str(certificate[0])]
    command += ["--header", f"Authorization: Bearer {KEY}", "--checks", "not_a_server_error", "--mode", "all"]
    command += ["--phases", "fuzzing", "--max-examples", "6", "--seed", "1", "--continue-on-failure"]
    command += ["--request-timeout", "60", "--suppress-health-check", "all", "--no-shrink", "--no-color"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400)
    (ROOT / ".cache/schemathesis.txt").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_one_request_is_followed_from_the_front_to_decode(project: Project, client: httpx.Client) -> None:
    answer = ask(client, headers={"X-Request-Id": "order-66"})
    assert answer.headers["x-request-id"] == "order-66"
    time.sleep(1)
    logs = {service: docker_log(project, service) for service in SERVICES}
    found = trace(logs, "order-66")
    assert set(found.roles) == {"front", "router", "prefill", "decode"}
    assert len(found.rooms) == 1
    ends = {step.role: step.details for step in found.steps if step.event == "finished"}
    assert ends["decode"]["completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert ends["prefill"]["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    # An id that the front made is as good.
    made = ask(client).headers["x-request-id"]
    time.sleep(1)
    assert len(trace({service: docker_log(project, service) for service in SERVICES}, made).roles) == 4


def docker_log(project: Project, service: str) -> str:
    command = ["docker", "logs", "--timestamps", project.container(service)]
    done = subprocess.run(command, capture_output=True, check=True)
    return (done.stdout + b"\n" + done.stderr).decode(errors="replace")


def test_no_log_holds_a_key_or_a_prompt(project: Project) -> None:
    for service in SERVICES:
        log = project.log(service)
        assert KEY not in log, service
        assert PROMPT not in log, service


@pytest.fixture(scope="module")
def shown(project: Project, client: httpx.Client) -> str:
    """The page of metrics after a stream, an abort, and what the controller writes."""
    ask(client, stream=True)
    with client.stream(
        "POST",
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2000, "stream": True},
        headers=headers(),
    ) as answer:
        next(answer.iter_raw())
    folder = Path(project.variables["METRICS_FOLDER"])
    write_controller(folder)
    # It ends in the engine too, long before its last token.
    deadline = time.monotonic() + 5
    while "sglang:num_aborted_requests_total" not in (shown := page(project)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return shown


def write_controller(folder: Path) -> None:
    now = datetime.now(UTC)
    shown = Acceptance("u", "m", 300, 48, ENGINES, 4096, "tcp", 0.25, 1.0, 9, True)
    state = RoleState("decode", "id", "n", "i", "running", "healthy", 0, False, 0, now, 1, frozenset(), "", ())
    (folder / "accepted.prom").write_text(accepted(shown, {"profile": "cpu", "image": "i"}, now))
    (folder / "roles.prom").write_text(roles([state], now))


def test_one_page_has_every_role_and_the_controller(shown: str) -> None:
    up = {
        sample.labels["role"]: sample.value
        for family in text_string_to_metric_families(shown)
        for sample in family.samples
        if sample.name == "role_up"
    }
    assert up == dict.fromkeys((*ENGINES, "router", "front"), 1)
    for role, name in (
        ("prefill", "agent_tx_bytes_total"),
        ("decode", "sglang:num_running_reqs"),
        ("router", "smg_http_responses_total"),
        ("front", "haproxy_frontend_http_responses_total"),
    ):
        assert re.search(rf'^{name}\{{role="{role}"', shown, re.MULTILINE), name
    assert 'deploy_role_serving{role="decode"} 1' in shown
    assert KEY not in shown


def metric_names(expression: str) -> set[str]:
    """The metrics that an expression of PromQL asks for."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", bare)
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)|\boffset\s+\S+", "", bare)
    found = re.finditer(r"(?<![\w:.])[a-zA-Z_:][\w:]*(?!\s*\()", bare)
    return {match[0] for match in found if not re.match(r"\w*\s*\(", bare[match.start() :])} - {
        *("and", "or", "unless", "sum", "max", "min", "avg")
    }


def test_every_metric_of_the_dashboard_and_the_alerts_is_on_the_page(shown: str) -> None:
    have = {found[0] for found in re.finditer(r"^[a-zA-Z_:][\w:]*", shown, re.MULTILINE)}
    panels = json.loads((ROOT / "observability/dashboard.json").read_text())["panels"]
    groups = yaml.safe_load((ROOT / "observability/alerts.yml").read_text())["groups"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    expressions += [rule["expr"] for group in groups for rule in group["rules"]]
    asked = set[str]().union(*map(metric_names, expressions))
    assert len(asked) > 30
    assert asked - have <= LATER


def test_the_alerts_fire_on_what_they_should_and_on_nothing_else() -> None:
    promtool = PROGRAMS / "promtool"
    if not promtool.exists():
        pytest.fail("no promtool: make test-docker brings it, or: make .cache/programs/usr/bin/prometheus")
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [str(promtool), *command], cwd=ROOT / "observability", capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_the_page_and_the_rules(project: Project, shown: str, tmp_path: Path) -> None:
    # Debian's binary in an image of its own: this test must not fetch one.
    del shown
    (tmp_path / "prometheus").write_bytes((PROGRAMS / "prometheus").read_bytes())
    (tmp_path / "prometheus").chmod(0o755)
    (tmp_path / "data").mkdir()
    (tmp_path / "Dockerfile").write_text(
        f"FROM {project.variables['IMAGE']}\nCOPY prometheus /usr/bin/prometheus\n"
        'COPY --chown=65534:65534 data /prometheus\nENTRYPOINT ["/usr/bin/prometheus"]\n'
    )
    tag = f"{project.name}-prometheus"
    docker("build", "--quiet", "--tag", tag, str(tmp_path))
    port = free_port()
    added = {"PROMETHEUS_IMAGE": tag, "PROMETHEUS_PORT": str(port), "COMPOSE_PROFILES": "prometheus"}
    with_prometheus = Project(project.name, project.files, {**project.variables, **added})
    try:
        with_prometheus.compose("up", "--detach", "--no-deps", "prometheus")
        deadline = time.monotonic() + 60
        while not (found := query(port, "sum by (role) (role_up)")):
            assert time.monotonic() < deadline, with_prometheus.log("prometheus")[-2000:]
            time.sleep(1)
        assert found == {"prefill": 1, "decode": 1, "router": 1, "front": 1}
        rules = httpx.get(f"http://127.0.0.1:{port}/api/v1/rules", timeout=10).json()["data"]["groups"]
        assert {rule["health"] for group in rules for rule in group["rules"]} <= {"ok", "unknown"}
    finally:
        with_prometheus.compose("rm", "--stop", "--force", "prometheus")
        # `down` does not know the volume without the Compose profile.
        docker("volume", "rm", "--force", f"{project.name}_prometheus-data")
        docker("rmi", "--force", tag)


def query(port: int, expression: str) -> dict[str, float]:
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params={"query": expression}, timeout=10).json()
    except httpx.TransportError:
        return {}
    return {item["metric"]["role"]: float(item["value"][1]) for item in answer["data"]["result"]}


def test_after_all_that_nothing_was_restarted_and_answers_are_right(project: Project, client: httpx.Client) -> None:
    assert (
        ask(client).json()["choices"][0]["message"]["content"] == ask(client).json()["choices"][0]["message"]["content"]
    )
    for service in SERVICES:
        assert project.inspect(service)["RestartCount"] == 0
