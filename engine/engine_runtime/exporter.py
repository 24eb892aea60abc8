"""One page with the metrics of all roles and of the controller: `python -m engine_runtime.launch exporter`.

Asked on port 9400, it asks every role at that moment, gives each sample the label `role`, adds `role_up` and
`role_scrape_seconds`, and ends with what the controller wrote about itself. A role that does not answer costs its own
samples and nothing else.
"""

import re
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine_runtime.secret_files import UsageError

PORT = 9400
CONTROLLER_FILES = Path("/controller")
PATIENCE_SECONDS = 5.0
MAX_PAGE_BYTES = 16 * 1024**2
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?(?P<rest>[ \t]+\S.*)")
_OF_FAMILY = ("_bucket", "_sum", "_count", "_total", "_created")


@dataclass
class Family:
    """The samples of one metric, and what a page said about it (`# HELP`, `# TYPE` without the name)."""

    help: str = ""
    type: str = ""
    samples: list[str] = field(default_factory=list[str])


def merge(pages: Iterable[tuple[str, str]]) -> dict[str, Family]:
    """Families of several pages of Prometheus's text format, each sample with the label `role`.

    Args:
        pages: role and text; an empty role adds no label. A `role` that a page has itself becomes `exported_role`.
            Lines that are not of the format are left out.
    """
    families: dict[str, Family] = {}
    for role, text in pages:
        own = ""
        for line in text.split("\n"):
            words = line.split(None, 3)
            if line.startswith("#"):
                if len(words) >= 3 and words[1] in ("HELP", "TYPE"):
                    own = words[2]
                    family = families.setdefault(own, Family())
                    if words[1] == "HELP":
                        family.help = family.help or " ".join(words[3:])
                    else:
                        family.type = family.type or " ".join(words[3:])
                continue
            if found := _SAMPLE.fullmatch(line):
                families.setdefault(_family(found["name"], own), Family()).samples.append(_labelled(found, role))
    return families


def _family(name: str, own: str) -> str:
    """The family of a sample: the one announced last if it is one of its samples, else itself."""
    belongs = name == own or (own and name.startswith(own) and name[len(own) :] in _OF_FAMILY)
    return own if belongs else name


def _labelled(sample: re.Match[str], role: str) -> str:
    labels = sample["labels"] or ""
    if role:
        labels = re.sub(r'(^|,)\s*role=(?=")', r"\1exported_role=", labels).strip(", ")
        labels = f'role="{role}"' + (f",{labels}" if labels else "")
    return f"{sample['name']}{f'{{{labels}}}' if labels else ''}{sample['rest']}"


def render(families: Mapping[str, Family]) -> str:
    """The text of a page."""
    lines: list[str] = []
    for name, family in families.items():
        if not family.samples:
            continue
        lines += [f"# HELP {name} {family.help}"] if family.help else []
        lines += [f"# TYPE {name} {family.type}"] if family.type else []
        lines += family.samples
    return "".join(f"{line}\n" for line in lines)


def parse_targets(text: str) -> list[tuple[str, str]]:
    """Roles and addresses from words such as `decode=http://decode:30000/metrics`; a role may have several.

    Raises:
        UsageError: a word is not of that form.
    """
    targets: list[tuple[str, str]] = []
    for word in text.split():
        role, found, address = word.partition("=")
        if not found or not re.fullmatch(r"[a-z0-9-]+", role) or not address.startswith("http://"):
            raise UsageError(f"METRICS_TARGETS: {word!r} is not ROLE=http://HOST:PORT/PATH")
        targets.append((role, address))
    return targets


def fetch(address: str) -> str:
    """A page of metrics.

    Raises:
        OSError: no answer, or one that is not 200.
        ValueError: it is too large or no text.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(address, timeout=PATIENCE_SECONDS) as answer:
        page = answer.read(MAX_PAGE_BYTES + 1)
    if len(page) > MAX_PAGE_BYTES:
        raise ValueError("too large")
    return page.decode()


def page(targets: Iterable[tuple[str, str]], controller: Path, get: Callable[[str], str] = fetch) -> str:
    """Ask every role at once and put their answers together.

    Args:
        targets: role and address.
        controller: folder whose `*.prom` files are taken over as they are.
    """
    asked = list(targets)
    answers: list[tuple[str | None, float]] = [(None, PATIENCE_SECONDS)] * len(asked)

    def ask(number: int) -> None:
        begun = time.monotonic()
        try:
            text = get(asked[number][1])
        except (OSError, ValueError):
            text = None
        answers[number] = text, time.monotonic() - begun

    # A name that cannot be looked up takes longer than any time limit of the connection: it is not waited for.
    pool = ThreadPoolExecutor(max(len(asked), 1))
    wait([pool.submit(ask, number) for number in range(len(asked))], timeout=PATIENCE_SECONDS + 1)
    pool.shutdown(wait=False)
    up: dict[str, bool] = {}
    seconds: dict[str, float] = {}
    told = [*answers]
    for (role, _), (text, took) in zip(asked, told, strict=True):
        up[role] = up.get(role, True) and text is not None
        seconds[role] = max(seconds.get(role, 0.0), took)
    own = "# HELP role_up Whether the role showed its metrics.\n# TYPE role_up gauge\n"
    own += "".join(f'role_up{{role="{role}"}} {int(value)}\n' for role, value in up.items())
    own += "# HELP role_scrape_seconds How long the role took to show them.\n# TYPE role_scrape_seconds gauge\n"
    own += "".join(f'role_scrape_seconds{{role="{role}"}} {value:.6f}\n' for role, value in seconds.items())
    pages = [(role, text) for (role, _), (text, _) in zip(asked, told, strict=True) if text is not None]
    return render(merge([("", own), *pages, *(("", text) for text in _controller(controller))]))


def _controller(folder: Path) -> list[str]:
    texts: list[str] = []
    for file in sorted(folder.glob("*.prom")):
        try:
            texts.append(file.read_text())
        except (OSError, UnicodeDecodeError):
            continue
    return texts


def handler(targets: list[tuple[str, str]]) -> type[BaseHTTPRequestHandler]:
    """An HTTP handler that knows `/metrics` and `/health`."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            known = {"/metrics": lambda: page(targets, CONTROLLER_FILES), "/health": lambda: "ok\n"}
            answer = known.get(self.path)
            text = answer() if answer else "there are /metrics and /health\n"
            self.send_response(200 if answer else 404)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """A scrape is not worth a line."""

    return Handler


def run(environment: Mapping[str, str]) -> None:
    """Serve until the process ends.

    Raises:
        UsageError: METRICS_TARGETS names no role, or one that is not well-formed.
    """
    targets = parse_targets(environment.get("METRICS_TARGETS", ""))
    if not targets:
        raise UsageError("METRICS_TARGETS is empty: there is nothing to show")
    ThreadingHTTPServer(("0.0.0.0", PORT), handler(targets)).serve_forever()
