"""The server's own figures during a run: engine metrics pages and GPUs. Parsers are pure."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtest.api import bound
from loadtest.plain import mapping

# name -> (SGLang's metric, how to join its label sets), from sglang/srt/observability/metrics_collector.py (0.5.23).
# Counters of the tokenizer manager grow when a request finishes; health probes are not counted.
COUNTERS: dict[str, str] = {
    "requests": "sglang:num_requests_total",
    "prompt_tokens": "sglang:prompt_tokens_total",
    "generation_tokens": "sglang:generation_tokens_total",
    "cached_tokens": "sglang:cached_tokens_total",
    "aborted": "sglang:num_aborted_requests_total",
    "verify_calls": "sglang:spec_verify_calls_total",
    "retracted": "sglang:num_retracted_requests_total",
    "transfer_failed": "sglang:num_transfer_failed_reqs_total",
    "bootstrap_failed": "sglang:num_bootstrap_failed_reqs_total",
}
GAUGES: dict[str, tuple[str, Callable[[float, float], float]]] = {
    "running": ("sglang:num_running_reqs", float.__add__),
    "queued": ("sglang:num_queue_reqs", float.__add__),
    "prefill_in_flight": ("sglang:num_prefill_inflight_queue_reqs", float.__add__),
    "decode_transfer": ("sglang:num_decode_transfer_queue_reqs", float.__add__),
    "decode_prealloc": ("sglang:num_decode_prealloc_queue_reqs", float.__add__),
    "kv_usage": ("sglang:token_usage", max),
    "kv_used_tokens": ("sglang:num_used_tokens", max),
    "accept_length": ("sglang:spec_accept_length", max),
    "gen_throughput": ("sglang:gen_throughput", float.__add__),
    "kv_transfer_ms": ("sglang:kv_transfer_latency_ms", max),
    "kv_transfer_gb_s": ("sglang:kv_transfer_speed_gb_s", max),
}
# SGLang's word for an engine that does both roles, and that of compose.replicas.yaml.
_KINDS = {"unified": "engine"}
_BY_METRIC: dict[str, tuple[str, Callable[[float, float], float]]] = {
    **{metric: (name, float.__add__) for name, metric in COUNTERS.items()},
    **{metric: (name, join) for name, (metric, join) in GAUGES.items()},
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One engine at one time (wall clock); `values` is None when it did not answer."""

    at: float
    engine: str
    values: Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one time: watts, percent, and the driver's bit mask of reasons for lower clocks."""

    at: float
    gpu: str
    power: float | None
    utilisation: float | None
    reasons: int


def parse_metrics(text: str) -> dict[str, dict[str, float]]:
    """Values by our names for each engine of a Prometheus page; label sets are joined, absent metrics stay absent.

    The router's page (`/engine_metrics`) has the engines of all workers, told apart by `engine_type` and `worker_addr`,
    and writes `sglang_` for `sglang:`. On an engine's own page the key is the empty string.
    """
    lines = (
        line.replace("sglang_", "sglang:", 1) if line.startswith("sglang_") else line for line in text.splitlines()
    )
    wanted = "\n".join(line for line in lines if line.partition("{")[0].partition(" ")[0] in _BY_METRIC)
    workers: dict[tuple[str, str], dict[str, float]] = {}
    for family in text_string_to_metric_families(wanted + "\n"):
        for sample in family.samples:
            known = _BY_METRIC.get(sample.name)
            if known is None:
                continue
            address = sample.labels.get("worker_addr", "")
            kind = _KINDS.get(kind := sample.labels.get("engine_type", "engine"), kind) if address else ""
            values = workers.setdefault((kind, address), {})
            name, join = known
            values[name] = join(values[name], float(sample.value)) if name in values else float(sample.value)
    engines: dict[str, dict[str, float]] = {}
    # The shorter address first: `engine` before `engine-2`.
    for kind, address in sorted(workers, key=lambda worker: (worker[0], len(worker[1]), worker[1])):
        same = sum(1 for name in engines if name.partition("-")[0] == kind)
        engines[f"{kind}-{same + 1}" if same else kind] = workers[kind, address]
    return engines


GPU_QUERY = ("uuid", "power.draw", "utilization.gpu", "clocks_event_reasons.active")


def parse_gpus(text: str, at: float) -> list[GpuSample]:
    """Reads `nvidia-smi --query-gpu=<GPU_QUERY> --format=csv,noheader,nounits`; unknown values become None or 0."""
    samples: list[GpuSample] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(GPU_QUERY) or not cells[0].startswith("GPU-"):
            continue
        reasons = int(cells[3], 16) if cells[3].lower().startswith("0x") else 0
        samples.append(GpuSample(at, cells[0], _number(cells[1]), _number(cells[2]), reasons))
    return samples


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def query_gpus() -> list[GpuSample]:
    """The GPUs of this machine; empty without a driver."""
    command = ["nvidia-smi", f"--query-gpu={','.join(GPU_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpus(result.stdout, time.time()) if result.returncode == 0 else []


@dataclass
class Watcher:
    """Samples all engines, and the GPUs, once each interval in a thread of its own.

    `pages` maps a name to the URL of a metrics page; the empty name is the router's page of all engines. An engine that
    does not answer, or is no longer on the router's page, gives a snapshot without values.
    """

    pages: Mapping[str, str]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    interval: float = 1.0
    snapshots: list[Snapshot] = field(default_factory=list[Snapshot])
    gpus: list[GpuSample] = field(default_factory=list[GpuSample])

    def __post_init__(self) -> None:
        self._client = httpx.Client(
            timeout=5.0, trust_env=False, headers=dict(self.headers), event_hooks={"response": [bound]}
        )
        self._known: dict[str, set[str]] = {name: {name} if name else set() for name in self.pages}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._has_gpus = True

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=10)
        self._client.close()

    def take(self) -> list[Snapshot]:
        """One snapshot of each engine, now."""
        with self._lock:
            taken = [snapshot for name, url in self.pages.items() for snapshot in self._scrape(name, url)]
            self.snapshots += taken
            return taken

    def _scrape(self, page: str, url: str) -> list[Snapshot]:
        try:
            response = self._client.get(url, follow_redirects=True)
            response.raise_for_status()
            found = parse_metrics(response.text)
        except (httpx.HTTPError, ValueError):
            found = {}
        if page and found:
            found = {page: next(iter(found.values()))}
        self._known[page] |= set(found)
        at = time.time()
        return [Snapshot(at, engine, found.get(engine)) for engine in sorted(self._known[page])]

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self.take()
            if self._has_gpus:
                found = query_gpus()
                self._has_gpus = bool(found)
                self.gpus += found


def engine_identity(url: str, timeout: float = 20.0) -> dict[str, Any] | None:
    """`/server_info` of an engine, reduced to what identifies it; None when it does not answer."""
    try:
        with httpx.Client(timeout=timeout, trust_env=False, event_hooks={"response": [bound]}) as client:
            response = client.get(url.rstrip("/") + "/server_info")
        response.raise_for_status()
        info: Any = response.json()
    except (httpx.HTTPError, ValueError):
        return None
    return identity(mapping(info)) or None


_VOLATILE = ("internal_states", "startup_time", "api_key", "admin_api_key")


def identity(info: dict[str, Any]) -> dict[str, Any]:
    """Server information without what changes while it runs and without secrets."""
    return {name: value for name, value in sorted(info.items()) if name not in _VOLATILE}
