"""The verbs that look at what runs, over a stack of which only its description is there."""

from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from deploy import cli, observe_verbs

ROLES = ("prefill", "decode", "router")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, **more: Any) -> tuple[int, str, str, BaseException | None]:
    """What a verb of a running stack ends with: exit code, both outputs, and the error that `deploy` would show."""
    stack = SimpleNamespace(expected=ROLES, profile="pd", roles=lambda: ROLES, **more)
    for module in (cli, observe_verbs):
        monkeypatch.setattr(module, "require_docker", lambda *_, **__: None)  # type: ignore[misc]
        monkeypatch.setattr(module, "running_stack", lambda *_: stack)  # type: ignore[misc]
    done = CliRunner().invoke(cli.app, arguments)
    return done.exit_code, done.stdout, done.stderr, done.exception


def test_metrics_of_a_stack_without_a_page_name_the_setting_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, error = run(monkeypatch, "metrics")
    assert getattr(error, "exit_code", None) == 2
    assert "set metrics.port" in str(error)
