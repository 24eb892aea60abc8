"""What kubectl prints, as data. A field that is missing or odd is passed over: a probe never fails."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

from deploy.host.cluster import GPU_DRIVER_NAME, Device, Kubelet, Node, Taint

_SUFFIXES = {
    "m": 1e-3, "": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip
_NUMA_NODE = "resource.kubernetes.io/numaNode"


class NotKubectl(ValueError):
    """The text is nothing that `kubectl get … -o json` prints."""


def items(text: str) -> list[dict[str, Any]]:
    """The objects of a list, or the one object that the text is.

    Raises:
        NotKubectl: it is neither.
    """
    try:
        document: Any = json.loads(text)
    except ValueError as error:
        raise NotKubectl(f"not JSON: {error}") from error
    found = _mapping(document)
    if "kind" not in found:
        raise NotKubectl("no `kind` in it")
    inner = found.get("items") if str(found["kind"]).endswith("List") else [found]
    if not isinstance(inner, list):
        raise NotKubectl("a list without `items`")
    kind = str(found["kind"]).removesuffix("List")
    objects = [_mapping(item) for item in cast("list[Any]", inner)]
    # In a list of one kind the objects need not say it.
    return [{"kind": kind, **item} if kind else item for item in objects if item]


def nodes(objects: Iterable[Mapping[str, Any]]) -> tuple[Node, ...]:
    """Every node, by name."""
    found = [_node(item) for item in objects if item.get("kind") == "Node"]
    return tuple(sorted(found, key=lambda node: node.name))


def names(objects: Iterable[Mapping[str, Any]], kind: str) -> tuple[str, ...]:
    """Names of the objects of a kind."""
    return tuple(sorted(_name(item) for item in objects if item.get("kind") == kind))


def devices(objects: Iterable[Mapping[str, Any]]) -> tuple[Device, ...]:
    """The whole GPUs that NVIDIA's DRA driver offers in resource slices."""
    found: list[Device] = []
    for item in objects:
        spec = _mapping(item.get("spec"))
        if item.get("kind") != "ResourceSlice" or spec.get("driver") != GPU_DRIVER_NAME:
            continue
        for device in _list(spec.get("devices")):
            inner = _mapping(_mapping(device).get("basic")) or _mapping(device)
            attributes = _mapping(inner.get("attributes"))
            if _mapping(attributes.get("type")).get("string", "gpu") != "gpu":
                continue
            numa = _mapping(attributes.get(_NUMA_NODE)).get("int")
            place = numa if isinstance(numa, int) else None
            found.append(
                Device(node=str(spec.get("nodeName", "")), name=str(_mapping(device).get("name", "")), numa_node=place)
            )
    return tuple(sorted(found, key=lambda device: (device.node, device.name)))


def kubelet(text: str) -> Kubelet | None:
    """A kubelet's own configuration (`/configz`), None if the text is none."""
    try:
        config = _mapping(_mapping(json.loads(text)).get("kubeletconfig"))
    except ValueError:
        return None
    if not config:
        return None
    return Kubelet(
        topology_manager=str(config.get("topologyManagerPolicy", "")),
        topology_scope=str(config.get("topologyManagerScope", "")),
        cpu_manager=str(config.get("cpuManagerPolicy", "")),
        memory_manager=str(config.get("memoryManagerPolicy", "")),
    )


def amount(text: object) -> float | None:
    """A quantity such as `128`, `15800m` or `1031520Mi`, None if it is none."""
    word = str(text)
    number = word.rstrip("mkKMGTPi")
    try:
        return float(number) * _SUFFIXES[word[len(number) :]]
    except (ValueError, KeyError):
        return None


def _node(item: Mapping[str, Any]) -> Node:
    metadata, spec, status = (_mapping(item.get(key)) for key in ("metadata", "spec", "status"))
    info = _mapping(status.get("nodeInfo"))
    taints = [_mapping(taint) for taint in _list(spec.get("taints"))]
    conditions = [_mapping(condition) for condition in _list(status.get("conditions"))]
    images = [_mapping(image) for image in _list(status.get("images"))]
    return Node(
        name=str(metadata.get("name", "")),
        labels={str(key): str(value) for key, value in _mapping(metadata.get("labels")).items()},
        taints=tuple(Taint(key=str(taint.get("key", "")), effect=str(taint.get("effect", ""))) for taint in taints),
        conditions=tuple(str(found.get("type")) for found in conditions if found.get("status") == "True"),
        cordoned=spec.get("unschedulable") is True,
        allocatable=_amounts(status.get("allocatable")),
        capacity=_amounts(status.get("capacity")),
        kubelet=str(info.get("kubeletVersion", "")),
        runtime=str(info.get("containerRuntimeVersion", "")),
        images=tuple(str(name) for image in images for name in _list(image.get("names"))),
    )


def _amounts(value: object) -> dict[str, float]:
    found = {str(key): amount(text) for key, text in _mapping(value).items()}
    return {key: number for key, number in found.items() if number is not None}


def _name(item: Mapping[str, Any]) -> str:
    return str(_mapping(item.get("metadata")).get("name", ""))


def _mapping(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []
