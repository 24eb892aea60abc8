"""A web server for tests: serves a folder on a free port of the loopback, and counts."""

import http.server
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Server(http.server.ThreadingHTTPServer):
    """Attributes: requested, the paths asked for, in order of arrival."""

    requested: list[str]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serve(folder: Path, cuts: int = 0) -> Generator[Server]:
    """Serve a folder until the block ends; cut the first answers short, as often as asked."""
    requested: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, directory=str(folder), **kwargs)

        def do_GET(self) -> None:
            requested.append(self.path)
            if len(requested) <= cuts:
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                self.wfile.write(b"part")
                self.close_connection = True
            else:
                super().do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    server.requested = requested
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
