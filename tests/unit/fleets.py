"""Exports for tests, from the repository's own compose files and specs that differ in what they serve."""

import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deploy.kubernetes.cluster import Cluster
from deploy.kubernetes.export import manifests, model_key, peers_key
from deploy.kubernetes.roles import Role, read_roles
from deploy.lock.model import LockedFile, ModelLock
from deploy.spec.load import SpecFile, load
from deploy.spec.profiles import ROUTER
from deploy.stack.compose import stack_of
from deploy.stack.environment import Facts, variables
from deploy.stack.preview import preview

ROOT = Path(__file__).parents[2]
IMAGE = f"registry.lan:5000/deepseek-v4-flash-sm120@sha256:{'0' * 64}"
MODEL = ModelLock(file=(LockedFile(path="config.json", size=7, sha256="1" * 64, sample="2" * 64),))
needs_compose = pytest.mark.skipif(not shutil.which("docker"), reason="there is no docker compose")

TOML = {
    "pd": "",
    "tuned": """
        [decode]
        max_running_requests = 32
        extra_arguments = "--log-level debug --json '{\\"a\\": \\"$(HOME) $X $$\\"}'"
        [router]
        extra_arguments = "--log-level=debug"
        [variables]
        NCCL_DEBUG = "$(POD) $Y"
    """,
    "replicas": """
        profile = "replicas"
        [engine]
        speculation = "eagle"
        [[replica]]
        gpus = [0, 1]
        numa_node = 0
        [[replica]]
        gpus = [4, 5]
        numa_node = 1
        [router]
        extra_arguments = "--log-level=debug"
    """,
    "draft": """
        profile = "replicas"
        [engine]
        speculation = "dspark"
        draft_path = "/models/draft"
        [[replica]]
        gpus = [0, 1, 2, 3]
        numa_node = 1
    """,
    "cpu": 'profile = "cpu"',
}
"""deploy.toml of each fleet."""


@cache
def compose(name: str) -> tuple[SpecFile, dict[str, Any]]:
    """A spec and what Compose makes of it."""
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"fleets-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.toml"
    file.write_text("\n".join(line.strip() for line in TOML[name].splitlines()))
    try:
        spec_file = load(file)
    finally:
        shutil.rmtree(folder)
    stack = stack_of(ROOT, Path(os.devnull), spec_file.spec)
    facts = Facts(image="", model=Path("/model"), api_key_file=None, limits={})
    return spec_file, preview(stack, variables(spec_file, facts))[0]


def roles(name: str) -> dict[str, Role]:
    spec_file, config = compose(name)
    return read_roles(config, spec_file.spec)


def cluster(name: str, *, replicas: int = 2, change: str = "lock 0") -> Cluster:
    spec_file, _ = compose(name)
    engines = [role for role in roles(name).values() if role.name != ROUTER]
    return Cluster(
        profile=spec_file.spec.profile,
        namespace="dsv4-test",
        replicas=replicas,
        image=IMAGE,
        model_folder="/models/DeepSeek-V4-Flash",
        model=model_key(MODEL),
        peers=peers_key(IMAGE, engines),
        change=change,
        draft_folder=spec_file.spec.engine.draft_path or None,
    )


def files(name: str, **settings: Any) -> dict[str, str]:
    """All files of an export."""
    return manifests(roles(name), cluster(name, **settings), MODEL)
