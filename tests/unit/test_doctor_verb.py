"""What `deploy doctor` prints, and how it ends."""

import json
import subprocess
import time
from pathlib import Path

import lookalike
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lookalike import EIGHT_GPUS, host
from typer.testing import CliRunner

from deploy.doctor.finding import Finding, Needs, Severity
from deploy.doctor.render import to_script
from deploy.doctor.run import run_checks
from deploy.host.probe_host import probe
from deploy.host.report import save
from deploy.host_verbs import app


@pytest.fixture
def broken(tmp_path: Path) -> str:
    path = tmp_path / "host.json"
    save(probe(lookalike.gpu_lost()), path)
    return str(path)


def test_findings_name_cause_cure_and_link_without_colours_in_a_pipe(broken: str) -> None:
    result = CliRunner().invoke(app, ["doctor", "--spec", "none.toml", "--host-report", broken])
    assert result.exit_code == 3
    for words in ("0000:a4:00.0", "why", "$ sudo systemctl reboot", "open-gpu-kernel-modules/issues/1151", "2 errors"):
        assert words in result.output
    assert "\x1b" not in result.output


def test_json_is_whole_and_typed(broken: str) -> None:
    result = CliRunner().invoke(app, ["doctor", "--spec", "none.toml", "--host-report", broken, "--json"])
    document = json.loads(result.output)
    assert document["schema_version"] == 1
    assert [finding["id"] for finding in document["findings"]] == ["gpu.lost", "gpu.xid"]
    assert {"severity", "seen", "why", "fix", "commands", "look", "link", "group"} < set(document["findings"][0])


def test_a_healthy_host_ends_with_zero(tmp_path: Path) -> None:
    save(probe(host(EIGHT_GPUS)), tmp_path / "host.json")
    result = CliRunner().invoke(app, ["doctor", "--spec", "none.toml", "--host-report", str(tmp_path / "host.json")])
    assert (result.exit_code, "nothing found" in result.output) == (0, True)


def test_a_file_that_is_no_report_ends_with_two_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("hello")
    result = CliRunner().invoke(app, ["doctor", "--spec", "none.toml", "--host-report", str(tmp_path / "x")])
    assert result.exit_code == 2 and "--host-report" in result.output and "Traceback" not in result.output


def test_this_machine_is_checked_in_three_seconds() -> None:
    started = time.monotonic()
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert time.monotonic() - started < 3
    assert json.loads(result.output)["checks"] > 30


def test_the_fix_script_is_valid_shell_and_leaves_the_reboot_to_the_reader(broken: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--spec", "none.toml", "--host-report", broken, "--fix-script"])
    script = tmp_path / "fix.sh"
    script.write_text(result.output)
    assert subprocess.run(["sh", "-n", str(script)]).returncode == 0
    assert "\n# sudo systemctl reboot\n" in result.output and "\nsudo systemctl reboot" not in result.output


NO_GPU = probe(lookalike.no_gpu())


@given(st.text(), st.text())
def test_nothing_from_the_host_leaves_its_comment_in_the_fix_script(seen: str, fix: str) -> None:
    finding = Finding(id="a.b", group="g", severity=Severity.ERROR, seen=seen, why="w", fix=fix, commands=("true",))
    script = to_script(NO_GPU, [finding])
    assert [line for line in script.splitlines() if line and not line.startswith("#")] == ["set -eu", "true"]


def test_commands_of_every_look_alike_are_valid_shell() -> None:
    for machine in [*(make() for make in lookalike.SPECIAL.values()), *(host(layout) for layout in lookalike.LAYOUTS)]:
        for finding in run_checks(probe(machine), Needs()):
            for command in (*finding.commands, finding.look):
                assert subprocess.run(["sh", "-nc", command]).returncode == 0, command


def test_tools_that_hang_do_not_hang_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for tools of a host whose driver, Docker and disks do not answer."""
    for tool in ("nvidia-smi", "lspci", "docker", "dmesg", "journalctl", "df", "lsblk", "timedatectl", "nvidia-ctk"):
        (tmp_path / tool).write_text("#!/bin/sh\nexec sleep 60\n")
        (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    started = time.monotonic()
    result = CliRunner().invoke(app, ["doctor", "--json", "--spec", "none.toml"])
    assert time.monotonic() - started < 3
    document = json.loads(result.output)
    assert {"GPUs", "filesystems", "kernel log"} <= {unseen["what"] for unseen in document["unseen"]}
    assert "docker.answers" in {finding["id"] for finding in document["findings"]}
