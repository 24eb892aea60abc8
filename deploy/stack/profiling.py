"""Records a bounded profiler trace in a running engine, through SGLang's own endpoints, and brings it here."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import Any

from python_on_whales import DockerClient
from python_on_whales.exceptions import DockerException

from deploy.errors import DeployError
from deploy.stack.client import Endpoint, stream
from deploy.stack.compose import Stack, words
from deploy.stack.environment import ENGINE_PORT

# The volume: /tmp is in memory, and `docker cp` cannot read it.
REMOTE = "/var/cache/engine/profiles"
POLL_S, STABLE_LOOKS, STOP_S = 1.0, 3, 120.0
LOAD_TOKENS = 64
_POST = """
import json, sys, urllib.error, urllib.request as r
request = r.Request(sys.argv[1], data=sys.argv[2].encode(), headers={"Content-Type": "application/json"}, method="POST")
try:
    print(r.build_opener(r.ProxyHandler({})).open(request, timeout=60).read().decode())
except urllib.error.HTTPError as error:
    sys.exit("HTTP %d: %s" % (error.code, error.read().decode(errors="replace")[:500]))
"""
_SIZES = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
print(json.dumps({file.name: file.stat().st_size for file in folder.glob("*.gz")}))
"""


class CaptureFailed(DeployError):
    """No trace could be recorded."""

    exit_code = 4


def capture(
    stack: Stack,
    role: str,
    folder: Path,
    *,
    steps: int,
    seconds: float,
    load: int = 0,
    target: Endpoint | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """Record the next `steps` forward passes of an engine.

    Args:
        role: which engine; it must be healthy.
        folder: where the traces go, one file for each rank. Made if it is not there.
        seconds: the longest to wait for the steps; then the trace has those that came.
        load: requests to keep in flight meanwhile; 0: other people's requests must bring the steps.
        target: where to send them.

    Raises:
        CaptureFailed: the role does not run, refuses, or writes nothing. Nothing is left in the container.
    """
    container = _container(stack, role)
    name = f"{role}-{time.strftime('%Y%m%d-%H%M%S')}"
    remote = f"{REMOTE}/{name}"
    order = {
        "output_dir": remote,
        "num_steps": steps,
        "activities": ["CPU", "GPU"],
        "with_stack": False,
        "record_shapes": False,
        "profile_id": name,
    }
    over = Event()
    recording = False
    pool = ThreadPoolExecutor(max_workers=max(load, 1))
    try:
        users = [pool.submit(_ask, target, over, number) for number in range(load)] if target else []
        _post(container, role, "start_profile", order)
        recording = True
        say(f"recording {steps} steps of {role}")
        files = _wait(container, role, remote, seconds)
        if not files:
            say(f"{seconds:.0f} s are over before {steps} steps: stopping")
            _post(container, role, "stop_profile", {})
            files = _wait(container, role, remote, STOP_S)
        recording = not files
        over.set()
        if not files:
            raise CaptureFailed(
                f"{role} wrote no trace",
                _failure(users) or "its profiler did not end within two minutes",
                f"deploy logs {role}",
            )
        return _fetch(container, remote, files, folder, say)
    finally:
        over.set()
        if recording:
            _quietly(lambda: _post(container, role, "stop_profile", {}))
        _quietly(lambda: DockerClient().container.execute(container, ["rm", "-rf", remote]))
        pool.shutdown(wait=False, cancel_futures=True)


def _container(stack: Stack, role: str) -> str:
    states = {state.role: state for state in stack.roles()}
    if role not in states:
        there = [name for name in states if name != "router"]
        raise CaptureFailed(
            f"there is no {role} to profile",
            f"running: {', '.join(there) or 'nothing'}",
            f"deploy profile {there[0]}" if there else "deploy up",
        )
    if not states[role].serving:
        raise CaptureFailed(f"{role} is {states[role].health or states[role].status}", "", f"deploy logs {role}")
    return states[role].container


def _post(container: str, role: str, path: str, body: dict[str, Any]) -> None:
    try:
        DockerClient().container.execute(
            container, ["python", "-c", _POST, f"http://127.0.0.1:{ENGINE_PORT}/{path}", json.dumps(body)]
        )
    except DockerException as error:
        raise CaptureFailed(f"{role} refuses /{path}", words(error), f"deploy logs {role}") from error


def _wait(container: str, role: str, remote: str, seconds: float) -> list[str]:
    """Names of the traces once they have stopped growing; none when the time is over."""
    deadline = time.monotonic() + seconds
    last: dict[str, int] = {}
    same = 0
    while time.monotonic() < deadline or (last and same < STABLE_LOOKS and time.monotonic() < deadline + STOP_S):
        time.sleep(POLL_S)
        try:
            found: dict[str, int] = json.loads(
                str(DockerClient().container.execute(container, ["python", "-c", _SIZES, remote]))
            )
        except DockerException as error:
            raise CaptureFailed(f"{role} ended while it was recorded", words(error), f"deploy logs {role}") from error
        same = same + 1 if found and found == last and all(found.values()) else 0
        last = found
        if same >= STABLE_LOOKS:
            return sorted(found)
    return []


def _fetch(container: str, remote: str, files: list[str], folder: Path, say: Callable[[str], None]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    fetched: list[Path] = []
    for name in files:
        here = folder / Path(name).name
        try:
            DockerClient().container.copy((container, f"{remote}/{name}"), here)
        except DockerException as error:
            raise CaptureFailed(
                "the trace cannot be copied here", words(error), "free some disk, then again"
            ) from error
        say(f"{here}: {here.stat().st_size / 1e6:.1f} MB")
        fetched.append(here)
    return fetched


def _ask(target: Endpoint | None, over: Event, number: int) -> None:
    """Ask one question after the other until it is over."""
    turn = 0
    while target and not over.is_set():
        turn += 1
        for _ in stream(
            target, f"Question {number}.{turn}: tell a long story.", max_tokens=LOAD_TOKENS, ignore_end=True
        ):
            if over.is_set():
                return


def _failure(users: list[Any]) -> str:
    """Why our own requests failed, if they did."""
    done, _ = wait(users, timeout=0)
    errors = [error for user in done if (error := user.exception())]
    return f"the requests failed: {errors[0]}".splitlines()[0] if errors else ""


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except (DockerException, DeployError):
        return
