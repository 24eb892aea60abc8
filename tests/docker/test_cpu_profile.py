"""Real SGLang, NIXL and router in containers on a machine without GPUs, with the tiny model."""

import io
import json
import subprocess
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from checks import ENGINES, SERVICES, check_confinement, check_reach
from conftest import API_KEY, READY_PATIENCE_SECONDS, ROOT, Project, docker, free_port, new_project, running

from deploy.doctor.finding import Needs
from deploy.host.probe_host import LocalMachine, probe
from deploy.profile.summary import summarise
from deploy.profile.trace import read
from deploy.report.verb import report
from deploy.stack import profiling
from deploy.stack.compose import Stack, running_stack
from deploy.stack.counters import crossing, parse_counters
from deploy.stack.state import State
from deploy.stack.status import running_endpoint
from deploy.stack.transport import bytes_sent, describe, remote_writes
from deploy.status.live import Live

FILES = ("compose.yaml", "compose.cpu.yaml")
PROMPTS = (
    "hi",
    "The quick brown fox jumps over the lazy dog.",
    "Prefill computes the key value cache; decode generates one token at a time. " * 8,
    "router in front of prefill and decode servers " * 30,
    "Übergrößenträger 日本語 🙂",
)
ANSWER_TOKENS = 120
# Bytes of KV cache of one token of the tiny model: keys and values, 2 layers, 2 heads, 16 numbers of 4 bytes.
KV_BYTES = 2 * 2 * 2 * 16 * 4
# Tokens that every prompt starts with and prefill may have cached: <|im_start|>, "user", a line break.
COMMON_TOKENS = 6
# NIXL also sends a few descriptions of the request.
METADATA_BYTES = 8192
NIXL_PORT = 19090


@pytest.fixture(scope="module")
def project(image: str, model: Path, api_key_file: Path) -> Iterator[Project]:
    variables = {"IMAGE": image, "MODEL_PATH": str(model), "API_KEY_FILE": str(api_key_file)}
    with running(new_project(*FILES, **variables)) as started:
        yield started


@pytest.fixture(scope="module")
def router(project: Project) -> str:
    return f"http://127.0.0.1:{project.variables['PORT']}"


@pytest.fixture(scope="module")
def aggregated(project: Project) -> Iterator[str]:
    """One engine that prefills and decodes: prefill's own configuration without the role."""
    service = project.config()["services"]["prefill"]
    name, port = f"{project.name}-aggregated", free_port()
    environment = [word for key, value in service["environment"].items() for word in ("--env", f"{key}={value}")]
    command = [word for word in service["command"][1:] if not word.startswith("--disaggregation")]
    docker(
        *("run", "--detach", "--name", name, "--publish", f"127.0.0.1:{port}:30000"),
        *("--read-only", "--tmpfs", "/tmp:exec,mode=1777"),
        *("--volume", f"{project.variables['MODEL_PATH']}:/model:ro", "--volume", "/var/cache/engine"),
        *(*environment, service["image"], "python", "-m", "engine_runtime.launch", "engine", *command),
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(name, url)
        yield url
    finally:
        docker("rm", "--force", "--volumes", name)


def wait_until_healthy(container: str, url: str) -> None:
    deadline = time.monotonic() + READY_PATIENCE_SECONDS
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=30).status_code == 200:
                return
        except httpx.TransportError:
            pass
        ended = docker("inspect", "--format", "{{.State.Running}}", container).strip() != "true"
        if ended or time.monotonic() > deadline:
            done = subprocess.run(["docker", "logs", "--tail=30", container], capture_output=True, text=True)
            pytest.fail(f"{container} does not serve: {done.stdout}{done.stderr}")
        time.sleep(1)


def ask(url: str, prompt: str, **changes: Any) -> httpx.Response:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    return httpx.post(
        f"{url}/v1/chat/completions",
        json=body | changes,
        headers={"Authorization": f"Bearer {API_KEY}"},
        timeout=120,
    )


def answer(url: str, prompt: str) -> tuple[str, int, int]:
    """The greedy answer and the lengths that the server counted."""
    response = ask(url, prompt)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    text = response.json()["choices"][0]["message"]["content"]
    return text, usage["prompt_tokens"], usage["completion_tokens"]


def counters(project: Project) -> dict[str, Any]:
    return {role: parse_counters(project.fetch(role, "http://127.0.0.1:30000/metrics")) for role in ENGINES}


def nixl_bytes(project: Project) -> int:
    return bytes_sent(project.fetch("prefill", f"http://127.0.0.1:{NIXL_PORT}/metrics"))


@pytest.fixture(scope="module")
def expected(aggregated: str) -> dict[str, tuple[str, int, int]]:
    return {prompt: answer(aggregated, prompt) for prompt in PROMPTS}


def test_the_tiny_model_does_not_write_the_same_word_for_ever(expected: dict[str, tuple[str, int, int]]) -> None:
    for text, _, completion in expected.values():
        assert completion == ANSWER_TOKENS
        assert len(set(text.split())) > 10
    assert len({text for text, _, _ in expected.values()}) == len(PROMPTS)


def test_one_by_one_the_answers_are_those_of_a_single_engine(
    router: str, expected: dict[str, tuple[str, int, int]]
) -> None:
    assert {prompt: answer(router, prompt) for prompt in PROMPTS} == expected


def test_sixteen_at_once_the_answers_are_those_of_a_single_engine(
    router: str, expected: dict[str, tuple[str, int, int]]
) -> None:
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(32)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: answer(router, prompt), prompts))
    assert answers == [expected[prompt] for prompt in prompts]


def test_prefill_computes_decode_writes_and_nixl_carries_the_cache_between_them(project: Project, router: str) -> None:
    before, sent_before = counters(project), nixl_bytes(project)
    _, prompt_tokens, answer_tokens = answer(router, f"{time.time_ns()} is a prompt that no cache knows")
    deadline = time.monotonic() + 20
    while True:
        now = counters(project)
        gained = {role: now[role] - before[role] for role in ENGINES}
        sent = nixl_bytes(project) - sent_before
        contradictions = crossing(
            gained["prefill"], gained["decode"], sent, prompt_tokens - COMMON_TOKENS, answer_tokens
        )
        if not contradictions and sent >= prompt_tokens * KV_BYTES:
            break
        assert time.monotonic() < deadline, (contradictions, sent)
        time.sleep(0.5)
    assert now["prefill"].decoded == 0
    assert now["decode"].computed == 0
    assert sent < prompt_tokens * KV_BYTES + METADATA_BYTES


def test_the_transport_between_two_separate_containers_is_tcp_and_named(project: Project, router: str) -> None:
    assert ask(router, "hi").status_code == 200
    writes = remote_writes(project.log("prefill"))
    assert {write.transports for write in writes} == {("tcp",)}, describe(writes)


def test_an_answer_is_streamed_in_pieces_that_add_up_to_the_whole(
    router: str, expected: dict[str, tuple[str, int, int]]
) -> None:
    lines = ask(router, PROMPTS[1], stream=True).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]]
    assert len([piece for piece in pieces if piece]) > ANSWER_TOKENS // 2
    assert "".join(pieces) == expected[PROMPTS[1]][0]
    assert lines[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in lines[-2:]


@pytest.mark.parametrize("key", [None, "sk-wrong", API_KEY[:-1], f"{API_KEY}x"])
def test_without_the_right_key_nothing_is_answered(router: str, key: str | None) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
        body = {"model": "tiny", "text": "hi", "prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
        assert httpx.post(f"{router}{path}", json=body, headers=headers, timeout=30).status_code == 401


@pytest.mark.parametrize("path", ["/workers", "/flush_cache", "/wasm", "/v1/tokenizers"])
def test_the_clients_key_does_not_open_the_admin_routes(router: str, path: str) -> None:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    for method in ("GET", "POST"):
        response = httpx.request(method, f"{router}{path}", json={}, headers=headers, timeout=30)
        assert response.status_code in (401, 403, 404, 405), response.text
        assert httpx.request(method, f"{router}{path}", json={}, timeout=30).status_code in (401, 403, 404, 405)


@pytest.mark.parametrize(
    "path", ["/update_weights_from_disk", "/set_internal_state", "/abort_request", "/start_profile"]
)
def test_the_engines_own_admin_routes_do_not_exist_at_the_router(router: str, path: str) -> None:
    response = httpx.post(f"{router}{path}", json={}, headers={"Authorization": f"Bearer {API_KEY}"}, timeout=30)
    assert response.status_code == 404


def test_the_key_shows_in_no_log_argument_environment_or_configuration(project: Project, router: str) -> None:
    assert ask(router, "hi").status_code == 200
    for service in SERVICES:
        assert API_KEY not in project.log(service)
        assert API_KEY not in json.dumps(project.inspect(service))
        script = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null; true"
        assert API_KEY not in project.execute(service, "sh", "-c", script)


@pytest.mark.parametrize("changes", [{"messages": "no list"}, {"max_tokens": "many"}, {"messages": []}])
def test_a_malformed_request_is_refused_and_the_next_one_served(router: str, changes: dict[str, Any]) -> None:
    for _ in range(12):
        assert 400 <= ask(router, "hi", **changes).status_code < 500
    assert ask(router, "hi").status_code == 200


def test_a_prompt_beyond_the_context_is_refused_with_both_lengths(router: str) -> None:
    response = ask(router, "x" * 6000)
    assert response.status_code == 400
    assert "4096" in response.text


@pytest.mark.parametrize("service", SERVICES)
def test_a_serving_container_is_confined(project: Project, service: str) -> None:
    check_confinement(project, service)


def test_only_the_router_can_be_reached(project: Project) -> None:
    check_reach(project)
    for engine in ENGINES:
        address = project.inspect(engine)["NetworkSettings"]["Networks"][f"{project.name}_engines"]["IPAddress"]
        # Whoever answers on that address outside the containers' network, it is not the engine.
        with pytest.raises((httpx.TransportError, AssertionError)):
            response = httpx.get(f"http://{address}:30000/model_info", timeout=3, trust_env=False)
            assert "model_path" in response.text


@pytest.fixture
def stack(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    monkeypatch.setenv("COMPOSE_PROJECT_NAME", project.name)
    environment = tmp_path / "stack.env"
    environment.write_text("".join(f"{name}={value}\n" for name, value in project.variables.items()))
    return running_stack(ROOT, environment)


def test_the_live_view_follows_the_engines(stack: Stack, router: str) -> None:
    live = Live(LocalMachine())
    live.look(stack)
    answer(router, PROMPTS[2])
    views = {view.role: view for view in live.look(stack)}
    assert set(views) == set(ENGINES)
    for view in views.values():
        assert view.engine and view.engine.tokens > 0 and (view.tokens_per_second or 0) > 0


@pytest.mark.parametrize(("role", "stage"), [("decode", "decode"), ("prefill", "prefill")])
def test_the_next_steps_of_an_engine_are_recorded_and_nothing_is_left_in_it(
    stack: Stack, project: Project, router: str, tmp_path: Path, role: str, stage: str
) -> None:
    target = running_endpoint(stack, tuple(stack.roles()))
    assert target is not None
    (file,) = profiling.capture(stack, role, tmp_path / "traces", steps=3, seconds=120, load=2, target=target)
    found = summarise(read(file), layers=1)
    assert found.device == "CPU" and found.stage == stage and found.steps >= 3
    parts = found.step.by_category
    assert {"linear", "glue"} <= set(parts)
    assert "other" not in parts or parts["other"].seconds < 0.01 * found.step.seconds
    assert project.execute(role, "ls", "/var/cache/engine/profiles").strip() == ""
    # It serves as before.
    assert answer(router, PROMPTS[1])


def test_when_the_time_is_over_what_came_is_recorded_and_that_is_said(
    stack: Stack, project: Project, router: str, tmp_path: Path
) -> None:
    assert answer(router, PROMPTS[1])
    said: list[str] = []
    (file,) = profiling.capture(stack, "decode", tmp_path, steps=1000, seconds=5, say=said.append)
    assert any("before 1000 steps" in line for line in said)
    # A health probe may have brought a step.
    try:
        assert summarise(read(file), layers=1).steps < 10
    except ValueError as error:
        assert "nothing ran" in str(error) or "neither" in str(error) or "no operators" in str(error)
    assert project.execute("decode", "ls", "/var/cache/engine/profiles").strip() == ""
    with pytest.raises(profiling.CaptureFailed, match="there is no engine-2"):
        profiling.capture(stack, "engine-2", tmp_path, steps=1, seconds=5)


def test_a_bug_report_has_the_logs_of_all_roles_and_no_key(
    stack: Stack, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State(tmp_path / "state")
    state.environment.parent.mkdir(parents=True, exist_ok=True)
    state.environment.write_text(stack.environment.read_text())
    state.api_key.parent.mkdir(parents=True, exist_ok=True)
    state.api_key.write_text(API_KEY)
    monkeypatch.setenv("SOME_TOKEN", "a-token-of-the-shell")
    path = report(ROOT, ROOT / "deploy.toml", state, probe(LocalMachine()), Needs(), tmp_path / "report.tar.gz")
    with tarfile.open(path) as tar:
        files = {Path(entry.name).name: (tar.extractfile(entry) or io.BytesIO()).read() for entry in tar.getmembers()}
    for service in SERVICES:
        assert len(files[f"{service}.log"].splitlines()) > 3, files["missing.txt"].decode()
    assert b"--disaggregation-transfer-backend" in files["compose-effective.json"]
    for secret in (API_KEY, "a-token-of-the-shell"):
        assert not [name for name, content in files.items() if secret.encode() in content]


@pytest.mark.quiet
def test_an_idle_role_uses_at_most_five_percent_of_a_core(project: Project) -> None:
    # Other work on the machine only adds to what is counted: the quietest of several windows counts.
    shares: dict[str, float] = {}
    for _ in range(4):
        begun, before = time.monotonic(), {service: cpu_seconds(project, service) for service in SERVICES}
        time.sleep(10)
        for service in SERVICES:
            share = (cpu_seconds(project, service) - before[service]) / (time.monotonic() - begun)
            shares[service] = min(share, shares.get(service, share))
        if max(shares.values()) <= 0.05:
            return
    pytest.fail(f"share of one core: {shares}")


def cpu_seconds(project: Project, service: str) -> float:
    """CPU time of all processes of a container so far, from its control group (version 1 or 2)."""
    version_1, version_2 = "/sys/fs/cgroup/cpuacct/cpuacct.usage", "/sys/fs/cgroup/cpu.stat"
    words = project.execute(service, "sh", "-c", f"cat {version_1} 2>/dev/null || cat {version_2}").split()
    return int(words[0]) / 1e9 if len(words) == 1 else int(words[words.index("usage_usec") + 1]) / 1e6


def test_down_leaves_no_container_network_or_volume(project: Project, router: str) -> None:
    assert httpx.get(f"{router}/readiness", timeout=10).status_code == 200
    project.down()
    assert project.leftovers() == []
