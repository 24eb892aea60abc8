"""Kustomize components: each changes one thing of the base, by patches that a person can read."""

from collections.abc import Sequence
from typing import Any

from deploy.kubernetes.cluster import (
    COMPONENT_LABEL,
    METRICS_PORT,
    MODEL_LABEL,
    MONITORING,
    NAME,
    PORT,
    Cluster,
    metadata,
)
from deploy.kubernetes.objects import PAIR, number
from deploy.kubernetes.pods import VOLUMES, cpus, memory, quantity
from deploy.kubernetes.roles import Role
from deploy.kubernetes.yaml_text import Because
from deploy.spec.profiles import ROUTER

Files = dict[str, list[Any]]
"""Documents by the name of their file."""
Patch = tuple[str, dict[str, str], list[dict[str, Any]]]
"""A name, what it changes, and its operations."""
# sm_120, which the kernels are made for.
COMPUTE_CAPABILITY = (12, 0)
# Requests in flight, for each pair or engine, at which another is asked for: of what an engine decodes at once.
FULL = 0.75
WAITING = 8
PROMETHEUS = "http://prometheus-operated.monitoring:9090"


def device_plugin(roles: Sequence[Role], cluster: Cluster) -> Files:
    """GPUs from NVIDIA's device plugin; the kubelet keeps GPUs, processors and memory on one NUMA node."""
    patches: list[Patch] = []
    for role in roles:
        target, pod = _place(role)
        share = {"cpu": str(cpus(role)), "memory": quantity(memory(role)), "nvidia.com/gpu": str(role.gpus)}
        patches.append(
            _patch(
                role.name,
                target,
                {
                    "op": "replace",
                    "path": f"{pod}/containers/0/resources",
                    "value": Because(
                        {"requests": share, "limits": dict(share)},
                        "Requests equal limits and processors are whole, so that the pod is Guaranteed: only then the "
                        "kubelet's static CPU manager and topologyManagerPolicy single-numa-node give it GPUs and "
                        "processors of one NUMA node. Both must be set (docs/kubernetes.md).",
                    ),
                },
                {
                    "op": "add",
                    "path": f"{pod}/containers/0/env/-",
                    "value": Because(
                        {"name": "NUMA_NODES_FROM", "value": "driver"},
                        "The kubelet chooses the node, so --numa-node, which names one, is left out by the entry point "
                        "and SGLang asks the driver. The arguments stay compose.yaml's.",
                    ),
                },
                *(
                    {"op": "add", "path": f"{pod}/nodeSelector/nvidia.com~1gpu.compute.{part}", "value": str(number)}
                    for part, number in zip(("major", "minor"), COMPUTE_CAPABILITY, strict=True)
                ),
            )
        )
    return _component(patches=patches)


def dynamic_allocation(roles: Sequence[Role], cluster: Cluster) -> Files:
    """GPUs from NVIDIA's DRA driver, of the very NUMA node that the arguments name."""
    claims: list[Any] = []
    patches: list[Patch] = []
    major, minor = COMPUTE_CAPABILITY
    for role in roles:
        target, pod = _place(role)
        name = f"{role.name}-gpus"
        conditions = (
            f'device.attributes["gpu.nvidia.com"].cudaComputeCapability.compareTo(semver("{major}.{minor}.0")) == 0',
            Because(
                f'device.attributes["resource.kubernetes.io"].numaNode == {role.numa_node}',
                "The node of the role's --numa-node, which deploy.toml gives.",
            ),
        )
        selectors = [
            Because({"cel": {"expression": condition.value}}, condition.reason)
            if isinstance(condition, Because)
            else {"cel": {"expression": condition}}
            for condition in conditions
        ]
        claims.append(
            {
                "apiVersion": "resource.k8s.io/v1",
                "kind": "ResourceClaimTemplate",
                "metadata": metadata(name, cluster),
                "spec": {
                    "spec": {
                        "devices": {
                            "requests": [
                                {
                                    "name": "gpus",
                                    "exactly": {
                                        "deviceClassName": "gpu.nvidia.com",
                                        "allocationMode": "ExactCount",
                                        "count": role.gpus,
                                        "selectors": selectors,
                                    },
                                }
                            ]
                        }
                    }
                },
            }
        )
        patches.append(
            _patch(
                role.name,
                target,
                {
                    "op": "add",
                    "path": f"{pod}/resourceClaims",
                    "value": [{"name": "gpus", "resourceClaimTemplateName": name}],
                },
                {
                    "op": "add",
                    "path": f"{pod}/containers/0/resources/claims",
                    "value": Because(
                        [{"name": "gpus"}],
                        "The pod stays Burstable: processors of its own would come from a NUMA node that the kubelet "
                        "chooses without looking at the claim. SGLang binds each rank to the GPUs' node itself.",
                    ),
                },
            )
        )
    return {"resource-claims.yaml": claims, **_component(resources=["resource-claims.yaml"], patches=patches)}


def model_claim(roles: Sequence[Role], cluster: Cluster) -> Files:
    """The model from a volume that many nodes read, in the place of a folder on each."""
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata("model", cluster),
        "spec": {
            "accessModes": Because(["ReadOnlyMany"], "Filled before by `deploy model fetch` into the volume."),
            "storageClassName": Because("", "A volume made by hand. Name a class here if one has such volumes."),
            "volumeName": Because("deepseek-v4-flash-sm120-model", "The PersistentVolume with the model."),
            "resources": {"requests": {"storage": "200Gi"}},
        },
    }
    volume = {"name": VOLUMES[0], "persistentVolumeClaim": {"claimName": "model", "readOnly": True}}
    cache = Because(
        {
            "name": VOLUMES[1],
            "ephemeral": {
                "volumeClaimTemplate": {
                    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "20Gi"}}}
                }
            },
        },
        "A volume for each pod, gone with it: every new pod compiles its kernels anew, for minutes.",
    )
    patches: list[Patch] = []
    places = [(role.name, *_place(role)) for role in roles]
    for name, target, pod in [*places, (ROUTER, _deployment(ROUTER), _TEMPLATE)]:
        operations: list[dict[str, Any]] = [
            {"op": "replace", "path": f"{pod}/volumes/0", "value": volume},
            {"op": "remove", "path": f"{pod}/nodeSelector/{MODEL_LABEL.replace('/', '~1')}"},
        ]
        if name != ROUTER:
            operations += [
                {"op": "replace", "path": f"{pod}/volumes/1", "value": cache},
                {
                    "op": "add",
                    "path": f"{pod}/securityContext/fsGroup",
                    "value": Because(roles[0].group, "So that it may write there."),
                },
                {"op": "add", "path": f"{pod}/securityContext/fsGroupChangePolicy", "value": "OnRootMismatch"},
            ]
        patches.append(_patch(name, target, *operations))
    return {"model.yaml": [claim], **_component(resources=["model.yaml"], patches=patches)}


def monitoring(cluster: Cluster) -> Files:
    """Prometheus reads the router, which passes the engines' own metrics on."""
    monitor = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": metadata(ROUTER, cluster, ROUTER),
        "spec": {
            "selector": {"matchLabels": {"app.kubernetes.io/name": NAME, COMPONENT_LABEL: ROUTER}},
            "endpoints": [
                {"port": "metrics", "path": "/metrics", "interval": "15s"},
                Because(
                    {
                        "port": "http",
                        "path": "/engine_metrics",
                        "interval": "15s",
                        "authorization": {"credentials": {"name": "router-keys", "key": "api_key"}},
                    },
                    "The engines themselves are closed to Prometheus, because their admin routes have no key.",
                ),
            ],
        },
    }
    policy = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata("prometheus", cluster),
        "spec": {
            "podSelector": {"matchLabels": {COMPONENT_LABEL: ROUTER}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [
                        {
                            "namespaceSelector": Because(
                                {"matchLabels": {"kubernetes.io/metadata.name": MONITORING}}, "Where Prometheus runs."
                            )
                        }
                    ],
                    "ports": [{"protocol": "TCP", "port": METRICS_PORT}, {"protocol": "TCP", "port": PORT}],
                }
            ],
        },
    }
    resources = ["monitoring.yaml"]
    return {"monitoring.yaml": [monitor, policy], **_component(resources=resources)}


def autoscaling(roles: Sequence[Role], cluster: Cluster) -> Files:
    """KEDA adds and removes pairs or engines by what is in flight and what waits."""
    split = cluster.profile != "replicas"
    answering = roles[-1]
    batch = number(answering, "--max-running-requests", 64)
    # All Deployments of engines follow the same figures, each with its share of them.
    share = 1 if split else len(roles)
    scaled: list[Any] = []
    patches: list[Patch] = []
    for role in roles[:1] if split else roles:
        target = _pair() if split else _deployment(role.name)
        name = target["name"]
        scaled.append(
            {
                "apiVersion": "keda.sh/v1alpha1",
                "kind": "ScaledObject",
                "metadata": metadata(name, cluster),
                "spec": {
                    "scaleTargetRef": {
                        "apiVersion": f"{target['group']}/{target['version']}",
                        "kind": target["kind"],
                        "name": name,
                    },
                    "minReplicaCount": cluster.replicas,
                    "maxReplicaCount": Because(2 * cluster.replicas, "As many hosts with GPUs as there are."),
                    "cooldownPeriod": 900,
                    "advanced": {
                        "horizontalPodAutoscalerConfig": {
                            "behavior": {
                                "scaleDown": Because(
                                    {
                                        "stabilizationWindowSeconds": 900,
                                        "policies": [{"type": "Pods", "value": 1, "periodSeconds": 300}],
                                    },
                                    "Loading takes minutes: what goes must not be missed soon after.",
                                )
                            }
                        }
                    },
                    "triggers": [
                        _trigger(
                            f"{_sum('sglang_num_running_reqs', cluster, answering)} / {share}",
                            round(FULL * batch),
                            f"Requests that are being answered; an engine decodes {batch} at once.",
                        ),
                        _trigger(
                            f"{_sum('sglang_num_queue_reqs', cluster)} / {share}",
                            WAITING,
                            "Requests that wait in an engine's queue.",
                        ),
                    ],
                },
            }
        )
        reason = "KEDA owns the number; applying again must not reset it."
        patches.append(_patch(name, target, {"op": "remove", "path": Because("/spec/replicas", reason)}))
    return {"scaled-objects.yaml": scaled, **_component(resources=["scaled-objects.yaml"], patches=patches)}


_TEMPLATE = "/spec/template/spec"


def _sum(metric: str, cluster: Cluster, only: Role | None = None) -> str:
    """A gauge over all engines. Each router passes every engine on: of several routers' pages one counts."""
    kind = f',engine_type="{only.name}"' if only and cluster.profile != "replicas" else ""
    return f'sum(max without (pod, instance) ({metric}{{namespace="{cluster.namespace}"{kind}}}))'


def _trigger(query: str, threshold: int, reason: str) -> Because:
    return Because(
        {
            "type": "prometheus",
            "metricType": "AverageValue",
            "metadata": {"serverAddress": PROMETHEUS, "query": query, "threshold": str(threshold)},
        },
        reason,
    )


def _place(role: Role) -> tuple[dict[str, str], str]:
    """The object that holds a role's pod template, and the path of the pod in it."""
    if role.name in ("prefill", "decode"):
        template = "leaderTemplate" if role.name == "prefill" else "workerTemplate"
        return _pair(), f"/spec/leaderWorkerTemplate/{template}/spec"
    return _deployment(role.name), _TEMPLATE


def _pair() -> dict[str, str]:
    return {"group": "leaderworkerset.x-k8s.io", "version": "v1", "kind": "LeaderWorkerSet", "name": PAIR}


def _deployment(name: str) -> dict[str, str]:
    return {"group": "apps", "version": "v1", "kind": "Deployment", "name": name}


def _patch(name: str, target: dict[str, str], *operations: dict[str, Any]) -> Patch:
    return name, target, list(operations)


def _component(*, resources: Sequence[str] = (), patches: Sequence[Patch] = ()) -> Files:
    """A component's kustomization and its patches (RFC 6902), a file each."""
    listed = [{"path": f"patch-{name}.yaml", "target": target} for name, target, _ in patches]
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1alpha1",
        "kind": "Component",
        **({"resources": list(resources)} if resources else {}),
        **({"patches": listed} if patches else {}),
    }
    return {
        "kustomization.yaml": [kustomization],
        **{f"patch-{name}.yaml": [operations] for name, _, operations in patches},
    }
