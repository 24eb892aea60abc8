"""What so many engines cost one router that does nothing else: its processor time and memory, and the page of all
engines' metrics. Runs in the engine image, with the stand-ins of discovery_standin.py:

    python router_load.py EXPORTED.json ENGINES SECONDS

Prints JSON; `cpu` is of one processor. The stand-ins answer at once, so what an engine does for a probe is not in it.
"""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import discovery_standin
from discovery_standin import API_PORT, ENGINE_PORT, Pods, api, ask, pod, reply, serve

# The stand-ins answer on every address, so the router has a port of its own, and no gate.
ROUTER_PORT = 31000

# Samples of an engine's own page: counted on a decode engine of profile cpu, SGLang 0.5.23, 87 kB.
LINES = 560


class Engine(BaseHTTPRequestHandler):
    """Every engine: one server for all addresses."""

    protocol_version = "HTTP/1.1"
    probes = 0

    def do_GET(self) -> None:
        if self.path == "/health":
            Engine.probes += 1
        if self.path == "/metrics":
            lines = [
                f'# TYPE sglang:x{number} gauge\nsglang:x{number}{{model_name="m",tp_rank="0"}} 1.0'
                for number in range(LINES)
            ]
            text = "\n".join(lines).encode() + b"\n"
            self.send_response(200)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)
            return
        info = {"model_path": "/model", "is_generation": True, "served_model_name": "m", "tp_size": 4, "dp_size": 1}
        reply(self, 200, info)

    def log_message(self, *_: Any) -> None:
        pass


def used(process: int) -> tuple[float, float]:
    """Processor seconds and resident MiB of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    ticks, pages = int(fields[11]) + int(fields[12]), int(fields[21])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    exported, engines, seconds = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), float(sys.argv[3])
    meta: dict[str, Any] = exported["pods"]
    roles = list(meta)
    pods = Pods()
    api(pods)
    serve("0.0.0.0", ENGINE_PORT, Engine)
    for number in range(engines):
        address = f"127.1.{number // 250}.{number % 250 + 1}"
        pods.put("ADDED", pod(f"engine-{number}", address, meta[roles[number % len(roles)]]))
    kubeconfig = Path("/tmp/kubeconfig")
    cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{API_PORT}"}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
    config = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "users": []}
    config["users"] = [{"name": "u", "user": {}}]
    kubeconfig.write_text(json.dumps({**config, "current-context": "x"}))
    discovery_standin.ROUTER = f"http://127.0.0.1:{ROUTER_PORT}"
    environment = {**os.environ, **exported["env"], "KUBECONFIG": str(kubeconfig)}
    own = ["--host=127.0.0.1", f"--port={ROUTER_PORT}"]
    command = [sys.executable, "-m", "engine_runtime.launch", "router-alone", *exported["args"][1:], *own]
    begun = time.monotonic()
    with Path("/tmp/router.log").open("w") as log:
        router = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        while len((ask("/workers")[1] or {}).get("workers", [])) < engines:
            if time.monotonic() > begun + 540:
                raise SystemExit(Path("/tmp/router.log").read_text()[-2000:])
            time.sleep(1)
        found = time.monotonic() - begun
        before, (cpu, _), clock = Engine.probes, used(router.pid), time.monotonic()
        time.sleep(seconds)
        after, memory = used(router.pid)
        passed = time.monotonic() - clock
        clock = time.monotonic()
        status, page = ask("/engine_metrics", patience=120)
        result = {
            "engines": engines,
            "seconds until all are known": round(found, 1),
            "probes a second": round((Engine.probes - before) / passed, 1),
            "cpu": round((after - cpu) / passed, 3),
            "memory MiB": round(memory),
            "metrics page": {
                "status": status,
                "MB": round(len(str(page)) / 1e6, 2),
                "s": round(time.monotonic() - clock, 2),
            },
        }
        sys.stdout.write(json.dumps(result) + "\n")
    finally:
        router.terminate()
        router.wait(timeout=60)


if __name__ == "__main__":
    main()
