"""All files of an export, and how they replace the ones before."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.errors import DeployError
from deploy.kubernetes import components, objects
from deploy.kubernetes.cluster import Cluster
from deploy.kubernetes.roles import Role
from deploy.kubernetes.yaml_text import Because, documents
from deploy.lock.diff import Change, diff
from deploy.lock.document import FILE_NAME
from deploy.lock.model import Lock, ModelLock, dump, load
from deploy.spec.profiles import ROUTER

BASE, OVERLAYS, COMPONENTS = "base", "overlays", "components"
# An annotation is read in one glance; deploy diff has the rest.
LONGEST_CHANGE = 2000
MANY_CHANGES = 12


def manifests(roles: Mapping[str, Role], cluster: Cluster, model: ModelLock | None) -> dict[str, str]:
    """Every file of an export by its path in the folder.

    Args:
        roles: the engines, then the router.
        model: the locked model's files, None if none is locked.
    """
    engines = [role for name, role in roles.items() if name != ROUTER]
    make = objects.engines if cluster.profile == "replicas" else objects.pairs
    base = {
        "namespace.yaml": objects.namespace(cluster),
        "engines.yaml": make(engines, cluster),
        "router.yaml": objects.router(roles[ROUTER], engines, cluster),
        "disruption.yaml": objects.disruption(roles, cluster),
        "network.yaml": objects.network(cluster),
        "verify.yaml": objects.verify(model, cluster),
    }
    made: dict[str, dict[str, Any]] = {BASE: {"kustomization.yaml": [_kustomization(resources=list(base))], **base}}
    gpus = any(role.gpus for role in engines)
    parts = {
        "model-claim": components.model_claim(engines, cluster),
        "monitoring": components.monitoring(cluster),
        "autoscaling": components.autoscaling(engines, cluster),
    }
    if gpus:
        parts["device-plugin"] = components.device_plugin(engines, cluster)
        parts["dynamic-allocation"] = components.dynamic_allocation(engines, cluster)
    made |= {f"{COMPONENTS}/{name}": files for name, files in parts.items()}
    made |= {f"{OVERLAYS}/{name}": {"kustomization.yaml": [overlay]} for name, overlay in _overlays(gpus).items()}
    return {f"{folder}/{name}": documents(found) for folder, files in made.items() for name, found in files.items()}


def _overlays(gpus: bool) -> dict[str, Any]:
    """The combinations that are written out; any other is a folder like these."""
    plugin = ["device-plugin"] if gpus else []
    found = {
        "model-claim": ([*plugin, "model-claim"], "The model from a volume in the place of a folder on each node."),
        "autoscaled": (
            [*plugin, "monitoring", "autoscaling"],
            "With Prometheus' operator and KEDA: watched, and as many copies as the load needs.",
        ),
    }
    if gpus:
        found["device-plugin"] = (plugin, "GPUs from NVIDIA's device plugin, the model in a folder on each node.")
        found["dynamic-allocation"] = (
            ["dynamic-allocation"],
            "GPUs from NVIDIA's DRA driver, by NUMA node; the model in a folder on each node.",
        )
    else:
        found["plain"] = ([], "No GPU, the model in a folder on each node.")
    return {
        name: Because(
            _kustomization(resources=[f"../../{BASE}"], components=[f"../../{COMPONENTS}/{part}" for part in parts]),
            reason,
        )
        for name, (parts, reason) in sorted(found.items())
    }


def _kustomization(*, resources: Sequence[str], components: Sequence[str] = ()) -> dict[str, Any]:
    return {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(resources),
        **({"components": list(components)} if components else {}),
    }


def model_key(model: ModelLock | None) -> str:
    """Short hash of a locked model, `unlocked` without one: what a node is labelled with."""
    if model is None:
        return "unlocked"
    files = [(file.path, file.size, file.sha256) for file in model.file]
    return hashlib.sha256(json.dumps(files).encode()).hexdigest()[:16]


def peers_key(image: str, engines: Sequence[Role]) -> str:
    """Short hash of what prefill and decode must share: other code or arguments may lay a KV cache out otherwise."""
    content = [image, [[engine.arguments, sorted(engine.environment.items())] for engine in engines]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def change_of(folder: Path, lock: Lock) -> str:
    """What `deploy diff` says between the lock of the export before and this one, short enough for an annotation."""
    key = hashlib.sha256(dump(lock).encode()).hexdigest()[:12]
    former = folder / FILE_NAME
    if not former.exists():
        return f"lock {key}"
    changes = diff(load(former.read_text(encoding="utf-8"), str(former)), lock).changes
    if not changes:
        return f"lock {key}, as before"
    lines = [_line(change) for change in changes[:MANY_CHANGES]]
    more = [f"and {len(changes) - MANY_CHANGES} more"] if len(changes) > MANY_CHANGES else []
    return f"lock {key}: {'; '.join([*lines, *more])}"[:LONGEST_CHANGE]


def _line(change: Change) -> str:
    before, after = (None if text is None else text[:60] for text in (change.before, change.after))
    name = f"{change.section} {change.name}"
    if before is None:
        return f"+ {name} {after}"
    return f"- {name}" if after is None else f"{name} {before} -> {after}"


def write(folder: Path, files: Mapping[str, str], lock: Lock) -> Path | None:
    """Replace a folder of manifests in one step; the one before stays beside it, for the way back.

    Returns:
        The folder with the export before, None if there was none.

    Raises:
        DeployError: the folder holds something that no export wrote.
    """
    former = folder / FILE_NAME
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not former.is_file())):
        raise DeployError(
            f"{folder} holds other files",
            "an export replaces its folder as a whole, and this one was not written by an export",
            "name a folder that does not exist yet",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
    try:
        for name, text in {**files, FILE_NAME: dump(lock)}.items():
            path = staging / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        staging.chmod(0o755)
        previous = folder.with_name(f"{folder.name}.previous")
        kept = previous if former.exists() else None
        if kept:
            if previous.exists():
                shutil.rmtree(previous)
            folder.rename(previous)
        elif folder.exists():
            folder.rmdir()
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return kept
