"""Look-alike clusters: JSON in the shape that kubectl prints, written by hand after Kubernetes' API reference.

No cluster was there to capture from. Labels are those of node feature discovery and of NVIDIA's GPU feature discovery.
"""

import copy
import json
from typing import Any

from deploy.host.machine import Ran

MODEL = ("deepseek-v4-flash-sm120/model", "0123456789abcdef")
CONFIGZ = {
    "kubeletconfig": {
        "topologyManagerPolicy": "single-numa-node",
        "topologyManagerScope": "container",
        "cpuManagerPolicy": "static",
        "memoryManagerPolicy": "None",
    }
}


def node(name: str, *, gpus: int = 8, **labels: str) -> dict[str, Any]:
    """A host with GPUs, ready for everything."""
    gpu_labels = {
        "feature.node.kubernetes.io/pci-10de.present": "true",
        "nvidia.com/gpu.present": "true",
        "nvidia.com/gpu.product": "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
        "nvidia.com/gpu.count": str(gpus),
        "nvidia.com/gpu.compute.major": "12",
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/cuda.driver-version.full": "580.95.05",
        MODEL[0]: MODEL[1],
    }
    resources = {
        "cpu": "128",
        "memory": "1056447264Ki",
        "ephemeral-storage": "1843Gi",
        "pods": "110",
        "hugepages-2Mi": "0",
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {
                "kubernetes.io/arch": "amd64",
                "kubernetes.io/hostname": name,
                "kubernetes.io/os": "linux",
                **(gpu_labels if gpus else {}),
                **labels,
            },
        },
        "spec": {"taints": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}] if gpus else []},
        "status": {
            "capacity": {**resources, **({"nvidia.com/gpu": str(gpus)} if gpus else {})},
            "allocatable": {
                **resources,
                "cpu": "127800m",
                "memory": "1054247264Ki",
                **({"nvidia.com/gpu": str(gpus)} if gpus else {}),
            },
            "conditions": [
                {"type": "MemoryPressure", "status": "False"},
                {"type": "DiskPressure", "status": "False"},
                {"type": "Ready", "status": "True"},
            ],
            "nodeInfo": {
                "kubeletVersion": "v1.36.2",
                "containerRuntimeVersion": "containerd://2.1.4",
                "osImage": "Ubuntu 24.04.3 LTS",
            },
            "images": [{"names": ["registry.k8s.io/pause@sha256:" + "1" * 64], "sizeBytes": 321520}],
        },
    }


def definitions() -> list[dict[str, Any]]:
    """The custom resources that an export may use."""
    names = (
        "leaderworkersets.leaderworkerset.x-k8s.io",
        "scaledobjects.keda.sh",
        "servicemonitors.monitoring.coreos.com",
    )
    return [{"kind": "CustomResourceDefinition", "metadata": {"name": name}} for name in names]


def device_class() -> dict[str, Any]:
    return {"kind": "DeviceClass", "metadata": {"name": "gpu.nvidia.com"}}


def resource_slice(host: str, *, numa: bool = True) -> dict[str, Any]:
    """What NVIDIA's DRA driver publishes of a host with eight GPUs, four on each NUMA node."""

    def attributes(index: int) -> dict[str, Any]:
        return {
            "type": {"string": "gpu"},
            "uuid": {"string": f"GPU-0000000{index}"},
            "cudaComputeCapability": {"version": "12.0.0"},
            **({"resource.kubernetes.io/numaNode": {"int": index // 4}} if numa else {}),
        }

    return {
        "kind": "ResourceSlice",
        "metadata": {"name": f"{host}-gpu.nvidia.com"},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": host,
            "devices": [{"name": f"gpu-{index}", "attributes": attributes(index)} for index in range(8)],
        },
    }


def listing(*objects: dict[str, Any]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})


class Cluster:
    """A `Machine` whose kubectl answers; `broken` commands fail with the words that kubectl has for them."""

    def __init__(self, objects: list[dict[str, Any]], configz: dict[str, Any] | None = None) -> None:
        self.objects = objects
        self.configz = CONFIGZ if configz is None else configz
        self.broken: dict[str, Ran] = {}

    def run(self, *command: str) -> Ran:
        words = " ".join(command)
        for part, answer in self.broken.items():
            if part in words:
                return answer
        if "--raw" in command:
            return Ran("ok", json.dumps(self.configz))
        if "current-context" in command:
            return Ran("ok", "fleet\n")
        kinds = {
            "nodes": "Node",
            "customresourcedefinitions": "CustomResourceDefinition",
            "deviceclasses": "DeviceClass",
            "resourceslices": "ResourceSlice",
        }
        kind = kinds[command[command.index("get") + 1]]
        return Ran("ok", listing(*(copy.deepcopy(item) for item in self.objects if item["kind"] == kind)))

    def read(self, path: str) -> str | None:
        raise NotImplementedError

    def entries(self, path: str) -> list[str]:
        raise NotImplementedError

    def target(self, path: str) -> str | None:
        raise NotImplementedError


def healthy() -> list[dict[str, Any]]:
    """Two hosts and one node without GPUs, with all that an export may use."""
    hosts = [node("host-a"), node("host-b")]
    slices = [resource_slice("host-a"), resource_slice("host-b")]
    return [*hosts, node("control", gpus=0), *definitions(), device_class(), *slices]
