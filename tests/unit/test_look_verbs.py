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


REQUEST = '{"event": "request.received", "rid": "order-66", "obj": {"text": "what is HEALTH_CHECK_1?"}}'
LOG = {
    "decode": (REQUEST, '{"event": "request.received", "rid": "HEALTH_CHECK_1"}'),
    "prefill": ('{"event":"request.finished","rid":"HEALTH_CHECK_2"}', "\x1b[32mloaded\x1b[0m"),
}


@pytest.mark.parametrize("probes", [False, True])
def test_logs_leave_out_the_health_checks_own_lines_and_say_how_many(
    monkeypatch: pytest.MonkeyPatch, probes: bool
) -> None:
    def logs(names: list[str], **_: object) -> list[tuple[str, bytes]]:
        assert names == ["decode", "prefill"]
        return [("stdout", f"\x1b[2K{name}-1  | {line}\n".encode()) for name in names for line in LOG[name]]

    docker = SimpleNamespace(compose=SimpleNamespace(logs=logs))
    code, shown, said, _ = run(monkeypatch, "logs", "decode", "prefill", *["--probes"] * probes, docker=docker)
    kept = [f"decode-1  | {REQUEST}", "prefill-1  | loaded"]
    if probes:
        kept[1:1] = [f"decode-1  | {LOG['decode'][1]}", f"prefill-1  | {LOG['prefill'][0]}"]
    assert (code, shown.splitlines()) == (0, kept)
    assert said == ("" if probes else "without 2 lines of health checks: --probes shows them\n")
