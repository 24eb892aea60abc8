"""What `deploy rollback` says beside going back; tests/unit/test_stack_change.py has the way there."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy import generation_verbs
from deploy.cli import app
from deploy.stack import change, generations
from deploy.stack.change import RolledBack
from deploy.stack.generations import LOCK, SPEC, Candidate
from deploy.stack.state import State

NO_CURRENT = "there was no current generation: this is the newest"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> State:
    """Two generations, the second the current one and as the checkout has it; no containers."""

    def rollback(root: Path, state: State, number: int | None, report: object) -> RolledBack:
        wanted = generations.previous(state) if number is None else number
        assert wanted
        generations.switch(state, wanted)
        accepted: Any = SimpleNamespace(url="http://127.0.0.1:30000")
        return RolledBack(generations.read(state, wanted), accepted, True, 1.0)

    monkeypatch.setattr(change, "rollback", rollback)
    monkeypatch.setattr(generation_verbs, "require_docker", lambda *_, **__: None)  # type: ignore[misc]
    monkeypatch.setattr(generation_verbs, "ROOT", tmp_path)
    made = State(tmp_path / "state")
    for number in (b"1", b"2"):
        files = {SPEC: b"# spec " + number, LOCK: b"# lock " + number}
        generations.accept_candidate(made, Candidate("cpu", "isolated", 0, "image:1", "sha256:1", files), "up", {})
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
    return made


def rollback(state: State, *arguments: str) -> list[str]:
    """The sentences on standard error."""
    spec = str(state.folder.parent / SPEC)
    done = CliRunner().invoke(app, ["rollback", *arguments, "--spec", spec, "--state", str(state.folder)])
    assert done.exit_code == 0, done.output
    assert "serves on http://127.0.0.1:30000" in done.stdout
    return done.stderr.splitlines()


def test_without_a_current_generation_it_says_that_it_took_the_newest(state: State) -> None:
    assert NO_CURRENT not in rollback(state)
    generations.switch(state, None)
    assert NO_CURRENT not in rollback(state, "2")
    generations.switch(state, None)
    assert rollback(state) == [NO_CURRENT]


@pytest.mark.parametrize("changed", [[], [SPEC], [LOCK], [SPEC, LOCK]])
def test_each_file_that_is_not_that_generations_is_named_with_the_command_that_compares(
    state: State, changed: list[str]
) -> None:
    here, kept = state.folder.parent, generations.folder(state, 1)
    for name in {SPEC, LOCK} - set(changed):
        (here / name).write_bytes((kept / name).read_bytes())
    said = [
        f"{name} differs, and the next `deploy up` goes by it: diff {kept / name} {here / name}" for name in changed
    ]
    assert rollback(state, "1") == said
