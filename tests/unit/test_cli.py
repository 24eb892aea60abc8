"""The command line as a person meets it: a process with arguments, output and an exit code."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import typer.main
from typer.testing import CliRunner

from deploy import cli, host_verbs
from deploy.cli import RoleName, app
from deploy.command_line import Panel
from deploy.spec.profiles import ALL_ROLES, ENGINES
from deploy.stack.generations import Candidate, accept_candidate, switch
from deploy.stack.state import State

ROOT = Path(__file__).parents[2]
DEPLOY = Path(sys.executable).parent / "deploy"


class Machine:
    """A look-alike host: its own PATH with a stand-in for Docker's client, its own spec and state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.spec = folder / "deploy.toml"
        self.spec.write_text((ROOT / "deploy.toml").read_text())
        self.cdi = folder / "cdi"
        self.cdi.mkdir()

    def docker(self, version: str = "26.1.5", compose: str = "2.26.1") -> None:
        """A stand-in that answers `info` in the shape of a real client and has no containers."""
        plugins = [{"Name": "compose", "Version": compose}, {"Name": "buildx", "Version": "0.13.1"}]
        info = {
            "ServerVersion": version,
            "DockerRootDir": str(self.folder),
            "CDISpecDirs": [str(self.cdi)],
            "ClientInfo": {"Version": version, "Plugins": plugins},
        }
        (self.folder / "info.json").write_text(json.dumps(info) + "\n")
        script = f'#!/bin/sh\n[ "$1" = info ] && exec /bin/cat {self.folder}/info.json\nexit 0\n'
        (self.programs / "docker").write_text(script)
        (self.programs / "docker").chmod(0o755)

    def gpus(self, count: int) -> None:
        devices = [{"name": str(index)} for index in range(count)]
        (self.cdi / "nvidia.json").write_text(json.dumps({"kind": "nvidia.com/gpu", "devices": devices}))

    def set(self, old: str, new: str) -> None:
        text = self.spec.read_text()
        assert old in text
        self.spec.write_text(text.replace(old, new, 1))

    def run(self, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
        settings = {
            "PATH": str(self.programs),
            "DEPLOY_SPEC": str(self.spec),
            "DEPLOY_STATE": str(self.folder / "state"),
        }
        result = subprocess.run(
            [str(DEPLOY), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            env={"HOME": str(self.folder), "LANG": "C.UTF-8"} | settings | environment,
        )
        assert "Traceback" not in result.stderr, result.stderr
        return result


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def refused(result: "subprocess.CompletedProcess[str]", code: int, *words: str) -> None:
    assert result.returncode == code, result.stderr
    for word in words:
        assert word in result.stderr
    assert "fix:" in result.stderr


def test_the_words_for_roles_and_profiles_are_those_of_the_profiles() -> None:
    assert tuple(role.value for role in RoleName) == ALL_ROLES
    for names in (cli.ProfileName, host_verbs.ProfileName):
        assert {name.value for name in names} == set(ENGINES)


def test_the_overview_lists_each_verb_once_under_what_a_person_comes_to_do() -> None:
    program: Any = typer.main.get_command(app)
    overview = CliRunner().invoke(app, ["--help"]).output
    assert "Exit codes:" in overview
    listed = re.findall(r"^  ([a-z]+)  ", overview.partition("Exit codes:")[0], re.MULTILINE)
    assert sorted(listed) == sorted(program.commands)
    headings = re.findall(r"^(\w.*):$", overview, re.MULTILINE)
    assert headings == ["Options", *Panel]


@pytest.mark.slow
def test_an_unknown_verb_or_option_is_a_usage_error(machine: Machine) -> None:
    assert machine.run("nope").returncode == 2
    assert machine.run("up", "--nope").returncode == 2
    assert machine.run("up", "--profile", "gpu").returncode == 2


@pytest.mark.slow
def test_without_docker_every_verb_says_how_to_get_it(machine: Machine) -> None:
    for verb in (["up", "--profile", "cpu"], ["status"], ["chat", "hi"]):
        refused(machine.run(*verb), 3, "Docker is not installed", "make docker")


@pytest.mark.slow
def test_a_refused_installation_changes_nothing(machine: Machine) -> None:
    result = machine.run("docker", "start", INSTALL_DOCKER="no")
    refused(result, 3, "none may be installed (INSTALL_DOCKER=no)")
    assert not (machine.folder / "state" / "docker").exists()


def test_an_engine_too_old_for_cdi_is_refused(machine: Machine) -> None:
    machine.docker("20.10.24")
    refused(machine.run("up"), 3, "Docker engine 20.10.24 is too old", "25.0 or newer")


def test_an_unknown_gpu_is_named_with_those_that_exist(machine: Machine) -> None:
    machine.docker()
    machine.gpus(6)
    refused(machine.run("up"), 3, "no nvidia.com/gpu=6, nvidia.com/gpu=7", "name nvidia.com/gpu=0, nvidia.com/gpu=1")


def test_a_port_in_use_names_its_holder(machine: Machine) -> None:
    machine.docker()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        machine.set("port = 30000", f"port = {port}")
        refused(machine.run("up", "--profile", "cpu"), 3, f"port {port}", f"(pid {os.getpid()})")


def test_a_missing_model_is_found_before_anything_is_built(machine: Machine) -> None:
    machine.docker()
    machine.gpus(8)
    machine.set('path = "model"', 'path = "/no/such/model"')
    with socket.create_server(("127.0.0.1", 0)) as server:
        machine.set("port = 30000", f"port = {server.getsockname()[1]}")
    result = machine.run("up")
    refused(result, 3, "the model folder /no/such/model does not exist")
    assert "Engine image" not in result.stderr


def test_mistakes_in_the_spec_are_shown_with_line_column_and_the_line_itself(machine: Machine) -> None:
    machine.set("port = 30000", "prot = 30000")
    machine.set('transport = "isolated"', 'transport = "p3p"')
    result = machine.run("up")
    refused(result, 2, "unknown key", "did you mean port?", "  | prot = 30000", "allowed: 'isolated' or 'p2p'")
    line = machine.spec.read_text().splitlines().index("prot = 30000") + 1
    assert f"deploy.toml:{line}:1: router.prot" in result.stderr


def test_a_variable_that_no_compose_file_has_is_refused(machine: Machine) -> None:
    machine.docker()
    machine.set("\n[variables]", '\n[variables]\nNCCL_DEBG = "INFO"\nPORT = 3')
    result = machine.run("config")
    refused(result, 2, "variables.NCCL_DEBG: unknown variable", "did you mean NCCL_DEBUG?", "variables.PORT: set twice")


def test_a_missing_spec_is_refused(machine: Machine) -> None:
    machine.spec.unlink()
    assert machine.run("up").returncode == 2


@pytest.mark.slow
def test_there_are_no_colours_in_a_pipe(machine: Machine) -> None:
    for result in (machine.run("up", "--profile", "cpu"), machine.run("--help")):
        assert "\x1b" not in result.stdout + result.stderr


@pytest.mark.slow
def test_no_line_is_padded_in_a_pipe(machine: Machine) -> None:
    lines = machine.run("doctor").stdout.splitlines()
    assert len(lines) > 3 and lines == [line.rstrip() for line in lines]


def test_an_empty_question_is_a_usage_error(machine: Machine) -> None:
    machine.docker()
    assert machine.run("chat").returncode == 2


def test_nothing_runs_and_status_says_so(machine: Machine) -> None:
    machine.docker()
    result = machine.run("status", "--json")
    assert result.returncode == 4
    assert json.loads(result.stdout)["roles"] == []


def test_while_up_is_at_work_status_and_chat_say_that_nothing_runs_yet(machine: Machine) -> None:
    machine.docker()
    with State(machine.folder / "state").lock("up"):
        status, chat = machine.run("status"), machine.run("chat", "hi")
    assert (status.returncode, chat.returncode) == (4, 4)
    for said in (status.stdout, chat.stderr):
        assert "nothing runs yet" in said
        assert f"`deploy up` (pid {os.getpid()}" in said
        assert "fix: deploy status --watch, and wait" in said


@pytest.mark.parametrize(
    ("spec", "accepted", "driver"),
    [("pd", None, True), ("cpu", None, False), ("pd", "cpu", False), ("cpu", "pd", True), ("cpu", "damaged", False)],
)
def test_where_nothing_runs_verify_asks_for_what_should_and_for_a_driver_only_if_that_needs_gpus(
    spec: str, accepted: str | None, driver: bool, machine: Machine
) -> None:
    machine.docker()
    machine.set('profile = "pd"', f'profile = "{spec}"')
    if accepted:
        state = State(machine.folder / "state")
        profile = cast(Any, "pd" if accepted == "damaged" else accepted)
        accept_candidate(state, Candidate(profile, "isolated", 0, "image:1", "sha256:1", {}), "up", {})
        switch(state, None)
        if accepted == "damaged":
            (state.generations / "1/generation.json").write_text("{")
    result = machine.run("verify")
    assert result.returncode == 1
    assert "0 model files" in result.stderr
    lines = result.stdout.splitlines()
    for role in ("prefill", "decode", "router"):
        assert f"{role}: container: expected running, found none" in lines
    assert any(line.startswith("host: NVIDIA driver") for line in lines) == driver


@pytest.mark.slow
def test_completion_knows_the_verbs(machine: Machine) -> None:
    result = machine.run(_DEPLOY_COMPLETE="complete_bash", COMP_WORDS="deploy sta", COMP_CWORD="1")
    assert result.stdout.split() == ["status"]


@pytest.mark.parametrize("option", [["--mirror", "http://HOST/debian"], []])
@pytest.mark.parametrize("verb", ["lock", "build", "up"])
def test_the_debian_mirror_comes_from_the_option_or_from_its_variable(
    verb: str, option: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Reached(Exception):
        pass

    def reach(*arguments: Any, **named: Any) -> None:
        raise Reached(str(arguments) + str(named))

    for name in ("deploy.lock.resolve.update_lock", "deploy.cli.ensure_image", "deploy.cli.up"):
        monkeypatch.setattr(name, reach)
    monkeypatch.setattr("deploy.cli.require_docker", lambda *_, **__: None)  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    environment = {} if option else {"DEBIAN_MIRROR": "http://HOST/debian"}
    result = CliRunner().invoke(app, [verb, *option], env=environment)
    assert isinstance(result.exception, Reached)
    assert "http://HOST/debian" in str(result.exception)


def test_the_running_stacks_key_goes_to_no_other_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from deploy import cli
    from deploy.stack.client import Endpoint
    from loadtest import bench as benchmark

    sent: list[tuple[str, Path | None, Path | None]] = []

    def write_plan(settings: Any, _: Path) -> None:
        sent.append((settings.url, settings.api_key_file, settings.ca_file))

    key, certificate = tmp_path / "key", tmp_path / "certificate"
    monkeypatch.setattr(cli, "_served", lambda: Endpoint("https://here:1", "model", key, certificate))
    monkeypatch.setattr(benchmark, "write_plan", write_plan)
    for options in ([], ["--url", "http://elsewhere:2"]):
        assert CliRunner().invoke(cli.app, ["bench", "--write-plan", str(tmp_path / "plan"), *options]).exit_code == 0
    assert sent == [("https://here:1", key, certificate), ("http://elsewhere:2", None, None)]
