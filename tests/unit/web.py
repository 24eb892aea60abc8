"""A web server for tests: serves a folder on a free port of the loopback, counts, and fails as it is told to."""

import http.server
import re
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one answer: cut after `bytes`, other bytes, an error status, or a pause before the body."""

    kind: Literal["cut", "wrong", "status", "slow"]
    bytes: int = 0
    status: int = 503
    seconds: float = 0


class Server(http.server.ThreadingHTTPServer):
    """Attributes: requested, the paths asked for, in order of arrival; sent, bytes of all bodies."""

    requested: list[str]
    sent: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serve(folder: Path, cuts: int = 0, faults: Sequence[Fault] = (), ranges: bool = True) -> Generator[Server]:
    """Serve a folder, listings of its folders included, until the block ends.

    Args:
        cuts: cut the first answers after four bytes that do not belong to the file, as often as asked.
        faults: of the answers after that, in order; then all goes well.
        ranges: answer `Range: bytes=N-` as most servers do, or always send the whole file.
    """
    requested: list[str] = []
    waiting = list(faults)
    lock = threading.Lock()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            with lock:
                requested.append(self.path)
                fault = waiting.pop(0) if len(requested) > cuts and waiting else None
                cut = len(requested) <= cuts
            path = folder / self.path.lstrip("/").split("?")[0].replace("%2B", "+").replace("%20", " ")
            if cut:
                self._head(200, 1000)
                self.wfile.write(b"part")
                self.close_connection = True
            elif fault and fault.kind == "status":
                self._head(fault.status, 0)
            elif path.is_dir():
                super().do_GET()
            elif not path.is_file():
                self._head(404, 0)
            else:
                self._send(path.read_bytes(), fault)

        def translate_path(self, path: str) -> str:
            return str(folder / path.lstrip("/"))

        def _send(self, content: bytes, fault: Fault | None) -> None:
            begun = re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) if ranges else None
            offset = int(begun[1]) if begun else 0
            if offset and offset >= len(content):
                self._head(416, 0)
                return
            body = content[offset:]
            self._head(206 if begun else 200, len(body))
            if fault and fault.kind == "slow":
                time.sleep(fault.seconds)
            if fault and fault.kind == "wrong":
                body = bytes(byte ^ 1 for byte in body)
            if fault and fault.kind == "cut":
                body = body[: fault.bytes]
                self.close_connection = True
            with lock:
                server.sent += len(body)
            self.wfile.write(body)

        def _head(self, status: int, length: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    server.requested, server.sent = requested, 0
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
