"""The engines of each profile and its compose files: the one place that says so."""

from typing import Literal

Profile = Literal["pd", "cpu", "replicas"]

ROUTER = "router"
ENGINES: dict[Profile, tuple[str, ...]] = {
    "pd": ("prefill", "decode"),
    "cpu": ("prefill", "decode"),
    "replicas": ("engine", "engine-2", "engine-3", "engine-4"),
}
"""Services that run SGLang, in their order; of `replicas` the first so many that the spec asks for."""
ALL_ENGINES = tuple(dict.fromkeys(name for names in ENGINES.values() for name in names))
ALL_ROLES = (*ALL_ENGINES, ROUTER)
COMPOSE_FILES = (
    "compose.yaml",
    "compose.p2p.yaml",
    "compose.cpu.yaml",
    "compose.replicas.yaml",
    "compose.replicas-tp4.yaml",
)


def compose_files(profile: Profile, *, p2p: bool = False, gpus_per_engine: int = 0) -> tuple[str, ...]:
    """Names of the compose files of a profile, each overriding those before it.

    Args:
        p2p: the KV cache goes from GPU to GPU (`pd` only).
        gpus_per_engine: 4 for the larger engines of `replicas`.
    """
    if profile == "replicas":
        return ("compose.replicas.yaml", *(["compose.replicas-tp4.yaml"] if gpus_per_engine == 4 else []))
    if profile == "cpu":
        return ("compose.yaml", "compose.cpu.yaml")
    return ("compose.yaml", *(["compose.p2p.yaml"] if p2p else []))


def compose_profile(engines: int) -> str:
    """What COMPOSE_PROFILES must say for so many engines of `replicas`; empty for one, which needs nothing."""
    return f"{engines}-engines" if engines > 1 else ""
