"""What must hold of every overlay, whatever it is written as."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from engine_runtime import launch, secret_files
from interpreter import Pod, World, matches
from rendering import FLEETS, overlays, rendered

ENGINES = ("prefill", "decode", "engine", "engine-2")
FOREIGN = {"app.kubernetes.io/name": "something-else"}


@pytest.fixture(params=overlays(), ids="-".join)
def world(request: pytest.FixtureRequest, exports: dict[str, Path]) -> World:
    return World(rendered(exports, *request.param))


def other(exports: dict[str, Path], name: str, overlay: str) -> World:
    return World(rendered(exports, name, overlay))


def numa_nodes(pod: Pod) -> list[str]:
    """The nodes that SGLang itself is told, by the very entry point that the container runs."""
    arguments = launch.arguments(pod.container.args, pod.environment)[1]
    if "--numa-node" not in arguments:
        return []
    rest = arguments[arguments.index("--numa-node") + 1 :]
    return rest[: next((place for place, word in enumerate(rest) if word.startswith("-")), len(rest))]


def test_every_gpu_is_asked_for_once_and_as_many_as_the_role_expects(world: World) -> None:
    for pod in world.pods:
        assert world.gpus(pod) == int(pod.environment.get("EXPECTED_GPUS", 0)), pod.role
    for host in {pod.host for pod in world.pods} - {None}:
        assert Counter(pod.role for pod in world.pods if pod.host == host) == {"prefill": 1, "decode": 1}
        assert sum(world.gpus(pod) for pod in world.pods if pod.host == host) in (0, 8)


def test_gpus_and_ranks_are_on_one_numa_node(world: World) -> None:
    for pod in world.pods:
        if not world.gpus(pod):
            continue
        named = set(numa_nodes(pod))
        if claims := pod.spec.resourceClaims:
            (request,) = world.requests(claims[0].resourceClaimTemplateName)
            terms = " ".join(item.cel.expression for item in request.exactly.selectors)
            assert named == set(re.findall(r"numaNode == (\d+)", terms))
            assert len(named) == 1
            assert pod.container.resources.limits.keys() == {"memory"}
        else:
            # The kubelet chooses the node: only a Guaranteed pod with whole processors is kept on one.
            assert named == set()
            for container in [*pod.spec.initContainers, pod.container]:
                limits = container.resources.limits
                assert container.resources.requests == limits
                assert limits["cpu"].isdigit()


@pytest.mark.parametrize("name", FLEETS)
def test_overlays_leave_arguments_and_environment_as_the_base_has_them(exports: dict[str, Path], name: str) -> None:
    base = World(rendered(exports, name, "../base"))
    for _, overlay in [item for item in overlays() if item[0] == name]:
        for pod in other(exports, name, overlay).pods:
            (mine, *_) = base.of(pod.role)
            assert pod.container.args == mine.container.args
            more = dict(pod.environment.items() - mine.environment.items())
            asks_driver = bool((pod.container.resources.limits or {}).get("nvidia.com/gpu"))
            assert more == ({"NUMA_NODES_FROM": "driver"} if asks_driver else {})
            assert mine.environment.keys() <= pod.environment.keys()


def test_every_container_is_probed_and_runs_without_rights(world: World) -> None:
    for pod in world.pods:
        assert pod.container.readinessProbe
        assert not (pod.spec.hostNetwork or pod.spec.hostPID or pod.spec.hostIPC or pod.spec.shareProcessNamespace)
        assert pod.spec.enableServiceLinks is False
        assert pod.spec.securityContext.runAsNonRoot
        assert pod.spec.securityContext.seccompProfile.type == "RuntimeDefault"
        for container in [*(pod.spec.initContainers or []), pod.container]:
            assert re.fullmatch(r"[^@]+@sha256:[0-9a-f]{64}", container.image)
            security = container.securityContext
            assert not security.privileged
            assert security.allowPrivilegeEscalation is False
            assert security.readOnlyRootFilesystem
            assert security.capabilities.drop == ["ALL"]
            assert set(security.capabilities.add or []) <= {"SYS_NICE"}
            assert container.resources.limits["memory"]
            assert container.resources.requests["cpu"]


def test_every_name_that_an_object_uses_is_there(world: World) -> None:
    for pod in world.pods:
        volumes = {volume.name: volume for volume in pod.spec.volumes}
        for container in [*(pod.spec.initContainers or []), pod.container]:
            assert {mount.name for mount in container.volumeMounts} <= volumes.keys()
        for volume in volumes.values():
            if volume.configMap:
                assert ("ConfigMap", volume.configMap.name) in world.raw
            if volume.persistentVolumeClaim:
                assert ("PersistentVolumeClaim", volume.persistentVolumeClaim.claimName) in world.raw
            if volume.hostPath:
                assert volume.hostPath.type == "Directory"
        assert ("PriorityClass", pod.spec.priorityClassName) in world.raw
        if pod.role == "router":
            assert ("ServiceAccount", pod.spec.serviceAccountName) in world.raw
        else:
            assert pod.spec.automountServiceAccountToken is False
            assert [container.name for container in pod.spec.initContainers] == ["verify-model"]
    for item in world.kinds("ScaledObject"):
        target = item["spec"]["scaleTargetRef"]
        assert "replicas" not in world.raw[target["kind"], target["name"]]["spec"]


def test_a_service_and_a_budget_select_pods_that_there_are(world: World) -> None:
    (service,) = world.all("Service")
    chosen = [pod for pod in world.pods if service.spec.selector.items() <= pod.labels.items()]
    assert {pod.role for pod in chosen} == {"router"}
    ports = {port.name for pod in chosen for port in pod.container.ports}
    assert {port.targetPort for port in service.spec.ports} <= ports
    budgets = world.all("PodDisruptionBudget")
    for pod in world.pods:
        (only,) = [item for item in budgets if matches(item.spec.selector, pod.labels)]
        assert only.spec.minAvailable >= 1


def test_only_the_router_can_be_reached_and_engines_reach_nothing_else(world: World) -> None:
    labels = {pod.role: pod.labels for pod in world.pods}
    router = labels.pop("router")
    split = "prefill" in labels
    for port in (30000, 8998, 19090, 12345):
        assert world.allowed(None, router, port) == (port == 30000)
        assert world.allowed(FOREIGN, router, port) is False, "a pod of the namespace that no policy lets out"
        for role, own in labels.items():
            assert not world.allowed(None, own, port)
            assert not world.allowed(FOREIGN, own, port)
            assert not world.allowed(own, None, port)
            assert world.allowed(router, own, port) == (port == 30000)
            for peer in labels.values():
                assert world.allowed(own, peer, port) == split, role
    assert world.allowed(router, None, 443)
    assert not world.allowed(router, None, 80)


def test_a_rollout_takes_a_pair_at_a_time_and_no_engine_before_its_successor_serves(world: World) -> None:
    for item in world.kinds("LeaderWorkerSet"):
        rolling = item["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
        assert rolling == {"maxUnavailable": 1, "maxSurge": 0}
        assert item["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "None"
    for item in world.all("Deployment"):
        rolling = item.spec.strategy.rollingUpdate
        assert (rolling.maxUnavailable, rolling.maxSurge) == (0, 1)
    for (kind, _), item in world.raw.items():
        if kind in ("LeaderWorkerSet", "Deployment"):
            assert item["metadata"]["annotations"]["kubernetes.io/change-cause"]


def test_keys_are_files_and_in_no_manifest(world: World) -> None:
    assert not world.kinds("Secret")
    for pod in world.pods:
        assert not any(item.valueFrom for item in pod.container.env)
    (pod, *_) = world.of("router")
    (keys,) = [volume.secret for volume in pod.spec.volumes if volume.secret]
    assert not keys.optional
    mounted = {mount.mountPath: mount.subPath for mount in pod.container.volumeMounts if mount.subPath}
    assert mounted == {str(file): file.name for file in (secret_files.KEYS_FILE, secret_files.ADMIN_KEY_FILE)}


def change(items: list[dict[str, Any]], kind: str, **values: Any) -> list[dict[str, Any]]:
    return [{**item, "spec": {**item["spec"], **values}} if item["kind"] == kind else item for item in items]


def test_the_interpreter_sees_what_is_wrong(exports: dict[str, Path]) -> None:
    items = rendered(exports, "pd", "device-plugin")
    open_ = World(change(items, "NetworkPolicy", policyTypes=[]))
    assert open_.allowed(None, open_.of("decode")[0].labels, 30000)
    with pytest.raises(AssertionError, match="one name"):
        World([*items, items[0]])
    claims = rendered(exports, "pd", "dynamic-allocation")
    world = World(claims)
    pod = world.of("prefill")[0]
    pod.container.resources.limits["nvidia.com/gpu"] = "4"
    with pytest.raises(AssertionError, match="twice"):
        world.gpus(pod)
