"""The objects of the base: everything but how GPUs are asked for, where the model lies, and who watches."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy.kubernetes.cluster import (
    COMPONENT_LABEL,
    HOST_KEY,
    METRICS_PORT,
    NAME,
    PORT,
    Cluster,
    component,
    labels,
    metadata,
)
from deploy.kubernetes.pods import engine_template, router_template, spread, verify_name
from deploy.kubernetes.roles import Role
from deploy.kubernetes.yaml_text import Because
from deploy.lock.model import ModelLock
from deploy.lock.options import options
from deploy.model import sampling
from deploy.spec.profiles import ROUTER

PAIR = "pair"
CHANGE_CAUSE = "kubernetes.io/change-cause"
LEAST_ROUTERS = 2
LIMITS = "no limit of processors: throttling costs latency"
# What a policy scan objects to, and why it stays (checkov.io, suppressing policies).
ENGINE_EXCEPTIONS = {
    "CKV_K8S_8": "a stuck engine is ended by its own watchdog, and restarting one that is only slow costs minutes",
    "CKV_K8S_11": f"{LIMITS}; the device-plugin component sets one, for whole processors",
    "CKV_K8S_25": "SYS_NICE opens set_mempolicy in the seccomp profile; the processes are not root and do not hold it",
}
ROUTER_EXCEPTIONS = {
    "CKV_K8S_11": LIMITS,
    "CKV_K8S_38": "service discovery asks Kubernetes for pods, which is all that its role allows",
}
ENGINE_COMPONENTS = ("prefill", "decode", "engine")


def namespace(cluster: Cluster) -> list[Any]:
    """The namespace."""
    level = Because(
        "privileged",
        "The levels below refuse SYS_NICE, which compose.yaml gives the engines too, and folders of the node. No "
        "container here is privileged.",
    )
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {
                "name": cluster.namespace,
                "labels": {
                    "app.kubernetes.io/name": NAME,
                    "app.kubernetes.io/managed-by": "deploy",
                    "pod-security.kubernetes.io/enforce": level,
                },
            },
        }
    ]


def pairs(roles: Sequence[Role], cluster: Cluster) -> list[Any]:
    """Prefill and decode as groups that are placed and replaced as one."""
    prefill, decode = roles
    exclusive = Because(
        HOST_KEY, "Both pods of a group on one host, and no second group there: the KV cache need not leave the host."
    )
    return [
        Because(
            {
                "apiVersion": "leaderworkerset.x-k8s.io/v1",
                "kind": "LeaderWorkerSet",
                "metadata": metadata(
                    PAIR,
                    cluster,
                    annotations={
                        "leaderworkerset.sigs.k8s.io/exclusive-topology": exclusive,
                        **_annotations(cluster, ENGINE_EXCEPTIONS),
                    },
                ),
                "spec": {
                    "replicas": Because(cluster.replicas, "Pairs, one a host."),
                    "startupPolicy": Because("LeaderCreated", "Both load at the same time."),
                    "rolloutStrategy": {
                        "type": "RollingUpdate",
                        "rollingUpdateConfiguration": Because(
                            {"maxUnavailable": 1, "maxSurge": 0},
                            "A pair is replaced whole and on its own host. With a spare host: maxUnavailable 0, "
                            "maxSurge 1.",
                        ),
                    },
                    "leaderWorkerTemplate": {
                        "size": 2,
                        "restartPolicy": Because(
                            "None",
                            "A role that dies is restarted alone, as with compose.yaml; the other keeps its weights.",
                        ),
                        "leaderTemplate": engine_template(prefill, cluster),
                        "workerTemplate": engine_template(decode, cluster),
                    },
                },
            },
            "A pair as one pod would share its ports; as two Deployments it could be half replaced.",
        )
    ]


def engines(roles: Sequence[Role], cluster: Cluster) -> list[Any]:
    """Engines that do both, a Deployment for each of deploy.toml's."""
    found: list[Any] = []
    for role in roles:
        template = engine_template(role, cluster)
        template["spec"] = {"topologySpreadConstraints": [spread(role)], **template["spec"]}
        found.append(
            {
                "apiVersion": "apps/v1",
                "kind": "Deployment",
                "metadata": metadata(
                    role.name, cluster, component(role), annotations=_annotations(cluster, ENGINE_EXCEPTIONS)
                ),
                "spec": {
                    "replicas": Because(cluster.replicas, "One a host."),
                    "selector": {"matchLabels": labels(role)},
                    "strategy": {
                        "type": "RollingUpdate",
                        "rollingUpdate": Because(
                            {"maxUnavailable": 0, "maxSurge": 1},
                            "The new engine serves before the old one goes, for which the GPUs of one engine must be "
                            "free. Without any: maxUnavailable 1, maxSurge 0.",
                        ),
                    },
                    "progressDeadlineSeconds": Because(
                        round(role.health.start_period) + 600, "Loading and compiling take minutes."
                    ),
                    "template": template,
                },
            }
        )
    return found


def router(role: Role, engine_roles: Sequence[Role], cluster: Cluster) -> list[Any]:
    """The router, its right to look up pods, and the one Service."""
    return [
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": metadata(ROUTER, cluster, ROUTER),
            "automountServiceAccountToken": False,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": metadata(ROUTER, cluster, ROUTER),
            "rules": [
                Because(
                    {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
                    "All that service discovery does.",
                )
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": metadata(ROUTER, cluster, ROUTER),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": ROUTER},
            "subjects": [{"kind": "ServiceAccount", "name": ROUTER, "namespace": cluster.namespace}],
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": metadata(ROUTER, cluster, ROUTER, annotations=_annotations(cluster, ROUTER_EXCEPTIONS)),
            "spec": {
                "replicas": Because(
                    router_count(role, engine_roles, cluster),
                    "Each knows all engines and takes --max-concurrent-requests; together they take what the engines "
                    "decode at once, and one may go with its host.",
                ),
                "selector": {"matchLabels": labels(role)},
                "strategy": {
                    "type": "RollingUpdate",
                    "rollingUpdate": Because(
                        {"maxUnavailable": 0, "maxSurge": 1},
                        "A new router becomes ready only once engines of its own kind are there.",
                    ),
                },
                "template": router_template(role, cluster, engine_roles),
            },
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(ROUTER, cluster, ROUTER),
            "spec": {
                "type": Because(
                    "ClusterIP", "Not outside the cluster unless an ingress or a load balancer is put before it."
                ),
                "selector": labels(role),
                "ports": [
                    {"name": "http", "port": PORT, "targetPort": "http"},
                    {"name": "metrics", "port": METRICS_PORT, "targetPort": "metrics"},
                ],
            },
        },
    ]


def disruption(roles: Mapping[str, Role], cluster: Cluster) -> list[Any]:
    """The priority of the engines, and how many of each kind a drain of nodes must leave."""
    priority = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {
            "name": NAME,
            "labels": {"app.kubernetes.io/name": NAME, "app.kubernetes.io/managed-by": "deploy"},
        },
        "value": 100000,
        "preemptionPolicy": Because("Never", "It waits for room itself and throws nobody out."),
        "description": "Engines that take minutes to load, and their router.",
    }
    found: list[Any] = [priority]
    engine_roles = [role for role in roles.values() if role.name != ROUTER]
    reason = "A drain takes one host at a time. With a single copy it waits until somebody deletes the pod by hand."
    for role in roles.values():
        copies = router_count(role, engine_roles, cluster) if role.name == ROUTER else cluster.replicas
        found.append(
            {
                "apiVersion": "policy/v1",
                "kind": "PodDisruptionBudget",
                "metadata": metadata(role.name, cluster, component(role)),
                "spec": {
                    "minAvailable": Because(max(copies - 1, 1), reason),
                    "unhealthyPodEvictionPolicy": Because("AlwaysAllow", "One that does not serve holds up no drain."),
                    "selector": {"matchLabels": labels(role)},
                },
            }
        )
    return found


def router_count(router_role: Role, engine_roles: Sequence[Role], cluster: Cluster) -> int:
    """So many routers that their limits of requests in flight do not keep the engines from being full."""
    answering = engine_roles[-1:] if cluster.profile != "replicas" else engine_roles
    in_flight = sum(number(role, "--max-running-requests", 64) for role in answering) * cluster.replicas
    return max(LEAST_ROUTERS, math.ceil(in_flight / number(router_role, "--max-concurrent-requests", 256)))


def number(role: Role, option: str, default: int) -> int:
    """The value of a numeric argument of a role; the last one counts."""
    values = options([*role.arguments, *shlex.split(role.environment.get("EXTRA_ARGUMENTS", ""))])
    found = values.get(option, ())
    return int(found[0]) if found else default


def network(cluster: Cluster) -> list[Any]:
    """Who may talk to whom: only the router is reachable."""
    engine_pods = {"matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": list(ENGINE_COMPONENTS)}]}
    router_pods = {"matchLabels": {COMPONENT_LABEL: ROUTER}}
    split = cluster.profile != "replicas"
    peers = Because(
        [{"podSelector": engine_pods}],
        "All ports: NIXL and UCX choose theirs. Also another pair's, since the router chooses prefill and decode "
        "each by itself.",
    )
    from_router = {"from": [{"podSelector": router_pods}], "ports": [{"protocol": "TCP", "port": PORT}]}
    api = Because(
        {"ports": [{"protocol": "TCP", "port": 443}, {"protocol": "TCP", "port": 6443}]},
        "Kubernetes' own API, whose address only the cluster knows: an ipBlock here would narrow it.",
    )
    return [
        Because(
            _policy("nobody", cluster, {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}),
            "What no other policy allows is refused.",
        ),
        _policy(
            "engines",
            cluster,
            {
                "podSelector": engine_pods,
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [
                    Because(from_router, "Their admin routes have no key."),
                    *([{"from": peers}] if split else []),
                ],
                **({"egress": [{"to": [{"podSelector": engine_pods}]}]} if split else {}),
            },
        ),
        _policy(
            ROUTER,
            cluster,
            {
                "podSelector": router_pods,
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [
                    Because({"ports": [{"protocol": "TCP", "port": PORT}]}, "From everywhere: it asks for a key.")
                ],
                "egress": [{"to": [{"podSelector": engine_pods}], "ports": [{"protocol": "TCP", "port": PORT}]}, api],
            },
        ),
    ]


def verify(model: ModelLock | None, cluster: Cluster) -> list[Any]:
    """What the init container runs, and the locked model's files that it asks for."""
    files = [{"path": file.path, "size": file.size, "sample": file.sample} for file in model.file] if model else []
    listed = "[\n" + ",\n".join(json.dumps(file) for file in files) + "\n]" if files else "[]"
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata(verify_name(cluster), cluster),
            "immutable": Because(True, "Another model has another name, so that pods which run keep theirs."),
            "data": {
                "model.json": f'{{"file": {listed}}}\n',
                "sampling.py": Path(sampling.__file__).read_text(encoding="utf-8"),
            },
        }
    ]


def _annotations(cluster: Cluster, exceptions: Mapping[str, str]) -> dict[str, str]:
    found = {CHANGE_CAUSE: cluster.change}
    for number, (check, reason) in enumerate(exceptions.items(), 1):
        found[f"checkov.io/skip{number}"] = f"{check}={reason}"
    return found


def _policy(name: str, cluster: Cluster, spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(name, cluster),
        "spec": spec,
    }
