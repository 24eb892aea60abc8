"""A Kubernetes cluster as plain data: what the probe saw, and what it could not see.

`None` always means "not seen"; an empty list or dictionary means "looked, and there is none".
"""

from deploy.host.report import Fact, Unseen

GPU_RESOURCE = "nvidia.com/gpu"
GPU_LABEL = "nvidia.com/gpu.present"
GPU_DRIVER_NAME = "gpu.nvidia.com"


class Taint(Fact):
    """What keeps pods off a node unless they tolerate it."""

    key: str
    effect: str


class Node(Fact):
    """A node as `kubectl get nodes -o json` has it.

    Attributes:
        conditions: those that are true, such as `Ready` or `DiskPressure`.
        allocatable: by resource; processors as a number, memory and storage in bytes, devices as a number.
        capacity: the same before what the system keeps for itself.
        images: every name of every image that is there.
    """

    name: str
    labels: dict[str, str]
    taints: tuple[Taint, ...]
    conditions: tuple[str, ...]
    cordoned: bool
    allocatable: dict[str, float]
    capacity: dict[str, float]
    kubelet: str
    runtime: str
    images: tuple[str, ...]

    @property
    def has_gpus(self) -> bool:
        """Whether anything says that there are NVIDIA GPUs in it."""
        return (
            self.labels.get(GPU_LABEL) == "true"
            or any(name.startswith("feature.node.kubernetes.io/pci-10de") for name in self.labels)
            or any(name.endswith("pci-10de.present") for name in self.labels)
            or GPU_RESOURCE in self.capacity
        )


class Kubelet(Fact):
    """How a kubelet places containers on processors; values as in its configuration, empty where it has its default."""

    topology_manager: str
    topology_scope: str
    cpu_manager: str
    memory_manager: str


class Device(Fact):
    """A GPU that NVIDIA's DRA driver offers; `numa_node` is None where the driver does not say it."""

    node: str
    name: str
    numa_node: int | None


class ClusterReport(Fact):
    """A cluster.

    Attributes:
        name: of the context, or of the file that was read.
        kubelets: by node; one that did not tell is missing.
        kinds: names of the custom resource definitions.
        device_classes: of dynamic resource allocation.
        image_in_registry: whether the registry that nodes pull from has the locked image.
    """

    name: str
    taken_at: str
    nodes: tuple[Node, ...]
    kubelets: dict[str, Kubelet] | None = None
    kinds: tuple[str, ...] | None = None
    device_classes: tuple[str, ...] | None = None
    devices: tuple[Device, ...] | None = None
    image_in_registry: bool | None = None
    unseen: tuple[Unseen, ...] = ()
