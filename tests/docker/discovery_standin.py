"""Runs in the engine image beside the real router: a stand-in for Kubernetes' API, and one for each engine.

    python discovery_standin.py EXPORTED.json

EXPORTED.json has `args` and `env` of the exported router and `pods`: labels and annotations of each role. What the
router does is printed as JSON, a key for each step. Nothing leaves the container's loopback interface.
"""

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

API_PORT, ENGINE_PORT = 8001, 30000
# The router's gate; the stand-ins have the same port of other addresses.
ROUTER = "http://127.0.0.1:30000"
PATIENCE_SECONDS = 40
ANSWER = {
    "id": "1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}


class Pods:
    """The pods of the namespace, and who watches them."""

    def __init__(self) -> None:
        self.now: dict[str, dict[str, Any]] = {}
        self.version = 1
        self.events: list[tuple[int, dict[str, Any]]] = []
        self.changed = threading.Condition()
        self.asked: set[str] = set()

    def put(self, kind: str, pod: dict[str, Any]) -> None:
        with self.changed:
            self.version += 1
            pod["metadata"]["resourceVersion"] = str(self.version)
            name = pod["metadata"]["name"]
            self.now[name] = pod
            if kind == "DELETED":
                del self.now[name]
            self.events.append((self.version, {"type": kind, "object": json.loads(json.dumps(pod))}))
            self.changed.notify_all()


def pod(name: str, ip: str, meta: dict[str, Any], *, ready: bool = True) -> dict[str, Any]:
    """A pod as Kubernetes shows it to whoever lists it."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "dsv4-test", "uid": name, **meta},
        "spec": {"containers": [{"name": "engine", "image": "x"}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def api(pods: Pods) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            pods.asked.add(path)
            asks = dict(item.partition("=")[::2] for item in query.split("&"))
            if path != "/api/v1/namespaces/dsv4-test/pods":
                self.send_error(403)
            elif asks.get("watch") in ("1", "true"):
                self.watch(int(asks.get("resourceVersion") or 0))
            else:
                body = {
                    "kind": "PodList",
                    "apiVersion": "v1",
                    "metadata": {"resourceVersion": str(pods.version)},
                    "items": list(pods.now.values()),
                }
                reply(self, 200, body)

        def watch(self, seen: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while True:
                with pods.changed:
                    while pods.version <= seen:
                        pods.changed.wait()
                    fresh = [event for version, event in pods.events if version > seen]
                    seen = pods.version
                for event in fresh:
                    line = json.dumps(event).encode() + b"\n"
                    self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            pass

    return serve("127.0.0.1", API_PORT, Handler)


def engine(ip: str, got: list[tuple[str, dict[str, Any]]]) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            info = {"model_path": "/model", "tokenizer_path": "/model", "is_generation": True, "version": "0.5.23"}
            reply(self, 200, {**info, "served_model_name": "m", "tp_size": 4, "dp_size": 1})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            got.append((ip, json.loads(body or b"{}")))
            reply(self, 200, ANSWER)

        def log_message(self, *_: Any) -> None:
            pass

    return serve(ip, ENGINE_PORT, Handler)


def reply(handler: BaseHTTPRequestHandler, code: int, value: Any) -> None:
    body = json.dumps(value).encode()
    handler.send_response(code)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def serve(ip: str, port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer((ip, port), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def ask(path: str, body: dict[str, Any] | None = None, patience: float = 10) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json"}
    if keys := os.environ.get("KEYS"):
        name = "admin_key" if path == "/workers" else "api_key"
        headers["Authorization"] = f"Bearer {(Path(keys) / name).read_text().strip()}"
    data = json.dumps(body).encode() if body else None
    try:
        with urllib.request.urlopen(urllib.request.Request(ROUTER + path, data, headers), timeout=patience) as answer:
            text = answer.read().decode()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text
    except urllib.error.HTTPError as error:
        return error.code, None
    except OSError:
        return 0, None


def workers() -> list[str]:
    """Which engines the router has, by their address."""
    _, answer = ask("/workers")
    return sorted(item["url"] for item in (answer or {}).get("workers", []))


def until(wanted: list[str]) -> list[str]:
    """The router's engines once they are these, or whatever they are after a while."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline and workers() != wanted:
        time.sleep(0.2)
    return workers()


def url(ip: str) -> str:
    return f"http://{ip}:{ENGINE_PORT}"


def main() -> None:
    exported = json.loads(Path(sys.argv[1]).read_text())
    meta: dict[str, dict[str, Any]] = exported["pods"]
    split = "prefill" in meta
    roles = ["prefill", "decode"] if split else list(meta)
    pods, got = Pods(), list[tuple[str, dict[str, Any]]]()
    api(pods)
    addresses = {role: f"127.0.0.{11 + place}" for place, role in enumerate(roles)}
    stranger, late = "127.0.0.30", "127.0.0.40"
    for ip in (*addresses.values(), stranger, late):
        engine(ip, got)
    for role, ip in addresses.items():
        pods.put("ADDED", pod(role, ip, meta[role]))
    # Of another lock (in replicas: of another system), and one that is not ready.
    key = "deepseek-v4-flash-sm120/peers" if split else "app.kubernetes.io/name"
    other = {**meta[roles[-1]], "labels": {**meta[roles[-1]]["labels"], key: "another"}}
    pods.put("ADDED", pod("stranger", stranger, other))
    pods.put("ADDED", pod("late", late, meta[roles[-1]], ready=False))

    kubeconfig = Path("/tmp/kubeconfig")
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{API_PORT}"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    users = [{"name": "u", "user": {}}]
    config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "users": users}
    kubeconfig.write_text(json.dumps({**config, "current-context": "x"}))

    assert exported["args"][0] == "router"
    environment = {**os.environ, **exported["env"], "KUBECONFIG": str(kubeconfig)}
    command = [sys.executable, "-m", "engine_runtime.launch", *exported["args"], "--host=127.0.0.1"]
    with Path("/tmp/router.log").open("w") as log:
        router = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    steps: dict[str, Any] = {}
    try:
        expected = sorted(map(url, addresses.values()))
        steps["found"] = until(expected) == expected
        steps["ready"] = ask("/readiness")[0]
        question = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        steps["answer"] = ask("/v1/chat/completions", question)[0]
        steps["asked"] = sorted({ip for ip, _ in got} & {*addresses.values()}) if split else len(got)
        steps["bootstrap"] = sorted(
            {(body.get("bootstrap_host"), body.get("bootstrap_port")) for _, body in got if "bootstrap_host" in body}
        )
        pods.put("MODIFIED", pod("late", late, meta[roles[-1]]))
        more = sorted([*expected, url(late)])
        steps["one more, ready now"] = until(more) == more
        leaving = pod("late", late, {**meta[roles[-1]], "deletionTimestamp": "2026-01-01T00:00:00Z"})
        pods.put("MODIFIED", leaving)
        begun = time.monotonic()
        steps["gone when its deletion begins"] = until(expected) == expected
        steps["seconds"] = round(time.monotonic() - begun, 1)
        steps["paths"] = sorted(pods.asked)
    finally:
        router.terminate()
        router.wait(timeout=60)
    if not all(steps.get(key) for key in ("found", "one more, ready now", "gone when its deletion begins")):
        steps["log"] = Path("/tmp/router.log").read_text()[-2000:]
    sys.stdout.write(json.dumps(steps) + "\n")


if __name__ == "__main__":
    main()
