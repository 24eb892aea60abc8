"""A real registry on the loopback, and a proxy before it that counts and cuts."""

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

PROGRAM = "docker-registry"
CHUNK_BYTES = 1 << 16


@dataclass
class Proxy:
    """Passes connections on to a registry.

    Attributes:
        port: where it listens.
        sent: bytes that the registry sent through it, headers and all.
        cut_after: end each connection once this many bytes have come through it; None: never.
        cuts: connections that were ended so.
    """

    port: int = 0
    sent: int = 0
    cut_after: int | None = None
    cuts: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def pipe(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        passed = 0
        try:
            while chunk := source.recv(CHUNK_BYTES):
                if counted:
                    with self._lock:
                        self.sent += len(chunk)
                    passed += len(chunk)
                target.sendall(chunk)
                if counted and self.cut_after is not None and passed > self.cut_after:
                    self.cuts += 1
                    break
        except OSError:
            pass
        finally:
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy(upstream: int, address: str = "127.0.0.1") -> Iterator[Proxy]:
    """A proxy to a port of the loopback until the block ends."""
    made = Proxy()
    listener = socket.create_server((address, 0))
    made.port = listener.getsockname()[1]

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", upstream))
            threading.Thread(target=made.pipe, args=(client, server, False), daemon=True).start()
            threading.Thread(target=made.pipe, args=(server, client, True), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield made
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


@contextmanager
def registry(folder: Path, port: int) -> Iterator[Path]:
    """A registry on a port of the loopback; yields the folder of its blobs."""
    program = shutil.which(PROGRAM)
    if program is None:
        pytest.fail(f"these tests need a registry: make .cache/programs/usr/bin/{PROGRAM}")
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / "config.yml"
    data = folder / "data"
    configuration.write_text(
        "version: 0.1\nlog: {level: error}\n"
        f"storage: {{filesystem: {{rootdirectory: {data}}}}}\nhttp: {{addr: '127.0.0.1:{port}'}}\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "serve", str(configuration)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/v2/").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the registry does not start: {(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)
        yield data / "docker/registry/v2/blobs/sha256"
    finally:
        process.terminate()
        process.wait(20)
