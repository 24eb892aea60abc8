"""Stand-in for the router: answers with what it was asked, as slowly as the body says, and logs a line a request."""

import contextlib
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(what)}\n")
    sys.stdout.flush()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            asked: Any = json.loads(body)
        except ValueError:
            asked = {}
        if self.path != "/liveness":
            say({"method": self.command, "path": self.path, "size": len(body)})
        time.sleep(asked.get("sleep", 0))
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("access-control-allow-origin", "*")
        if pieces := asked.get("pieces", 0):
            self.stream(b"x" * asked.get("size", 8), pieces, asked.get("pause", 0))
            return
        told = json.dumps({"method": self.command, "path": self.path, "headers": dict(self.headers)}).encode()
        self.send_header("content-length", str(len(told)))
        self.end_headers()
        self.wfile.write(told)

    def stream(self, piece: bytes, pieces: int, pause: float) -> None:
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        try:
            for _ in range(pieces):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                time.sleep(pause)
            self.wfile.write(b"0\r\n\r\n")
        except ConnectionError:
            say({"broken": True})

    def handle(self) -> None:
        # The front's probe leaves without a word.
        with contextlib.suppress(ConnectionError):
            super().handle()

    do_GET = do_POST = do_PUT = do_DELETE = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("0.0.0.0", 30000), Handler).serve_forever()
