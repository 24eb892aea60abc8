"""compose.replicas.yaml: two real engines with the tiny model behind the real router; its layouts on stand-in GPUs."""

import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from checks import check_confinement, check_reach, connects
from conftest import API_KEY, Project, docker, new_project, running
from test_gpu_host import seen_gpus

from deploy.host.probe_host import LocalMachine
from deploy.spec.load import parse
from deploy.spec.profiles import compose_files
from deploy.stack.accept import NotAccepted, accept
from deploy.stack.client import endpoint
from deploy.stack.compose import Stack, running_stack
from deploy.stack.counters import Served, parse_served
from deploy.stack.environment import Facts, variables
from deploy.stack.events import Running
from deploy.stack.status import status
from deploy.status.live import Live
from loadtest import containers

ENGINES = ("engine", "engine-2")
FILES = ("compose.replicas.yaml", "tests/docker/replicas-cpu.yaml")
PROMPTS = (
    "hi",
    "The quick brown fox jumps over the lazy dog.",
    "Prefill computes the key value cache; decode generates one token at a time. " * 8,
    "Übergrößenträger 日本語 🙂",
)
ANSWER_TOKENS = 60


def layout(size: int, engines: int) -> str:
    """A deploy.toml with so many engines of so many GPUs."""
    tables = (
        f"[[replica]]\ngpus = {list(range(number * size, (number + 1) * size))}\nnuma_node = {number * size // 4}\n"
        for number in range(engines)
    )
    return 'profile = "replicas"\n' + "".join(tables)


def given(text: str) -> dict[str, str]:
    """The env file that `deploy up` would write for a deploy.toml, without what names this host's files."""
    lines = variables(parse(text, Path("deploy.toml")), Facts("", Path(), None, {}))
    return {line.name: line.value for line in lines if line.name not in ("IMAGE", "MODEL_PATH")}


@pytest.fixture(scope="module")
def project(image: str, model: Path, api_key_file: Path) -> Iterator[Project]:
    fixed = {"IMAGE": image, "MODEL_PATH": str(model), "API_KEY_FILE": str(api_key_file)}
    with running(new_project(*FILES, **fixed, **given(layout(2, 2)))) as started:
        yield started


@pytest.fixture(scope="module")
def router(project: Project) -> str:
    return f"http://127.0.0.1:{project.variables['PORT']}"


@pytest.fixture
def stack(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    """The running stack as the controller finds it."""
    monkeypatch.setenv("COMPOSE_PROJECT_NAME", project.name)
    environment = tmp_path / "stack.env"
    environment.write_text("".join(f'{name}="{value}"\n' for name, value in project.variables.items()))
    return running_stack(Path(project.files[0]).parent, environment)


def ask(url: str, prompt: str, **changes: Any) -> httpx.Response:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"Authorization": f"Bearer {API_KEY}"}
    return httpx.post(f"{url}/v1/chat/completions", json=body | changes, headers=headers, timeout=120)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == ANSWER_TOKENS
    return str(response.json()["choices"][0]["message"]["content"])


def served(project: Project) -> dict[str, Served]:
    return {name: parse_served(project.fetch(name, "http://127.0.0.1:30000/metrics")) for name in ENGINES}


def gained(project: Project, before: dict[str, Served], requests: int) -> dict[str, Served]:
    """What each engine finished since `before`, once so many requests are counted."""
    deadline = time.monotonic() + 20
    while True:
        found = {name: now - before[name] for name, now in served(project).items()}
        if sum(item.requests for item in found.values()) >= requests:
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.3)


@pytest.fixture(scope="module")
def expected(project: Project) -> dict[str, str]:
    """Greedy answers of one engine, asked for inside its own container and not through the router."""
    script = (
        "import json, sys, urllib.request as r\n"
        "for body in json.load(sys.stdin):\n"
        "    q = r.Request('http://127.0.0.1:30000/v1/chat/completions', json.dumps(body).encode(),\n"
        "                  {'Content-Type': 'application/json'})\n"
        "    print(json.dumps(json.load(r.urlopen(q, timeout=120))['choices'][0]['message']['content']))\n"
    )
    bodies = [
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        for prompt in PROMPTS
    ]
    done = subprocess.run(
        ["docker", "exec", "-i", project.container("engine"), "python", "-c", script],
        input=json.dumps(bodies),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(PROMPTS, map(json.loads, done.stdout.splitlines()), strict=True))


def test_sixteen_at_once_both_engines_work_and_answer_as_one_of_them_alone(
    project: Project, router: str, expected: dict[str, str]
) -> None:
    assert len(set(expected.values())) == len(PROMPTS)
    before = served(project)
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(48)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(partial(ask, router), prompts))
    assert [text_of(answer) for answer in answers] == [expected[prompt] for prompt in prompts]
    found = gained(project, before, len(prompts))
    assert sum(item.requests for item in found.values()) == len(prompts)
    # A share of a quarter for either: the prompts have nothing to do with who is faster.
    assert min(item.requests for item in found.values()) >= len(prompts) / 4, found


def test_a_common_beginning_does_not_send_every_request_to_one_engine(project: Project, router: str) -> None:
    before = served(project)
    beginning = "value " * 400
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(partial(ask, router), [f"{beginning} {number}" for number in range(32)]))
    assert {answer.status_code for answer in answers} == {200}
    found = gained(project, before, len(answers))
    assert min(item.requests for item in found.values()) >= 4, found


def test_acceptance_finds_both_engines_and_accounts_for_every_token(stack: Stack, project: Project) -> None:
    assert (stack.profile, stack.engines) == ("replicas", ENGINES)
    before = served(project)
    accepted = accept(stack, endpoint(stack.config()), Running("accept", lambda event: None))
    found = gained(project, before, 1)
    assert len(accepted.engines) == 1 and accepted.engines[0] in ENGINES
    assert found[accepted.engines[0]] == Served(1, accepted.prompt_tokens, accepted.answer_tokens)
    assert (accepted.transferred, accepted.needs_key) == (0, True)
    assert f"counted by {accepted.engines[0]}" in str(accepted)


def test_status_and_the_live_view_know_each_engine(stack: Stack, router: str) -> None:
    seen = status(stack)
    assert seen.serving and seen.expected == (*ENGINES, "router")
    assert [state.role for state in seen.roles] == [*ENGINES, "router"]
    live = Live(LocalMachine())
    live.look(stack)
    assert ask(router, PROMPTS[2]).status_code == 200
    views = live.look(stack)
    assert [view.role for view in views] == list(ENGINES)
    assert all(view.engine and view.engine.tokens > 0 for view in views)


def test_the_load_test_finds_both_engines(router: str) -> None:
    assert set(containers.find_stack(router).engines) == set(ENGINES)


@pytest.mark.parametrize("service", [*ENGINES, "router"])
def test_a_serving_container_is_confined(project: Project, service: str) -> None:
    check_confinement(project, service)


def test_only_the_router_can_be_reached(project: Project) -> None:
    check_reach(project, ENGINES)
    assert connects(project, "router", "engine-2", 30000)


# Last of those that use the two engines: it takes one away.
def test_when_an_engine_dies_no_request_that_has_not_begun_to_answer_is_lost(
    project: Project, router: str, stack: Stack, expected: dict[str, str]
) -> None:
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(24)]
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, router, prompt) for prompt in prompts[:8]]
        docker("kill", project.container("engine-2"))
        answers += [pool.submit(ask, router, prompt) for prompt in prompts[8:]]
        texts = [text_of(answer.result()) for answer in answers]
    assert texts == [expected[prompt] for prompt in prompts]
    assert not status(stack).serving
    begun = time.monotonic()
    assert text_of(ask(router, PROMPTS[0])) == expected[PROMPTS[0]]
    assert time.monotonic() - begun < 15


def test_acceptance_refuses_a_stack_with_a_dead_engine(
    stack: Stack, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.stack.accept.READY_PATIENCE_S", 12.0)
    with pytest.raises(NotAccepted, match="found 1 of 2 engines"):
        accept(stack, endpoint(stack.config()), Running("accept", lambda event: None))


# ---- the layouts of the GPU host, with a stand-in process in each container


@pytest.mark.parametrize(("size", "engines"), [(2, 1), (2, 4), (4, 2)])
def test_each_engine_sees_exactly_its_gpus(
    size: int, engines: int, image: str, model: Path, fake_gpus: list[str]
) -> None:
    text = layout(size, engines)
    named = {
        name: fake_gpus[int(value.partition("=")[2])] if "_GPU_" in name else value
        for name, value in given(text).items()
    }
    files = (*compose_files("replicas", gpus_per_engine=size), "tests/docker/replicas-standin.yaml")
    with running(new_project(*files, **{"IMAGE": image, "MODEL_PATH": str(model)}, **named)) as project:
        names = list(parse(text, Path("deploy.toml")).spec.roles)
        assert project.compose("ps", "--services").stdout.split() == sorted([*names, "router"])
        for number, name in enumerate(names):
            assert seen_gpus(project, name) == list(range(number * size, (number + 1) * size))
            check_confinement(project, name)
        assert seen_gpus(project, "router") == []
        check_reach(project, tuple(names))
    assert project.leftovers() == []


@pytest.mark.parametrize(
    ("size", "engines", "speculation", "variant"),
    [
        (2, 4, "eagle", "mxfp4"),
        (4, 2, "dspark", "mxfp4"),
        (2, 1, "none", "nvfp4"),
    ],
)
def test_every_argument_is_one_that_the_locked_sglang_and_router_know(
    image: str, size: int, engines: int, speculation: str, variant: str
) -> None:
    text = f'{layout(size, engines)}[engine]\nspeculation = "{speculation}"\n[model]\nvariant = "{variant}"\n'
    files = compose_files("replicas", gpus_per_engine=size)
    named = given(text)
    services = Project("dsv4", new_project(*files).files, named).config()["services"]
    script = (
        "import argparse, json, sys\n"
        "from engine_runtime.launch import arguments\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "from sglang_router.router_args import RouterArgs\n"
        "for service in json.load(sys.stdin):\n"
        "    role, rest = arguments(service['command'], service['environment'])\n"
        "    parser = argparse.ArgumentParser(allow_abbrev=False)\n"
        "    (RouterArgs if role == 'router' else ServerArgs).add_cli_args(parser)\n"
        "    args = parser.parse_args(rest)\n"
        "    if role == 'router': print(args.worker_urls)\n"
        "    else: print(args.tp_size, args.numa_node, args.speculative_algorithm, args.moe_runner_backend)\n"
    )
    done = subprocess.run(
        [
            *("docker", "run", "--rm", "--interactive", "--network=none", "--env=SGLANG_USE_CPU_ENGINE=1"),
            *("--env=PYTHONPATH=/opt/cpu_standins", image, "python", "-c", script),
        ],
        input=json.dumps(list(services.values())),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    backend = {"mxfp4": "flashinfer_mxfp4", "nvfp4": "flashinfer_cutlass"}[variant]
    algorithm = None if speculation == "none" else speculation.upper()
    nodes = [number * size // 4 for number in range(engines)]
    urls = [f"http://{name}:30000" for name in services if name != "router"]
    assert done.stdout.splitlines()[-engines - 1 :] == [
        *(f"{size} {[node] * size} {algorithm} {backend}" for node in nodes),
        str(urls),
    ]
