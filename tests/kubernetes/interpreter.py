"""A small interpreter of manifests: typed objects, the pods that they make, and who may talk to whom."""

from dataclasses import dataclass
from typing import Any

from lightkube.models.apps_v1 import Deployment
from lightkube.models.core_v1 import Container, PodSpec, Service
from lightkube.models.meta_v1 import LabelSelector
from lightkube.models.networking_v1 import NetworkPolicy
from lightkube.models.policy_v1 import PodDisruptionBudget
from lightkube.models.resource_v1 import ResourceClaimTemplate
from rendering import templates

TYPES = {
    "Deployment": Deployment,
    "Service": Service,
    "NetworkPolicy": NetworkPolicy,
    "PodDisruptionBudget": PodDisruptionBudget,
    "ResourceClaimTemplate": ResourceClaimTemplate,
}


@dataclass(frozen=True)
class Pod:
    """One pod.

    Attributes:
        role: its container's name.
        host: which host it is on, for pods that a group binds to one; None where the scheduler decides.
    """

    role: str
    labels: dict[str, str]
    spec: PodSpec
    host: int | None

    @property
    def container(self) -> Container:
        (only,) = self.spec.containers
        return only

    @property
    def environment(self) -> dict[str, str]:
        return {item.name: item.value for item in self.container.env}


class World:
    """What a cluster holds after an apply."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.raw = {(item["kind"], item["metadata"]["name"]): item for item in items}
        assert len(self.raw) == len(items), "two objects of one name"
        self.pods = [pod for item in items for pod in _pods(item)]

    def all(self, kind: str) -> list[Any]:
        return [TYPES[kind].from_dict(item) for (found, _), item in self.raw.items() if found == kind]

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [item for (found, _), item in self.raw.items() if found == kind]

    def of(self, role: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.role == role]

    def gpus(self, pod: Pod) -> int:
        """How many GPUs a pod gets, by whichever way it asks; asking twice is a fault."""
        limits = pod.container.resources.limits or {}
        by_plugin = int(limits.get("nvidia.com/gpu", 0))
        claims = {item.name: item.resourceClaimTemplateName for item in pod.spec.resourceClaims or []}
        used = [claim.name for claim in pod.container.resources.claims or []]
        assert sorted(claims) == sorted(used), "a claim that no container uses, or the reverse"
        requests = [request for name in used for request in self.requests(claims[name])]
        by_claim = sum(request.exactly.count for request in requests)
        assert not (by_plugin and by_claim), "the same GPUs asked for twice"
        return by_plugin + by_claim

    def requests(self, template: str) -> list[Any]:
        (found,) = [item for item in self.all("ResourceClaimTemplate") if item.metadata.name == template]
        return found.spec.spec.devices.requests

    def allowed(self, source: dict[str, str] | None, target: dict[str, str] | None, port: int) -> bool:
        """Whether the policies let a connection through.

        Args:
            source: labels of a pod of this namespace, None for anything elsewhere; `target` likewise.
        """
        policies = self.all("NetworkPolicy")
        out = source is None or _passes(policies, source, "Egress", target, port)
        return out and (target is None or _passes(policies, target, "Ingress", source, port))


def matches(selector: LabelSelector | None, labels: dict[str, str]) -> bool:
    """A label selector, of the operators that an export uses."""
    if selector is None:
        return True
    for rule in selector.matchExpressions or []:
        assert rule.operator == "In"
        if labels.get(rule.key) not in rule.values:
            return False
    return (selector.matchLabels or {}).items() <= labels.items()


def _passes(policies: list[NetworkPolicy], own: dict[str, str], way: str, other: Any, port: int) -> bool:
    mine = [item for item in policies if way in item.spec.policyTypes and matches(item.spec.podSelector, own)]
    if not mine:
        return True
    rules = [rule for item in mine for rule in (item.spec.ingress if way == "Ingress" else item.spec.egress) or []]
    for rule in rules:
        peers = getattr(rule, "from_", None) if way == "Ingress" else rule.to
        fits = not rule.ports or port in {item.port for item in rule.ports}
        if fits and (not peers or any(_peer(peer, other) for peer in peers)):
            return True
    return False


def _peer(peer: Any, labels: dict[str, str] | None) -> bool:
    assert not peer.ipBlock
    if peer.namespaceSelector:
        # Pods of other namespaces; a test knows none that fits.
        return False
    return labels is not None and matches(peer.podSelector, labels)


def _pods(item: dict[str, Any]) -> list[Pod]:
    found: list[Pod] = []
    spec = item.get("spec", {})
    grouped = item["kind"] == "LeaderWorkerSet"
    if grouped:
        topology = item["metadata"]["annotations"]["leaderworkerset.sigs.k8s.io/exclusive-topology"]
        assert topology == "kubernetes.io/hostname"
        assert spec["leaderWorkerTemplate"]["size"] == len(templates(item))
    for role, template in templates(item).items():
        for index in range(spec.get("replicas", 1)):
            labels = template["metadata"]["labels"]
            found.append(Pod(role, labels, PodSpec.from_dict(template["spec"]), index if grouped else None))
        if item["kind"] == "Deployment":
            assert matches(Deployment.from_dict(item).spec.selector, template["metadata"]["labels"])
    return found
