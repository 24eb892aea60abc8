"""What a press of Tab offers."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from program import PROGRAM

from deploy.stack.generations import Candidate, accept_candidate, folder
from deploy.stack.state import State, write


def offered(line: str, **environment: str) -> list[str]:
    """The words that bash gets for a line with the cursor at its end."""
    asked = {"_DEPLOY_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        for name, value in (asked | environment).items():
            patch.setenv(name, value)
        PROGRAM.main([], prog_name="deploy")
    return out.getvalue().split()


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State(tmp_path / "state")


def run_stack(state: State, *services: str) -> None:
    """Write down what an accepted stack of these services leaves in the state folder."""
    rendered = json.dumps({"services": {name: {} for name in services}}).encode()
    candidate = Candidate("replicas", "isolated", 2, "image:1", "sha256:1", {"compose.json": rendered})
    accept_candidate(state, candidate, "up", {})


@pytest.mark.parametrize("verb", ["restart", "logs"])
def test_roles_are_those_of_the_stack_that_runs(verb: str, state: State) -> None:
    run_stack(state, "engine", "engine-2", "router", "front")
    assert offered(f"deploy {verb} ", DEPLOY_STATE=str(state.folder)) == ["engine", "engine-2", "router", "front"]
    assert offered(f"deploy {verb} --state {state.folder} en") == ["engine", "engine-2"]


@pytest.mark.parametrize("verb", ["drain", "profile"])
def test_only_engines_are_offered_where_only_engines_will_do(verb: str, state: State) -> None:
    run_stack(state, "engine", "router", "exporter")
    assert offered(f"deploy {verb} ", DEPLOY_STATE=str(state.folder)) == ["engine"]


def test_roles_are_those_of_the_stack_that_is_being_started(state: State) -> None:
    run_stack(state, "engine", "router")
    write(state.candidate / "compose.json", json.dumps({"services": {"prefill": {}}}))
    assert offered("deploy restart ", DEPLOY_STATE=str(state.folder)) == ["prefill"]


@pytest.mark.parametrize(
    ("spec", "roles"),
    [
        ('profile = "pd"', ["prefill", "decode", "router"]),
        ('profile = "cpu"\n[metrics]\nport = 1', ["prefill", "decode", "router", "exporter"]),
        ('profile = "pd', ["prefill", "decode", "engine", "engine-2", "engine-3", "engine-4"]),
    ],
)
def test_before_a_start_roles_are_those_of_the_spec(spec: str, roles: list[str], state: State, tmp_path: Path) -> None:
    (tmp_path / "spec.toml").write_text(spec)
    where = {"DEPLOY_STATE": str(state.folder), "DEPLOY_SPEC": str(tmp_path / "spec.toml")}
    assert offered("deploy restart ", **where) == roles


def test_generations_are_offered_by_number_the_damaged_too(state: State) -> None:
    run_stack(state, "engine")
    run_stack(state, "engine", "router")
    (folder(state, 1) / "generation.json").write_text("{")
    for verb in ("rollback", "generations diff 1"):
        assert offered(f"deploy {verb} ", DEPLOY_STATE=str(state.folder)) == ["2", "1"]


@pytest.mark.parametrize("verb", ["up", "config", "plan", "gap", "doctor", "tune"])
def test_profiles_are_offered_by_name(verb: str) -> None:
    assert offered(f"deploy {verb} --profile ") == ["pd", "replicas", "cpu"]


@pytest.mark.parametrize("line", ["deploy restart ", "deploy rollback ", "deploy drain x"])
def test_a_state_folder_that_is_none_breaks_nothing(line: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below", "missing"):
        offered(line, DEPLOY_STATE=str(tmp_path / name), DEPLOY_SPEC=str(tmp_path))


@pytest.mark.parametrize(
    "asked",
    [
        {"_DEPLOY_COMPLETE": "complete_bash", "COMP_WORDS": "deploy restart ", "COMP_CWORD": "2"},
        {"_DEPLOY_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "deploy restart "},
        {
            "_DEPLOY_COMPLETE": "complete_fish",
            "_TYPER_COMPLETE_ARGS": "deploy restart ",
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
    ],
    ids=lambda asked: asked["_DEPLOY_COMPLETE"],
)
def test_each_shell_gets_a_verbs_roles_without_the_other_verbs_being_loaded(
    asked: dict[str, str], state: State, tmp_path: Path
) -> None:
    code = (
        "import sys, atexit\nfrom deploy import entry\n"
        "atexit.register(lambda: print('deploy.cli' in sys.modules))\nsys.argv = ['deploy']\nentry.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/nowhere", "LANG": "C.UTF-8", "DEPLOY_STATE": str(state.folder), **asked},
    )
    assert "decode" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] == "False"
