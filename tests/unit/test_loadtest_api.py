"""Pages beside the load come from servers that may be anything: none of them fills the memory or takes for ever."""

import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadtest import api
from loadtest.errors import BenchError


class Endless(BaseHTTPRequestHandler):
    """Answers with a body that goes on as long as somebody reads it: at once, or drop by drop."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        piece, pause = (b"x" * 65536, 0.0) if self.path == "/fast" else (b"x", 0.05)
        with suppress(OSError):
            while not threading.Event().wait(pause):
                self.wfile.write(piece)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def endless() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("path", "why"), [("/fast", "longer than 1 MiB"), ("/slow", "did not end within 1 s")])
def test_an_answer_without_an_end_is_an_error_that_says_so(
    endless: str, monkeypatch: pytest.MonkeyPatch, path: str, why: str
) -> None:
    monkeypatch.setattr(api, "LARGEST_BODY", 2**20)
    monkeypatch.setattr(api, "LONGEST_BODY_S", 1.0)
    with pytest.raises(BenchError) as error:
        api.Api(endless).get_json(path)
    assert "broke off" in error.value.message and why in error.value.why
