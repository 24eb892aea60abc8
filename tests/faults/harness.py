"""What the fault tests share: a controller with a stack of its own, load by Locust, and the table of what was seen."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
RESULTS = ROOT / ".cache" / "faults.json"
PROJECT_LABEL = "com.docker.compose.project"
# A machine that is busy with other work starts an engine more slowly than the quiet one of the promise: what must hold
# is multiplied by this. How long a test waits at most is not a promise.
SLOW = float(os.environ.get("FAULTS_SLOWNESS", "1"))
PATIENCE_S = 1200
PROMPTS = tuple(f"question {number}, of which the answer is known" for number in range(12))


def docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.fail(f"docker {' '.join(arguments[:3])}: {done.stdout}{done.stderr}")
    return done.stdout


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Controller:
    """`deploy` with a compose project, a spec, a port and a state folder of its own.

    Args:
        program: `deploy` itself, or the one with stand-ins for the engines.
        spec: text of its deploy.toml; `{port}` is filled in.
    """

    def __init__(self, folder: Path, program: list[str], spec: str, variables: Mapping[str, str]) -> None:
        self.project = f"dsv4-test-{uuid.uuid4().hex[:8]}"
        self.state, self.spec, self.port = folder / "state", folder / "deploy.toml", free_port()
        self.program, self.variables, self.text = program, dict(variables), spec
        self.spec.write_text(spec.replace("{port}", str(self.port)))
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        own = {"COMPOSE_PROJECT_NAME": self.project, "DEPLOY_SPEC": str(self.spec), "DEPLOY_STATE": str(self.state)}
        return subprocess.Popen(
            [*self.program, *arguments],
            env=os.environ | own | self.variables | variables,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments, **variables)
        try:
            output, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        assert "Traceback (most recent call last)" not in errors, errors
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def must(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, f"deploy {' '.join(arguments)}: {done.stderr}"
        return done

    def container(self, service: str) -> str:
        return f"{self.project}-{service}-1"

    def pid(self, service: str) -> int:
        return int(docker("inspect", "--format", "{{.State.Pid}}", self.container(service)))

    def child(self, service: str, title: str) -> int:
        """Host process id of a process inside a container, by its title; its parent's may hold the same words."""
        lines = docker("top", self.container(service), "-eo", "pid,args").splitlines()
        return int([line.split()[0] for line in lines if title in line][-1])

    def images(self) -> dict[str, str]:
        """Image of each container that runs."""
        label = f"label={PROJECT_LABEL}={self.project}"
        lines = docker("ps", "--filter", label, "--format", "{{.Names}} {{.Image}}").splitlines()
        return dict(line.split() for line in lines)

    def leftovers(self) -> list[str]:
        label = ("--filter", f"label={PROJECT_LABEL}={self.project}")
        kinds = (("ps", "--all"), ("network", "ls"), ("volume", "ls"))
        return [f"{kind[0]} {name}" for kind in kinds for name in docker(*kind, "--quiet", *label).split()]


@contextmanager
def load(
    url: str,
    answers: Mapping[str, str],
    folder: Path,
    *,
    users: int = 8,
    enter: Sequence[str] = (),
    **variables: str,
) -> Iterator[dict[str, Any]]:
    """Keep a stack under load while the body runs; the dict is filled afterwards with what Locust counted.

    Args:
        enter: what stands before the command line, to run it elsewhere.
    """
    file = folder / f"answers-{uuid.uuid4().hex[:6]}.json"
    file.write_text(json.dumps(dict(answers)))
    command = [*enter, sys.executable, "-m", "locust", "-f", str(HERE / "load.py"), "--headless", "--host", url]
    # A file: Locust stands still once a pipe that nobody reads is full.
    complaints = file.with_suffix(".log").open("w+")
    process = subprocess.Popen(
        [*command, "-u", str(users), "-r", str(users), "--json", "--stop-timeout", "60", "--loglevel", "WARNING"],
        env=os.environ | {"EXPECTED_ANSWERS": str(file), **variables},
        stdout=subprocess.PIPE,
        stderr=complaints,
        text=True,
        cwd=ROOT,
    )
    found: dict[str, Any] = {}
    try:
        time.sleep(5)
        yield found
        time.sleep(3)
    finally:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=120)
        complaints.seek(0)
        errors = complaints.read()
        complaints.close()
        rows: list[dict[str, Any]] = json.loads(output[output.index("[") :]) if "[" in output else []
        found |= {row["name"]: row for row in rows}
        found["requests"] = sum(row["num_requests"] for row in rows)
        found["failures"] = sum(row["num_failures"] for row in rows)
        found["slowest_s"] = max((row["max_response_time"] for row in rows), default=0) / 1000
        found["errors"] = errors[-3000:]


@contextmanager
def knocking(url: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> Iterator[list[tuple[float, str]]]:
    """Ask ten times a second on a new connection while the body runs; the list has when and what came of it.

    What came: the status, with `+` if Retry-After says when to come again, or `none` without an answer.
    """
    seen: list[tuple[float, str]] = []
    stop = threading.Event()

    def knock() -> None:
        begun = time.monotonic()
        try:
            answer = httpx.post(f"{url}/v1/chat/completions", headers=headers, json=body, timeout=60, trust_env=False)
            seen.append((begun, f"{answer.status_code}{'+' if 'retry-after' in answer.headers else ''}"))
        except httpx.HTTPError:
            seen.append((begun, "none"))

    def knock_on() -> None:
        with ThreadPoolExecutor(200) as pool:
            while not stop.wait(0.1):
                pool.submit(knock)

    knocker = threading.Thread(target=knock_on)
    knocker.start()
    try:
        yield seen
    finally:
        stop.set()
        knocker.join()
        seen.sort()


def note(fault: str, client: str, seconds: float | None, lost: str, stack: str) -> None:
    """Keep one row of the table.

    Args:
        client: what clients saw.
        seconds: from the fault until requests were answered again; None if they always were.
        lost: what was lost.
        stack: on what it was seen.
    """
    RESULTS.parent.mkdir(exist_ok=True)
    rows: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    rows[f"{stack}: {fault}"] = {
        "fault": fault,
        "client": client,
        "seconds": seconds,
        "lost": lost,
        "stack": stack,
        "when": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "load": round(os.getloadavg()[0], 1),
    }
    RESULTS.write_text(json.dumps(rows, indent=2))
