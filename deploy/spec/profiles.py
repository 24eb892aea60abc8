"""The engines of each profile and its compose files: the one place that says so."""

from typing import Literal

Profile = Literal["pd", "cpu", "replicas"]

PREFILL, DECODE, ROUTER = "prefill", "decode", "router"
ENGINES: dict[Profile, tuple[str, ...]] = {
    "pd": (PREFILL, DECODE),
    "cpu": (PREFILL, DECODE),
    "replicas": ("engine", "engine-2", "engine-3", "engine-4"),
}
"""Services that run SGLang, in their order; of `replicas` the first so many that the spec asks for."""
ALL_ENGINES = tuple(dict.fromkeys(name for names in ENGINES.values() for name in names))
FRONT, EXPORTER, PROMETHEUS = "front", "exporter", "prometheus"
BEHIND_ROUTER = (FRONT, EXPORTER, PROMETHEUS)
"""Services that a spec may add: what stands before the router, and what shows and keeps metrics."""
ALL_ROLES = (*ALL_ENGINES, ROUTER, *BEHIND_ROUTER)
FRONT_FILE, METRICS_FILE = "compose.front.yaml", "compose.metrics.yaml"
COMPOSE_FILES = (
    "compose.yaml",
    "compose.p2p.yaml",
    "compose.cpu.yaml",
    "compose.replicas.yaml",
    "compose.replicas-tp4.yaml",
    FRONT_FILE,
    METRICS_FILE,
)


def compose_files(
    profile: Profile, *, p2p: bool = False, gpus_per_engine: int = 0, front: bool = False, metrics: bool = False
) -> tuple[str, ...]:
    """Names of the compose files of a profile, each overriding those before it.

    Args:
        p2p: the KV cache goes from GPU to GPU (`pd` only).
        gpus_per_engine: 4 for the larger engines of `replicas`.
        front: HAProxy stands before the router.
        metrics: one page has the metrics of all roles.
    """
    added = (*([FRONT_FILE] if front else []), *([METRICS_FILE] if metrics else []))
    return _profile_files(profile, p2p, gpus_per_engine) + added


def _profile_files(profile: Profile, p2p: bool, gpus_per_engine: int) -> tuple[str, ...]:
    if profile == "replicas":
        return ("compose.replicas.yaml", *(["compose.replicas-tp4.yaml"] if gpus_per_engine == 4 else []))
    if profile == "cpu":
        return ("compose.yaml", "compose.cpu.yaml")
    return ("compose.yaml", *(["compose.p2p.yaml"] if p2p else []))


def compose_profile(engines: int) -> str:
    """What COMPOSE_PROFILES must say for so many engines of `replicas`; empty for one, which needs nothing."""
    return f"{engines}-engines" if engines > 1 else ""
