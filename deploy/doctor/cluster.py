"""What a Kubernetes cluster lacks for an export: one function a check, from a `ClusterReport` to problems."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from deploy.doctor.finding import Finding, Problem, error, note, warning
from deploy.host.cluster import GPU_DRIVER_NAME, GPU_RESOURCE, ClusterReport, Node
from deploy.host.parsers.docker import parse_version
from deploy.host.report import Fact
from deploy.spec.profiles import Profile

MINIMUM_KUBERNETES = (1, 34)
"""Sleeping before SIGTERM and resource.k8s.io/v1 are stable from here on (kubernetes.io, feature gates)."""
MINIMUM_CONTAINERD = (1, 7)
"""First with CDI (containerd, release notes)."""
COMPUTE_CAPABILITY = ("12", "0")
GIBIBYTE = 1 << 30
TOLERATED = (GPU_RESOURCE,)
OPERATOR = "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/getting-started.html"
TOPOLOGY = "https://kubernetes.io/docs/tasks/administer-cluster/topology-manager/"


class ClusterNeeds(Fact):
    """What a copy of the system asks of a host.

    Attributes:
        gpus: on one host; `processors` and `memory` (bytes) of all its engines together.
        driver: least version.
        image: digest, empty if it was never pushed.
        image_bytes: unpacked.
        model_label: label and value of a node that has the model.
    """

    profile: Profile
    gpus: int
    processors: int
    memory: int
    driver: str
    image: str
    image_bytes: int
    model_label: tuple[str, str]


class ClusterCheck(NamedTuple):
    """A check and the heading of its findings."""

    id: str
    group: str
    function: Callable[[ClusterReport, ClusterNeeds], Iterable[Problem]]


CHECKS: list[ClusterCheck] = []


def _check(id: str, group: str) -> Callable[..., Callable[[ClusterReport, ClusterNeeds], Iterable[Problem]]]:
    def register(
        function: Callable[[ClusterReport, ClusterNeeds], Iterable[Problem]],
    ) -> Callable[[ClusterReport, ClusterNeeds], Iterable[Problem]]:
        CHECKS.append(ClusterCheck(id, group, function))
        return function

    return register


def run_checks(report: ClusterReport, needs: ClusterNeeds) -> list[Finding]:
    """Findings of every check, the worst first; equal ones in the order of the checks."""
    found = [
        Finding(id=check.id, group=check.group, **problem.model_dump())
        for check in CHECKS
        for problem in check.function(report, needs)
    ]
    return sorted(found, key=lambda finding: finding.severity.rank)


def hosts(report: ClusterReport, needs: ClusterNeeds) -> list[Node]:
    """The nodes that are to serve: those with GPUs, and every node where none is needed."""
    return [node for node in report.nodes if node.has_gpus or not needs.gpus]


def listed(nodes: Iterable[Node], most: int = 4) -> str:
    """Names of nodes in words."""
    names = [node.name for node in nodes]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def headline(report: ClusterReport) -> str:
    """The cluster in one line."""
    with_gpus = [node for node in report.nodes if node.has_gpus]
    gpus = sum(int(node.capacity.get(GPU_RESOURCE, 0)) for node in with_gpus)
    products = sorted({node.labels.get("nvidia.com/gpu.product", "unknown GPU") for node in with_gpus})
    versions = sorted({node.kubelet for node in report.nodes}, key=parse_version)
    what = f"{gpus}x {', '.join(products)} on {len(with_gpus)} of them" if with_gpus else "no GPU"
    return f"{report.name}: {len(report.nodes)} nodes, Kubernetes {', '.join(versions)}; {what}"


@_check("nodes.gpus", "Nodes")
def no_gpus(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """No node has an NVIDIA GPU, or none that anything tells about."""
    if needs.gpus and not hosts(report, needs):
        yield error(
            "no node says that it has an NVIDIA GPU",
            "the engines run on them; node feature discovery, which the GPU operator brings, labels them",
            "install the GPU operator",
            "helm install --wait gpu-operator nvidia/gpu-operator --namespace gpu-operator --create-namespace",
            look="kubectl get nodes -L nvidia.com/gpu.present",
            link=OPERATOR,
        )


@_check("nodes.ready", "Nodes")
def not_ready(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """Nodes that take no pods now."""
    for node in hosts(report, needs):
        if "Ready" not in node.conditions:
            yield error(
                f"{node.name} is not ready", "nothing is started on it", look=f"kubectl describe node {node.name}"
            )
        elif node.cordoned:
            yield warning(
                f"{node.name} is cordoned", "nothing new is started on it", "", f"kubectl uncordon {node.name}"
            )
        for pressure in sorted({"DiskPressure", "MemoryPressure", "PIDPressure"} & set(node.conditions)):
            yield error(
                f"{node.name} has {pressure}", "pods are evicted from it", look=f"kubectl describe node {node.name}"
            )


@_check("nodes.taints", "Nodes")
def taints(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """Taints that the manifests do not tolerate."""
    for node in hosts(report, needs):
        # Kubernetes' own come and go with a node's conditions.
        keys = {taint.key for taint in node.taints if taint.effect != "PreferNoSchedule"}
        if other := sorted(key for key in keys if key not in TOLERATED and not key.startswith("node.kubernetes.io/")):
            yield error(
                f"{node.name} is tainted with {', '.join(other)}",
                f"the pods tolerate only {', '.join(TOLERATED)}",
                "add a toleration in an overlay of your own, or take the taint off",
                *(f"kubectl taint node {node.name} {key}-" for key in other),
            )


@_check("nodes.version", "Nodes")
def version(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """A Kubernetes that is too old for what the manifests use."""
    old = [node for node in hosts(report, needs) if parse_version(node.kubelet) < MINIMUM_KUBERNETES]
    if old:
        yield error(
            f"{listed(old)}: Kubernetes {', '.join(sorted({node.kubelet for node in old}))}",
            "sleeping before SIGTERM, with which a pod drains, and resource.k8s.io/v1 need "
            f"{'.'.join(map(str, MINIMUM_KUBERNETES))}; the manifests are checked against the latest three",
            "upgrade the cluster",
        )


@_check("nodes.runtime", "Nodes")
def runtime(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """A container runtime without CDI."""
    for node in hosts(report, needs):
        name, _, number = node.runtime.partition("://")
        if needs.gpus and name == "containerd" and parse_version(number) < MINIMUM_CONTAINERD:
            yield error(
                f"{node.name} has containerd {number}",
                f"GPUs come to containers by CDI, which it has from {'.'.join(map(str, MINIMUM_CONTAINERD))} on",
                "upgrade containerd on the node",
            )


@_check("gpus.offered", "GPUs")
def offered(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """GPUs that no device plugin and no DRA driver offers, or fewer than a host's copy takes."""
    by_claim = {device.node: 0 for device in report.devices or ()}
    for device in report.devices or ():
        by_claim[device.node] += 1
    for node in hosts(report, needs) if needs.gpus else []:
        capacity, free = (int(found.get(GPU_RESOURCE, 0)) for found in (node.capacity, node.allocatable))
        if not capacity and not by_claim.get(node.name):
            yield error(
                f"{node.name} offers no GPU",
                "neither the device plugin nor the DRA driver runs there, or the driver does not answer them",
                look=f"kubectl get pods --all-namespaces --field-selector spec.nodeName={node.name}",
                link=OPERATOR,
            )
        elif capacity > free:
            yield error(
                f"{node.name}: {capacity - free} of {capacity} GPUs are not healthy",
                "the device plugin took them out; a pod that has one of them answers no more",
                look=f"kubectl debug node/{node.name} -it --image=busybox -- dmesg | grep -i xid",
            )
        elif max(free, by_claim.get(node.name, 0)) < needs.gpus:
            yield warning(
                f"{node.name} has {max(free, by_claim.get(node.name, 0))} GPUs",
                f"a copy of what deploy.toml describes takes {needs.gpus} on one host",
            )


@_check("gpus.architecture", "GPUs")
def architecture(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """GPUs that the kernels were not made for."""
    keys = ("nvidia.com/gpu.compute.major", "nvidia.com/gpu.compute.minor")
    for node in hosts(report, needs) if needs.gpus else []:
        found = tuple(node.labels.get(key, "") for key in keys)
        if all(found) and found != COMPUTE_CAPABILITY:
            yield warning(
                f"{node.name}: {node.labels.get('nvidia.com/gpu.product', 'GPUs')} of compute capability "
                f"{'.'.join(found)}",
                f"the kernels are made for {'.'.join(COMPUTE_CAPABILITY)}, and the overlays choose nodes by it",
            )
        elif not all(found):
            yield warning(
                f"{node.name} has no labels {keys[0]} and {keys[1]}",
                "overlays/device-plugin chooses nodes by them; GPU feature discovery sets them",
                link=OPERATOR,
            )


@_check("gpus.driver", "GPUs")
def driver(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """A driver older than deploy.lock asks for."""
    least = parse_version(needs.driver)
    for node in hosts(report, needs) if needs.gpus else []:
        labels = node.labels
        text = labels.get("nvidia.com/cuda.driver-version.full") or ".".join(
            labels[key] for part in ("major", "minor", "rev") if (key := f"nvidia.com/cuda.driver.{part}") in labels
        )
        if text and parse_version(text) < least:
            yield error(
                f"{node.name} has driver {text}",
                f"deploy.lock asks for {needs.driver} or newer: CUDA 13 does not start with an older one",
                "raise driver.version of the GPU operator's ClusterPolicy, or upgrade the driver on the node",
            )


@_check("placement.topology", "Placement")
def topology(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """Kubelets that spread a pod's GPUs, processors and memory over NUMA nodes."""
    for name, kubelet in (report.kubelets or {}).items() if needs.gpus else ():
        wanted = {
            "topologyManagerPolicy": (kubelet.topology_manager, "single-numa-node"),
            "cpuManagerPolicy": (kubelet.cpu_manager, "static"),
        }
        wrong = {key: pair for key, pair in wanted.items() if pair[0] != pair[1]}
        if wrong:
            seen = ", ".join(f"{key} is {is_ or 'none'}" for key, (is_, _) in wrong.items())
            settings = ", ".join(f"{key}: {want}" for key, (_, want) in wrong.items())
            yield error(
                f"{name}: {seen}",
                "the device plugin's GPUs, the processors and the memory of an engine may come from different NUMA "
                "nodes: every copy to the host crosses the sockets",
                f"{settings} in the kubelet's configuration, then delete /var/lib/kubelet/cpu_manager_state and "
                "restart it; or use overlays/dynamic-allocation, which asks for the node itself",
                link=TOPOLOGY,
            )


@_check("placement.claims", "Placement")
def claims(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """What overlays/dynamic-allocation needs and is not there."""
    if not needs.gpus or report.device_classes is None:
        return
    if GPU_DRIVER_NAME not in report.device_classes:
        yield note(
            f"there is no device class {GPU_DRIVER_NAME}",
            "overlays/dynamic-allocation needs NVIDIA's DRA driver; overlays/device-plugin does not",
            link="https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu",
        )
    elif blind := sorted({device.node for device in report.devices or () if device.numa_node is None}):
        yield warning(
            f"the DRA driver does not say the NUMA node of GPUs on {', '.join(blind[:4])}",
            "the claims ask for resource.kubernetes.io/numaNode: pods of overlays/dynamic-allocation stay pending",
            "upgrade the DRA driver, or use overlays/device-plugin",
        )


@_check("kinds.missing", "Kinds")
def kinds(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """Custom resources that an overlay uses."""
    if report.kinds is None:
        return
    if needs.profile != "replicas" and "leaderworkersets.leaderworkerset.x-k8s.io" not in report.kinds:
        yield error(
            "there is no LeaderWorkerSet",
            "it places prefill and decode of a pair on one host and replaces them together",
            "install it",
            "helm install lws oci://registry.k8s.io/lws/charts/lws --namespace lws-system --create-namespace --wait",
            link="https://lws.sigs.k8s.io/docs/installation/",
        )
    for kind, what, overlay in (
        ("servicemonitors.monitoring.coreos.com", "Prometheus operator", "components/monitoring"),
        ("scaledobjects.keda.sh", "KEDA", "components/autoscaling"),
    ):
        if kind not in report.kinds:
            yield note(f"there is no {what}", f"{overlay} needs it; the other overlays do not")


@_check("image.there", "Image")
def image(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """An image that the nodes cannot get, or have no room for."""
    if not needs.image:
        yield error(
            "deploy.lock has no digest of the image in a registry",
            "nodes pull by that digest",
            "set registry under [image] in deploy.toml",
            "deploy push",
        )
        return
    without = [node for node in hosts(report, needs) if not any(needs.image in name for name in node.images)]
    if report.image_in_registry is False and without:
        yield error(
            f"the registry has no image {needs.image}",
            f"{listed(without)} would have to pull it",
            "",
            "deploy push",
        )
        return
    small = [node for node in without if node.allocatable.get("ephemeral-storage", 2**60) < 2 * needs.image_bytes]
    if small:
        yield error(
            f"{listed(small)}: less than {2 * needs.image_bytes / GIBIBYTE:.0f} GiB for images",
            "the image is there once packed and once unpacked while it is pulled",
            "give the runtime's folder a larger disk",
        )
    if without and not small:
        yield note(
            f"{len(without)} of {len(hosts(report, needs))} nodes do not have the image yet",
            "the first pod there waits for it; docs/scale.md says how long",
        )


@_check("model.there", "Model")
def model(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """Nodes that nobody vouches for having the model."""
    key, value = needs.model_label
    other = [node for node in hosts(report, needs) if node.labels.get(key) not in (None, value)]
    for node in other:
        yield error(
            f"{node.name} is labelled for another model ({node.labels[key]})",
            f"pods are started only where {key} is {value}",
            "bring the locked model there and verify it, then",
            f"kubectl label node {node.name} --overwrite {key}={value}",
        )
    without = [node for node in hosts(report, needs) if key not in node.labels]
    if without and len(without) + len(other) == len(hosts(report, needs)):
        yield error(
            f"no node is labelled {key}={value}",
            "it says that the model lies there verified; pods are started only there (overlays/model-claim needs none)",
            "on each node: deploy model fetch, deploy model verify --full; then",
            f"kubectl label node {without[0].name} {key}={value}",
        )
    elif without:
        yield note(f"{listed(without)} not labelled {key}", "no pod is started there")


@_check("room.host", "Room")
def room(report: ClusterReport, needs: ClusterNeeds) -> Iterable[Problem]:
    """Hosts whose processors or memory do not suffice for a copy."""
    for node in hosts(report, needs):
        processors, memory = node.allocatable.get("cpu", 1e9), node.allocatable.get("memory", 1e18)
        if processors < needs.processors or memory < needs.memory:
            yield error(
                f"{node.name} can give {processors:.0f} processors and {memory / GIBIBYTE:.0f} GiB",
                f"a copy asks for {needs.processors} and {needs.memory / GIBIBYTE:.0f} GiB",
                "lower the requests in an overlay of your own, or use larger hosts",
            )
