"""A Docker engine where there is none: installed from the machine's own archive, started, and stopped again."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from deploy.host import probe
from deploy.host.apt import INDEX_FORMAT, MANUAL, Installation, installation, os_release
from deploy.host.docker_facts import DockerFacts, forbidden
from deploy.host.errors import HostError
from deploy.stack.state import State, write

SYSTEMD = Path("/run/systemd/system")
# Not on every user's PATH.
DAEMON_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")
OWN_CONFIGURATION = Path("/etc/docker/daemon.json")
START_PATIENCE_S = 60.0
STOP_PATIENCE_S = 60.0
Say = Callable[[str], None]


def ensure(state: State, *, may_install: bool, say: Say) -> bool:
    """Make sure that a Docker engine answers; one that answers already is left exactly as it is.

    Args:
        may_install: install packages if there is no engine.
        say: told about every change to the machine before it is made.

    Returns:
        True if the engine was started here, False if it answered already.

    Raises:
        HostError: no engine, and it may or can not be installed or started; or this user may not talk to it.
    """
    facts = probe.docker_facts()
    if facts.server:
        return False
    if facts.forbidden:
        raise forbidden(facts)
    if not _daemon() or not facts.client:
        _install(state, facts, may_install, say)
    if probe.docker_facts().server:
        # Packages start their service themselves where an init system runs.
        return True
    if SYSTEMD.is_dir():
        say("starting the Docker engine: systemctl start docker")
        _run(["systemctl", "start", "docker"], "the Docker engine does not start", "journalctl -u docker -n 50")
    else:
        _start_by_hand(state, say)
    return True


def installed_here(state: State) -> bool:
    """Was the engine installed or started from this repository, so that its build cache is nobody else's?"""
    return (state.engine / "installed").exists() or _own_process(state) is not None


def was_started_by_hand(state: State) -> bool:
    """Did an engine run from this repository that has ended since, for example with the machine?"""
    return _record(state).exists() and _own_process(state) is None


def stop(state: State, say: Say) -> bool:
    """Stop the engine if it was started by hand from this repository and runs no containers; True if it was stopped."""
    process = _own_process(state)
    if process is None:
        return False
    running = subprocess.run(["docker", "ps", "--quiet"], capture_output=True, text=True)
    if running.stdout.split():
        say(f"the Docker engine stays: {len(running.stdout.split())} other containers run in it")
        return False
    say(f"stopping the Docker engine that was started by hand (pid {process.pid})")
    process.terminate()
    deadline = time.monotonic() + STOP_PATIENCE_S
    while _own_process(state):
        if time.monotonic() > deadline:
            raise HostError("the Docker engine does not stop", f"pid {process.pid} still runs", "try again")
        time.sleep(0.2)
    _record(state).unlink(missing_ok=True)
    return True


def _daemon() -> str | None:
    return shutil.which("dockerd", path=":".join((os.environ.get("PATH", ""), *DAEMON_FOLDERS)))


def _install(state: State, facts: DockerFacts, may_install: bool, say: Say) -> None:
    if not may_install:
        raise HostError(
            "no Docker engine answers, and none may be installed (INSTALL_DOCKER=no)",
            facts.failure or "there is no `docker` command on the PATH",
            MANUAL,
        )
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise HostError("cannot install Docker", "that needs root and apt-get", MANUAL)
    _apt(["update"], say)
    release = os_release(Path("/etc/os-release").read_text())
    targets = _run(["apt-get", "indextargets", "--format", INDEX_FORMAT], "apt cannot list its archives", MANUAL)
    chosen = installation(release, targets)
    say(f"no Docker engine answers: installing {', '.join(chosen.packages)} (INSTALL_DOCKER=no refuses)")
    _write_sources(chosen, say)
    _apt(["install", "--yes", "--no-install-recommends", *chosen.packages], say)
    write(state.engine / "installed", " ".join(chosen.packages) + "\n")


def _write_sources(chosen: Installation, say: Say) -> None:
    for name, text in chosen.files.items():
        say(f"writing {name}")
        write(Path(name), text)
    if chosen.files:
        _apt(["update"], say)


def _apt(arguments: list[str], say: Say) -> None:
    say(f"apt-get {' '.join(arguments)}")
    _run(["apt-get", "-qq", *arguments], f"apt-get {arguments[0]} failed", MANUAL, DEBIAN_FRONTEND="noninteractive")


def _run(command: list[str], failed: str, fix: str, **environment: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if result.returncode:
        raise HostError(failed, "\n".join((result.stderr or result.stdout).strip().splitlines()[-5:]), fix)
    return result.stdout


def _start_by_hand(state: State, say: Say) -> None:
    daemon = _daemon()
    if not daemon or os.geteuid() != 0:
        raise HostError(
            "the Docker engine does not run", "starting it needs root", "sudo dockerd, or as root: make docker"
        )
    log = state.engine / "dockerd.log"
    command = [daemon]
    if not OWN_CONFIGURATION.exists():
        write(state.engine / "daemon.json", json.dumps({"features": {"cdi": True}}))
        command += ["--config-file", str((state.engine / "daemon.json").absolute())]
    say(f"starting the Docker engine by hand: {' '.join(command)} (log: {log})")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        # A session of its own: Ctrl-C on `make demo` must not take the engine down.
        # No standard input either: whoever waits for the caller's terminal to close would wait for ever.
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    write(_record(state), json.dumps({"pid": started.pid, "created": psutil.Process(started.pid).create_time()}))
    deadline = time.monotonic() + START_PATIENCE_S
    while not probe.docker_facts().server:
        if started.poll() is not None or time.monotonic() > deadline:
            started.terminate()
            _record(state).unlink(missing_ok=True)
            last = log.read_text(errors="replace").splitlines()[-1:]
            raise HostError("the Docker engine does not start", "".join(last), f"less {log}")
        time.sleep(0.3)


def _record(state: State) -> Path:
    return state.engine / "process.json"


def _own_process(state: State) -> psutil.Process | None:
    """The engine process that was started from here, told from a later process with the same id by its start time."""
    try:
        record: Any = json.loads(_record(state).read_text())
        process = psutil.Process(int(record["pid"]))
        # One that has ended and that no init process has collected runs no more.
        ended = process.status() == psutil.STATUS_ZOMBIE
        return process if not ended and abs(process.create_time() - float(record["created"])) < 1 else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, psutil.Error):
        return None
