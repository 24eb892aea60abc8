"""Which containers have failed to start, and which only wait for others."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from deploy.stack import healthy
from deploy.stack.compose import RoleState
from deploy.stack.healthy import RoleFailed, wait_healthy
from deploy.stack.state import State

ENGINE = RoleState("prefill", "c1", "n1", "i", "running", "starting", 0, False, 0, None, 1, frozenset(), "/", ())
ROUTER = replace(ENGINE, role="router", container="c2", health="unhealthy")


class FakeStack:
    """Looks one after the other at what the containers are; the last one stays."""

    def __init__(self, *looks: tuple[RoleState, ...]) -> None:
        self.looks = list(looks)

    def roles(self) -> tuple[RoleState, ...]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def log(self, container: str, since: object = None) -> str:
        return ""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healthy, "LOOK_S", 0.0)


def wait(folder: Path, *looks: tuple[RoleState, ...], roles: tuple[str, ...] = ("prefill", "router")) -> None:
    wait_healthy(cast("Any", FakeStack(*looks)), roles, State(folder), lambda event: None)


def test_a_router_may_be_unhealthy_while_its_engine_starts(tmp_path: Path) -> None:
    well = replace(ENGINE, health="healthy")
    wait(tmp_path, (ENGINE, ROUTER), (well, ROUTER), (well, replace(ROUTER, health="healthy")))


def test_an_unhealthy_engine_has_failed_at_once(tmp_path: Path) -> None:
    with pytest.raises(RoleFailed, match="prefill failed to start: its health check fails"):
        wait(tmp_path, (replace(ENGINE, health="unhealthy"), ROUTER))


@pytest.mark.parametrize("health", ["healthy", "unhealthy"])
def test_a_router_that_stays_unhealthy_beside_an_engine_that_has_started_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, health: str
) -> None:
    monkeypatch.setattr(healthy, "ROUTER_S", 0.1)
    with pytest.raises(RoleFailed, match="router failed to start"):
        wait(tmp_path, (ENGINE, ROUTER), (replace(ENGINE, health=health), ROUTER), roles=("router",))
