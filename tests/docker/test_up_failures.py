"""What a person can do to `deploy up`, and what is left afterwards. The CPU profile, the real image."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import PROJECT_LABEL, docker, free_port

ROOT = Path(__file__).parents[2]
DEPLOY = Path(sys.executable).parent / "deploy"
PATIENCE_S = 300


class Controller:
    """`deploy` with a compose project, a spec, a port and a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.project = f"dsv4-test-{uuid.uuid4().hex[:8]}"
        self.state = folder / "state"
        self.spec = folder / "deploy.toml"
        self.write_spec()

    def write_spec(self, port: int | None = None, variables: str = "") -> None:
        self.port = port or free_port()
        self.spec.write_text(f'profile = "cpu"\n[router]\nport = {self.port}\n[variables]\n{variables}\n')

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        own = {"COMPOSE_PROJECT_NAME": self.project, "DEPLOY_SPEC": str(self.spec), "DEPLOY_STATE": str(self.state)}
        return subprocess.Popen(
            [str(DEPLOY), *arguments],
            env=os.environ | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # As a shell does: signals reach this command and what it runs, not the test.
            start_new_session=True,
        )

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments)
        try:
            output, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        assert "Traceback (most recent call last)" not in errors, errors
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def containers(self) -> set[str]:
        return set(docker("ps", "--quiet", "--filter", f"label={PROJECT_LABEL}={self.project}").split())

    def leftovers(self) -> list[str]:
        label = ("--filter", f"label={PROJECT_LABEL}={self.project}")
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [f"{kind[0]} {name}" for kind in kinds for name in docker(*kind, "--quiet", *label).split()]


@pytest.fixture
def controller(image: str, tmp_path: Path) -> Iterator[Controller]:
    made = Controller(tmp_path)
    yield made
    made.run("down")


def wait_for(process: "subprocess.Popen[str]", pattern: str) -> str:
    """Read the progress of `up` until a line matches; returns what was read."""
    assert process.stderr
    read = ""
    deadline = time.monotonic() + PATIENCE_S
    for line in process.stderr:
        read += line
        if re.search(pattern, line):
            return read
        assert time.monotonic() < deadline, read
    pytest.fail(f"`deploy up` ended before {pattern!r}:\n{read}")


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("Host: started", signal.SIGINT),
        ("Start: started", signal.SIGINT),
        ("Start (prefill|decode): starting Python", signal.SIGTERM),
        ("Start (prefill|decode): starting ranks", signal.SIGINT),
    ],
)
def test_interrupted_at_any_moment_up_leaves_nothing(
    controller: Controller, moment: str, number: signal.Signals
) -> None:
    process = controller.start("up")
    wait_for(process, moment)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.splitlines()[-1] == "interrupted"
    assert controller.leftovers() == []


def test_a_second_command_is_refused_while_up_is_at_work_and_a_killed_one_leaves_no_lock(
    controller: Controller,
) -> None:
    first = controller.start("up")
    wait_for(first, "Start (prefill|decode): starting Python")
    for verb in ("up", "down"):
        second = controller.run(verb)
        assert second.returncode == 5
        assert f"`deploy up` (pid {first.pid}" in second.stderr
    first.kill()
    first.wait()
    assert controller.leftovers()
    assert controller.run("down").returncode == 0
    assert controller.leftovers() == []


def test_a_role_that_dies_is_named_with_the_line_that_says_why(controller: Controller) -> None:
    controller.write_spec(variables='DECODE_EXTRA_ARGUMENTS = "--no-such-argument"')
    result = controller.run("up")
    assert result.returncode == 4
    assert "error: decode failed to start" in result.stderr
    assert "unrecognized arguments: --no-such-argument" in result.stderr
    assert "--no-such-argument" in (controller.state / "failed" / "decode.log").read_text()
    assert controller.leftovers() == []


def test_what_docker_itself_refuses_is_shown_in_its_words_and_leaves_nothing(controller: Controller) -> None:
    controller.write_spec(variables='PREFILL_CPUS = "999"')
    result = controller.run("up")
    assert result.returncode == 1
    assert "Requested CPUs are not available" in result.stderr
    assert controller.leftovers() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_too_small_for_the_model_says_how_much_is_needed(controller: Controller) -> None:
    controller.state.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", controller.state], check=True)
    try:
        result = controller.run("up")
    finally:
        subprocess.run(["umount", controller.state], check=True)
    assert result.returncode == 3
    assert "too small for the generated model" in result.stderr
    assert "8 MiB are needed and 1 MiB are free" in result.stderr
    assert controller.leftovers() == []


@pytest.fixture(scope="module")
def accepted(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Controller, dict[str, Any]]]:
    made = Controller(tmp_path_factory.mktemp("accepted"))
    try:
        result = made.run("up", "--json")
        assert result.returncode == 0, result.stderr
        yield made, json.loads(result.stdout)
        removed = made.run("down")
        assert removed.returncode == 0
        assert made.leftovers() == []
    finally:
        made.run("down")


def test_up_returns_once_a_request_has_crossed_from_prefill_to_decode(
    accepted: tuple[Controller, dict[str, Any]],
) -> None:
    _, report = accepted
    acceptance = report["acceptance"]
    assert report["changed"] is True
    assert acceptance["prompt_tokens"] > 300
    assert acceptance["answer_tokens"] == 48
    assert acceptance["pieces"] > 1
    assert acceptance["transport"].startswith("tcp")
    # Two layers, keys and values, two heads of 16 dimensions in bf16, for each token of the prompt.
    assert acceptance["transferred"] >= 2 * 2 * 2 * 16 * 2 * 300


def test_up_over_the_same_running_stack_starts_nothing_and_accepts_it_again(
    accepted: tuple[Controller, dict[str, Any]],
) -> None:
    controller, _ = accepted
    before = controller.containers()
    result = controller.run("up", "--json")
    report = json.loads(result.stdout)
    assert report["changed"] is False
    assert report["seconds"] < 60
    assert controller.containers() == before


def test_what_the_host_refuses_leaves_a_running_stack_alone(accepted: tuple[Controller, dict[str, Any]]) -> None:
    controller, _ = accepted
    before, text = controller.containers(), controller.spec.read_text()
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            controller.spec.write_text(text.replace(str(controller.port), str(server.getsockname()[1])))
            result = controller.run("up")
        assert result.returncode == 3
        assert f"(pid {os.getpid()})" in result.stderr
        controller.spec.write_text(text + "nonsense")
        assert controller.run("up").returncode == 2
    finally:
        controller.spec.write_text(text)
    assert controller.containers() == before
    assert controller.run("status").returncode == 0


def test_another_clone_is_told_whose_stack_runs(accepted: tuple[Controller, dict[str, Any]], tmp_path: Path) -> None:
    controller, _ = accepted
    code = "import sys; from pathlib import Path; import deploy.cli as c; c.ROOT = Path(sys.argv.pop(1)); c.main()"
    for file in ROOT.glob("compose*.yaml"):
        (tmp_path / file.name).symlink_to(file)
    own = {"COMPOSE_PROJECT_NAME": controller.project, "DEPLOY_SPEC": str(controller.spec)}
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "up", "--state", str(tmp_path / "state")],
        env=os.environ | own,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 3
    assert f"started from {ROOT}" in result.stderr


def test_status_logs_chat_and_config_work_on_the_running_stack(accepted: tuple[Controller, dict[str, Any]]) -> None:
    controller, report = accepted
    status = json.loads(controller.run("status", "--json").stdout)
    assert status["serving"] is True
    assert [role["role"] for role in status["roles"]] == ["prefill", "decode", "router"]
    assert {role["image"] for role in status["roles"]} == {report["image"]["tag"]}
    assert controller.run("status", "--url").stdout.strip() == report["acceptance"]["url"]
    logs = controller.run("logs", "router", "--tail", "5").stdout
    assert logs.startswith("router-1")
    assert "\x1b" not in logs
    answer = json.loads(controller.run("chat", "--json", "--max-tokens", "12", "Hello").stdout)
    assert answer["answer"].strip()
    assert answer["answer_tokens"] <= 12
    spoken = controller.run("chat", "--max-tokens", "12", "Hello")
    assert spoken.stdout.strip() == answer["answer"].strip()
    assert "tok/s" in spoken.stderr


def test_values_of_any_characters_reach_the_container_as_they_are(controller: Controller) -> None:
    value = """a "b" 'c' $HOME ${X:-y} \\ # = é"""
    controller.write_spec(variables=f"ROUTER_EXTRA_ARGUMENTS = {json.dumps(value)}")
    config = json.loads(controller.run("config", "--json").stdout)
    shown = config["compose"]["services"]["router"]["environment"]["EXTRA_ARGUMENTS"]
    # The cpu profile puts its own probe interval first.
    assert shown.replace("$$", "$").removeprefix("--health-check-interval-secs=15 ") == value
