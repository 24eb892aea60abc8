"""A role's pod: what compose.yaml says of its container, in Kubernetes' words."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deploy.kubernetes.cluster import (
    BOOTSTRAP_PORT,
    COMPONENT_LABEL,
    METRICS_PORT,
    MODEL_LABEL,
    NAME,
    PEERS_LABEL,
    PORT,
    Cluster,
    labels,
    pod_labels,
)
from deploy.kubernetes.roles import Role
from deploy.kubernetes.yaml_text import Because
from deploy.spec.profiles import ROUTER

GIBIBYTE = 1 << 30
CPUS_PER_RANK = 4
# Of a rank: CUDA's context, torch, pinned buffers. Not measured on the target; without a GPU a role takes 2.4 GiB.
RANK_BYTES = 16 * GIBIBYTE
# Before SIGTERM: the router hears at once that a pod is going, and this long what it sent before may still arrive.
DRAIN_SECONDS = 10
MODEL_MOUNT, DRAFT_MOUNT, CACHE_MOUNT = "/model", "/draft", "/var/cache/engine"
VERIFY_MOUNT = "/verify"
# Their places in the list, by which components replace them.
VOLUMES = ("model", "jit-cache")
# Arguments of the router that name workers one by one, which service discovery does instead.
FIXED_WORKERS = ("--prefill", "--decode", "--worker-urls")


def engine_template(role: Role, cluster: Cluster) -> dict[str, Any]:
    """Pod template of an engine, without GPUs: how they are asked for is a component of its own."""
    annotations = {
        "sglang.ai/bootstrap-port": Because(str(BOOTSTRAP_PORT), "The router reads prefill's second port here.")
    }
    return {
        "metadata": {
            "labels": pod_labels(role, cluster),
            **({"annotations": annotations} if role.name == "prefill" else {}),
        },
        "spec": {
            "automountServiceAccountToken": Because(False, "An engine asks nothing of Kubernetes."),
            "enableServiceLinks": Because(False, "The environment is compose.yaml's and nothing else."),
            "priorityClassName": Because(NAME, "A batch job does not displace an engine that took minutes to load."),
            "terminationGracePeriodSeconds": Because(
                DRAIN_SECONDS + role.grace_s, f"{DRAIN_SECONDS} s of draining, then compose.yaml's grace."
            ),
            "nodeSelector": {
                "kubernetes.io/arch": "amd64",
                MODEL_LABEL: Because(
                    cluster.model,
                    "Set on a node once `deploy model verify --full` has passed there (docs/kubernetes.md).",
                ),
            },
            "tolerations": [
                Because(
                    {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
                    "GPU nodes are often tainted against everything else.",
                )
            ],
            "securityContext": _pod_security(role),
            "initContainers": [_verify(role, cluster)],
            "containers": [_engine(role, cluster)],
            "volumes": _engine_volumes(role, cluster),
        },
    }


def router_template(role: Role, cluster: Cluster, engines: Sequence[Role]) -> dict[str, Any]:
    """Pod template of the router, which finds the engines by their labels."""
    return {
        "metadata": {"labels": pod_labels(role, cluster)},
        "spec": {
            "serviceAccountName": ROUTER,
            "automountServiceAccountToken": Because(
                True, "The one pod that asks Kubernetes something: which engines there are."
            ),
            "enableServiceLinks": False,
            "priorityClassName": NAME,
            "terminationGracePeriodSeconds": Because(
                DRAIN_SECONDS + role.grace_s,
                f"{DRAIN_SECONDS} s in which load balancers forget it, then compose.yaml's grace.",
            ),
            "nodeSelector": {
                "kubernetes.io/arch": "amd64",
                MODEL_LABEL: Because(cluster.model, "It reads the tokenizer from the model's folder."),
            },
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "topologySpreadConstraints": [spread(role)],
            "securityContext": _pod_security(role),
            "containers": [_router(role, cluster, engines)],
            "volumes": [
                _model_volume(cluster),
                {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(role.tmp_bytes)}},
                {
                    "name": "keys",
                    "secret": {
                        "secretName": Because(
                            "router-keys", "Not in this folder; docs/kubernetes.md makes it. Without it nothing starts."
                        ),
                        "defaultMode": Because(0o444, f"Read by user {role.user}."),
                    },
                },
            ],
        },
    }


def spread(role: Role) -> dict[str, Any]:
    """Copies of a role over hosts, as far as there are hosts with room."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": Because("ScheduleAnyway", "While a new lock rolls out there may be one more than hosts."),
        "labelSelector": {"matchLabels": labels(role)},
    }


def environment(role: Role) -> list[dict[str, str]]:
    """A role's environment as a container's `env`; `$` is doubled, because Kubernetes expands `$(NAME)`."""
    return [{"name": name, "value": escaped(value)} for name, value in role.environment.items()]


def router_role(role: Role, cluster: Cluster, engines: Sequence[Role]) -> Role:
    """The router with service discovery in the place of the workers that compose.yaml names."""
    found, place = _without_workers(list(role.arguments))
    discovery = [
        "--service-discovery",
        f"--service-discovery-namespace={cluster.namespace}",
        f"--service-discovery-port={PORT}",
    ]
    if cluster.profile == "replicas":
        discovery += ["--selector", *selector({COMPONENT_LABEL: "engine"})]
    else:
        for engine in engines:
            own = {COMPONENT_LABEL: engine.name, PEERS_LABEL: cluster.peers}
            discovery += [f"--{engine.name}-selector", *selector(own)]
    place = len(found) if place is None else place
    extra, _ = _without_workers(shlex.split(role.environment.get("EXTRA_ARGUMENTS", "")))
    return replace(
        role,
        arguments=(*found[:place], *discovery, *found[place:]),
        environment={**role.environment, "EXTRA_ARGUMENTS": shlex.join(extra)},
    )


def selector(wanted: dict[str, str]) -> list[str]:
    """Labels as the router's selectors take them."""
    return [f"{key}={value}" for key, value in {"app.kubernetes.io/name": NAME, **wanted}.items()]


def escaped(value: str) -> str:
    """A text that Kubernetes leaves as it is: it reads `$$` as `$` and `$(NAME)` as a variable."""
    return value.replace("$", "$$")


def quantity(size: int) -> str:
    """Bytes as Kubernetes writes them."""
    for unit, factor in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if size % factor == 0 and size:
            return f"{size // factor}{unit}"
    return str(size)


def cpus(role: Role) -> int:
    """Whole processors of an engine."""
    return CPUS_PER_RANK * max(role.gpus, 1)


def memory(role: Role) -> int:
    """Bytes of an engine: its ranks, and what of its two folders in memory may be full."""
    return RANK_BYTES * max(role.gpus, 1) + role.tmp_bytes + role.shm_bytes


def _without_workers(arguments: list[str]) -> tuple[list[str], int | None]:
    """Arguments without those that name workers, and where the first of these stood."""
    kept: list[str] = []
    place: int | None = None
    dropping = False
    for argument in arguments:
        if argument.startswith("--"):
            dropping = argument.partition("=")[0] in FIXED_WORKERS
            if dropping and place is None:
                place = len(kept)
        if not dropping:
            kept.append(argument)
    return kept, place


def _pod_security(role: Role) -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": role.user,
        "runAsGroup": role.group,
        "seccompProfile": Because({"type": "RuntimeDefault"}, "What Docker gives by itself."),
    }


def _container_security(role: Role) -> dict[str, Any]:
    added = Because(
        list(role.capabilities),
        "The runtime's seccomp profile allows set_mempolicy, which binds a rank's memory to its NUMA node, only where "
        "this is in the bounding set. The processes are not root and hold no capability.",
    )
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": role.read_only,
        "capabilities": {"drop": ["ALL"], **({"add": added} if role.capabilities else {})},
    }


def _verify(role: Role, cluster: Cluster) -> dict[str, Any]:
    """Holds the model's files against deploy.lock before the engine reads them."""
    small = {"cpu": "1", "memory": "1Gi"}
    return {
        "name": Because(
            "verify-model", "Sizes and samples of every file, in a moment: a cut or mixed-up folder stops here."
        ),
        "image": cluster.image,
        "command": [*role.command[:2], "python", f"{VERIFY_MOUNT}/sampling.py"],
        "args": [f"{VERIFY_MOUNT}/model.json", MODEL_MOUNT],
        "resources": {"requests": small, "limits": dict(small)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "model", "mountPath": MODEL_MOUNT, "readOnly": True},
            {"name": "verify", "mountPath": VERIFY_MOUNT, "readOnly": True},
        ],
    }


def _engine(role: Role, cluster: Cluster) -> dict[str, Any]:
    ports = [{"name": "http", "containerPort": PORT}]
    if role.name == "prefill":
        ports.append({"name": "bootstrap", "containerPort": BOOTSTRAP_PORT})
    size = quantity(memory(role))
    return {
        "name": role.name,
        **_program(role, cluster),
        "ports": ports,
        "resources": {
            "requests": {"cpu": str(cpus(role)), "memory": size},
            "limits": Because(
                {"memory": size},
                "No limit of processors: throttling costs latency. The model's pages in the cache count and are given "
                "back when memory is short.",
            ),
        },
        "securityContext": _container_security(role),
        "startupProbe": Because(
            _probe(role, period=role.health.start_interval, failures=_start_failures(role)),
            "compose.yaml's health check while it starts: often, and failures do not count.",
        ),
        "readinessProbe": Because(
            _probe(role, period=role.health.interval, failures=role.health.retries),
            "compose.yaml's health check afterwards. There is no livenessProbe: a stuck engine is ended by its own "
            "watchdog, and restarting one that is only slow costs minutes.",
        ),
        "lifecycle": _drain(),
        "volumeMounts": [*_mounts(role, cluster), {"name": "shm", "mountPath": "/dev/shm"}],
    }


def _router(role: Role, cluster: Cluster, engines: Sequence[Role]) -> dict[str, Any]:
    return {
        "name": role.name,
        **_program(router_role(role, cluster, engines), cluster),
        "ports": [{"name": "http", "containerPort": PORT}, {"name": "metrics", "containerPort": METRICS_PORT}],
        "resources": {
            "requests": {"cpu": "1", "memory": "1Gi"},
            "limits": Because({"memory": "4Gi"}, "No limit of processors: throttling costs latency."),
        },
        "securityContext": _container_security(role),
        "readinessProbe": Because(
            _probe(role, period=role.health.interval, failures=role.health.retries),
            "compose.yaml's health check: one healthy worker of each kind. No startupProbe: a router whose engines are "
            "still loading waits for them, which may take longer than any start period.",
        ),
        "livenessProbe": Because(
            {
                "httpGet": {"path": "/liveness", "port": "http"},
                "periodSeconds": 15,
                "timeoutSeconds": 5,
                "failureThreshold": 4,
            },
            "Answers whatever the workers do; a restart costs a router seconds.",
        ),
        "lifecycle": _drain(),
        "volumeMounts": [
            *_mounts(role, cluster),
            *(
                {"name": "keys", "mountPath": f"/run/secrets/{name}", "subPath": name, "readOnly": True}
                for name in role.secrets
            ),
        ],
    }


def _program(role: Role, cluster: Cluster) -> dict[str, Any]:
    return {
        "image": cluster.image,
        "imagePullPolicy": Because("IfNotPresent", "A digest never means another image later."),
        "command": list(map(escaped, role.command)),
        "args": list(map(escaped, role.arguments)),
        "env": environment(role),
    }


def _probe(role: Role, *, period: float, failures: int) -> dict[str, Any]:
    return {
        "exec": {"command": list(role.health.command)},
        "periodSeconds": round(period),
        "timeoutSeconds": round(role.health.timeout),
        "failureThreshold": failures,
    }


def _start_failures(role: Role) -> int:
    return math.ceil(role.health.start_period / role.health.start_interval)


def _drain() -> dict[str, Any]:
    return {"preStop": {"sleep": {"seconds": DRAIN_SECONDS}}}


def _mounts(role: Role, cluster: Cluster) -> list[dict[str, Any]]:
    draft = "draft" if cluster.draft_folder else "model"
    volumes = {MODEL_MOUNT: "model", DRAFT_MOUNT: draft, CACHE_MOUNT: "jit-cache"}
    found = [
        {"name": volumes[folder], "mountPath": folder, **({"readOnly": True} if read_only else {})}
        for folder, read_only in role.mounts.items()
    ]
    return [*found, {"name": "tmp", "mountPath": "/tmp"}]


def _engine_volumes(role: Role, cluster: Cluster) -> list[Any]:
    volumes = [
        _model_volume(cluster),
        Because(
            {"name": "jit-cache", "hostPath": {"path": cluster.cache_folder, "type": "Directory"}},
            "Kernels compiled at the first start, which takes minutes, are there at the next. On every node: install "
            f"-d -o {role.user} -g {role.group} {cluster.cache_folder}",
        ),
        Because(
            {"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(role.tmp_bytes)}},
            "Limits, not reservations; both count as the container's memory.",
        ),
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(role.shm_bytes)}},
        {"name": "verify", "configMap": {"name": verify_name(cluster)}},
    ]
    if cluster.draft_folder and DRAFT_MOUNT in role.mounts:
        volumes.append({"name": "draft", "hostPath": {"path": cluster.draft_folder, "type": "Directory"}})
    return volumes


def _model_volume(cluster: Cluster) -> Because:
    return Because(
        {"name": "model", "hostPath": {"path": cluster.model_folder, "type": "Directory"}},
        "Directory: a node without it is an error and not an empty folder made by root.",
    )


def verify_name(cluster: Cluster) -> str:
    """Name of the ConfigMap with the locked model's files; another model has another."""
    return f"verify-model-{cluster.model}"
