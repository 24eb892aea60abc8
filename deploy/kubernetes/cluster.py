"""Where the manifests go: the few facts that are neither in deploy.toml nor in deploy.lock, and the names of things."""

from dataclasses import dataclass

from deploy.kubernetes.roles import Role
from deploy.spec.profiles import ROUTER, Profile

NAME = "deepseek-v4-flash-sm120"
MODEL_FOLDER = f"/var/lib/{NAME}/model"
CACHE_FOLDER = f"/var/lib/{NAME}/jit-cache"
MODEL_LABEL = f"{NAME}/model"
PEERS_LABEL = f"{NAME}/peers"
COMPONENT_LABEL = "app.kubernetes.io/component"
ROLE_LABEL = f"{NAME}/role"
HOST_KEY = "kubernetes.io/hostname"
PORT, BOOTSTRAP_PORT, METRICS_PORT = 30000, 8998, 29000
MONITORING = "monitoring"


@dataclass(frozen=True)
class Cluster:
    """What an export is for.

    Attributes:
        replicas: copies of what deploy.toml describes, one for each host.
        image: by digest.
        model_folder: where the model lies on every node; `draft_folder` likewise, None if it is in there.
        model: short hash of the locked model files.
        peers: short hash of what prefill and decode must have in common to exchange a KV cache.
        change: what differs from the export before, for the change-cause annotation.
    """

    profile: Profile
    namespace: str
    replicas: int
    image: str
    model_folder: str
    model: str
    peers: str
    change: str
    draft_folder: str | None = None
    cache_folder: str = CACHE_FOLDER


def component(role: Role) -> str:
    """What a role does: several engines of one kind do the same."""
    return "engine" if role.name.startswith("engine") else role.name


def labels(role: Role) -> dict[str, str]:
    """The labels by which a role's pods are selected. They never change, since selectors may not."""
    own = {ROLE_LABEL: role.name} if component(role) == "engine" else {}
    return {"app.kubernetes.io/name": NAME, COMPONENT_LABEL: component(role), **own}


def pod_labels(role: Role, cluster: Cluster) -> dict[str, str]:
    """All labels of a role's pods."""
    split = cluster.profile != "replicas" and role.name != ROUTER
    return {**labels(role), **({PEERS_LABEL: cluster.peers} if split else {})}


def metadata(name: str, cluster: Cluster, kind: str = "", **more: object) -> dict[str, object]:
    """Metadata of an object in the namespace.

    Args:
        kind: the component that it belongs to, empty for all.
    """
    own = {"app.kubernetes.io/name": NAME, **({COMPONENT_LABEL: kind} if kind else {})}
    managed = {"app.kubernetes.io/managed-by": "deploy"}
    return {"name": name, "namespace": cluster.namespace, "labels": {**own, **managed}, **more}
