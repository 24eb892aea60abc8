"""A Docker engine for one build: nothing is cached in it, nothing of it stays."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from python_on_whales import DockerClient

from deploy.host.errors import HostError

# Not on every user's PATH.
DAEMON_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/sbin")
START_SECONDS = 60
STOP_SECONDS = 120


@contextmanager
def own_engine(folder: Path) -> Generator[DockerClient]:
    """An engine of our own with its data in a folder, which is empty before and gone afterwards.

    It has a bridge of its own and makes no firewall rules, so it does not meet another engine; its builds use the
    host's network. ("bridge": "none" would not do: with it an engine deletes docker0 when it starts, whoever uses it.)

    Raises:
        HostError: it cannot be started here.
    """
    program = shutil.which("dockerd", path=":".join((os.environ.get("PATH", ""), *DAEMON_FOLDERS)))
    if program is None or os.geteuid() != 0:
        raise HostError(
            "an engine of our own cannot be started",
            "that needs root" if program else "there is no dockerd on this machine",
            "run it as root on a host where Docker itself is installed",
        )
    folder.mkdir(parents=True)
    # A socket's path must be short.
    runtime = Path(tempfile.mkdtemp(prefix="deploy-", dir="/run"))
    bridge = f"dsv4-{os.getpid()}"
    log = folder / "dockerd.log"
    socket = runtime / "docker.sock"
    configuration = {
        "data-root": str(folder / "data"),
        "exec-root": str(runtime / "exec"),
        "pidfile": str(runtime / "pid"),
        "hosts": [f"unix://{socket}"],
        "bridge": bridge,
        "ip-forward": False,
        "ip-masq": False,
        "iptables": False,
        "ip6tables": False,
    }
    (runtime / "daemon.json").write_text(json.dumps(configuration))
    try:
        _ip("link", "add", bridge, "type", "bridge")
        # The engine asks for an address; nothing is ever attached (RFC 3927, one link).
        _ip("address", "add", f"169.254.{os.getpid() % 250 + 2}.1/24", "dev", bridge)
        with log.open("wb") as output:
            # In a session of its own: Ctrl-C reaches us first, and we end it.
            command = [program, "--config-file", str(runtime / "daemon.json")]
            engine = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            client = DockerClient(host=f"unix://{socket}")
            _wait(engine, client, log)
            yield client
        finally:
            engine.terminate()
            try:
                engine.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                engine.kill()
                engine.wait()
    finally:
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True)
        shutil.rmtree(runtime, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _ip(*arguments: str) -> None:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise HostError(
            "there is no `ip` on this machine", "the engine needs a bridge", "apt-get install iproute2"
        ) from error
    if done.returncode:
        raise HostError("an engine of our own cannot be started", done.stderr.strip(), "run it as root")


def _wait(engine: "subprocess.Popen[bytes]", client: DockerClient, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    asking = ["docker", "--host", str(client.client_config.host), "version"]
    while subprocess.run(asking, capture_output=True).returncode:
        if engine.poll() is not None or time.monotonic() > deadline:
            last = "".join(log.read_text(errors="replace").splitlines()[-1:])
            raise HostError("an engine of our own does not start", last, "dockerd by hand shows more")
        time.sleep(0.2)
