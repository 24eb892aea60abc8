"""Starting and stopping by hand, with a stand-in for dockerd: a real one is started by `make test` itself."""

import json
import os
from pathlib import Path

import psutil
import pytest

from deploy.host import probe
from deploy.host.docker_facts import DockerFacts
from deploy.host.errors import HostError
from deploy.stack import docker_engine
from deploy.stack.state import State

ANSWERS = DockerFacts("26.1", "26.1", compose="2.26.1")
SILENT = DockerFacts("26.1", failure="Cannot connect")


class Machine:
    """A machine without init system whose `dockerd` sleeps and answers as soon as it runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = State(folder / "state")
        self.said: list[str] = []
        self.answers = True
        self.daemon = folder / "dockerd"
        self.write("exec sleep 600")
        (folder / "docker").write_text("#!/bin/sh\nexit 0\n")
        (folder / "docker").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr(docker_engine, "SYSTEMD", folder / "no-systemd")
        # Never the real daemon of this machine.
        monkeypatch.setattr(docker_engine, "DAEMON_FOLDERS", ())
        monkeypatch.setattr(docker_engine, "OWN_CONFIGURATION", folder / "daemon.json")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        monkeypatch.setattr(probe, "docker_facts", self.facts)

    def write(self, command: str) -> None:
        self.daemon.write_text(f"#!/bin/sh\n{command}\n")
        self.daemon.chmod(0o755)

    def facts(self) -> DockerFacts:
        return ANSWERS if self.answers and docker_engine.installed_here(self.state) else SILENT

    def ensure(self) -> bool:
        return docker_engine.ensure(self.state, may_install=False, say=self.said.append)

    def stop(self) -> bool:
        return docker_engine.stop(self.state, self.said.append)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_an_engine_is_started_with_cdi_once_and_stopped_again(machine: Machine) -> None:
    assert machine.ensure() is True
    assert machine.ensure() is False
    configuration = json.loads((machine.state.engine / "daemon.json").read_text())
    assert configuration == {"features": {"cdi": True}}
    pid = json.loads((machine.state.engine / "process.json").read_text())["pid"]
    assert os.getsid(pid) == pid, "Ctrl-C on the command that started it would end it"
    assert machine.stop() is True
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert machine.stop() is False


def test_for_a_user_who_may_not_talk_to_the_engine_no_second_one_is_started(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = DockerFacts("28.2.2", failure="permission denied while trying to connect to the Docker daemon socket")
    monkeypatch.setattr(probe, "docker_facts", lambda: refused)
    with pytest.raises(HostError, match="may not talk") as caught:
        machine.ensure()
    assert "usermod" in (caught.value.fix or "")
    assert not machine.said and not machine.state.engine.exists()


def test_a_configuration_that_is_there_is_left_to_the_engine(machine: Machine) -> None:
    docker_engine.OWN_CONFIGURATION.write_text("{}")
    machine.ensure()
    assert not (machine.state.engine / "daemon.json").exists()
    assert docker_engine.OWN_CONFIGURATION.read_text() == "{}"
    machine.stop()


def test_an_engine_that_does_not_start_says_its_last_words(machine: Machine) -> None:
    machine.answers = False
    machine.write("echo no space left on device; exit 1")
    with pytest.raises(HostError) as caught:
        machine.ensure()
    assert "no space left on device" in caught.value.why
    assert machine.stop() is False


def test_a_process_with_the_id_of_an_engine_long_gone_is_not_stopped(machine: Machine) -> None:
    machine.state.engine.mkdir(parents=True)
    record = {"pid": os.getpid(), "created": psutil.Process().create_time() - 1000}
    (machine.state.engine / "process.json").write_text(json.dumps(record))
    assert machine.stop() is False


def test_where_nothing_may_be_installed_nothing_is(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.daemon.unlink()
    monkeypatch.setenv("PATH", str(machine.daemon.parent))
    with pytest.raises(HostError, match="none may be installed"):
        machine.ensure()
    assert machine.said == []
