"""A generation's stack comes from its record alone, whatever containers there are."""

from pathlib import Path
from typing import Any

import pytest

from deploy.stack import change, generations
from deploy.stack.generations import COMPOSE, ENVIRONMENT, Candidate
from deploy.stack.state import State


class NoDocker:
    """Stands in for the Docker engine: it has every image and no container."""

    def __init__(self) -> None:
        self.image = self

    def exists(self, image: str) -> bool:
        del image
        return True

    def list(self, **filters: Any) -> list[Any]:
        del filters
        return []

    def tag(self, image: str, name: str) -> None:
        del image, name


@pytest.mark.parametrize("front", [False, True])
def test_it_has_the_files_that_it_was_accepted_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, front: bool
) -> None:
    monkeypatch.setattr(change, "DockerClient", NoDocker)
    state = State(tmp_path)
    names = ("compose.yaml", "compose.replicas.yaml", "compose.replicas-tp4.yaml", "compose.front.yaml")
    files = {ENVIRONMENT: b"", **{f"{COMPOSE}/{name}": b"" for name in (*names, "compose.metrics.yaml")}}
    candidate = Candidate("replicas", "isolated", 4, "i:1", "sha256:1", files, front=front, metrics_page=front)
    generations.write_candidate(state, candidate)
    accepted = generations.accept_candidate(state, candidate, "up", {})
    stack = change.generation_stack(tmp_path / "repository", state, accepted)
    wanted = ["compose.replicas.yaml", "compose.replicas-tp4.yaml"]
    wanted += ["compose.front.yaml", "compose.metrics.yaml"] if front else []
    assert [file.name for file in stack.files] == wanted
    assert {file.parent for file in stack.files} == {generations.folder(state, 1) / COMPOSE}
