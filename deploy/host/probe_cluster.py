"""Look at a cluster with kubectl, or at what kubectl printed before, and fill a `ClusterReport`. Changes nothing."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploy.host.cluster import ClusterReport, Kubelet
from deploy.host.errors import HostError
from deploy.host.machine import Machine
from deploy.host.parsers import kubernetes
from deploy.host.report import Unseen

LIMIT_SECONDS = 15
LOOKS_AT_ONCE = 8
KINDS = {
    "CustomResourceDefinition": "customresourcedefinitions",
    "DeviceClass": "deviceclasses",
    "ResourceSlice": "resourceslices",
}
"""Besides nodes, by how kubectl lists them."""
KUBELETS = "how the kubelets place containers"


def read_saved(file: Path) -> ClusterReport:
    """The cluster in what kubectl printed: nodes at least, and whatever else of `KINDS` is in the same list.

    Raises:
        HostError: the file cannot be read, or has no nodes.
    """
    command = f"kubectl get nodes,{','.join(KINDS.values())} -o json > {file}"
    try:
        objects = kubernetes.items(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, kubernetes.NotKubectl) as error:
        raise HostError(f"{file} cannot be read as a list of nodes", str(error), command) from error
    if not any(item.get("kind") == "Node" for item in objects):
        raise HostError(f"{file} has no nodes", "they are what is looked at", command)
    there = {kind: [item for item in objects if item.get("kind") == kind] for kind in KINDS}
    unseen = [
        Unseen(what=plural, why=f"{file.name} has none", how=command)
        for kind, plural in KINDS.items()
        if not there[kind]
    ]
    unseen.append(Unseen(what=KUBELETS, why="a list of nodes does not say it", how="deploy doctor --kubernetes"))
    return _report(str(file), objects, {kind: found or None for kind, found in there.items()}, None, unseen)


def probe_cluster(machine: Machine, kubeconfig: Path | None = None, context: str | None = None) -> ClusterReport:
    """Ask a cluster.

    Args:
        kubeconfig: kubectl's own choice if None; `context` likewise.

    Raises:
        HostError: there is no kubectl, or it cannot list the nodes.
    """
    kubectl = ["kubectl"]
    kubectl += [f"--kubeconfig={kubeconfig}"] if kubeconfig else []
    kubectl += [f"--context={context}"] if context else []
    kubectl.append(f"--request-timeout={LIMIT_SECONDS}s")
    listed = machine.run(*kubectl, "get", "nodes", "--output=json")
    if listed.end == "missing":
        raise HostError(
            "there is no kubectl", "it is what asks the cluster", "install it, or: --nodes FILE with what it printed"
        )
    if listed.end != "ok":
        words = listed.err.strip().splitlines()
        raise HostError(
            "kubectl cannot list the nodes",
            words[-1] if words else "it did not answer in time",
            "kubectl get nodes; choose another cluster with --kubeconfig FILE or --context NAME",
        )
    unseen: list[Unseen] = []
    objects = kubernetes.items(listed.out)
    found: dict[str, list[dict[str, Any]] | None] = {}
    for kind, plural in KINDS.items():
        answer = machine.run(*kubectl, "get", plural, "--output=json")
        if answer.end == "ok":
            found[kind] = kubernetes.items(answer.out)
        else:
            found[kind] = None
            why = answer.err.strip().splitlines()[-1:] or ["no answer in time"]
            unseen.append(Unseen(what=plural, why=why[0], how=f"kubectl get {plural}"))
    named = machine.run(*kubectl, "config", "current-context")
    kubelets, silent = _kubelets(machine, kubectl, objects)
    unseen += silent
    return _report(context or named.out.strip() or "cluster", objects, found, kubelets, unseen)


def _kubelets(
    machine: Machine, kubectl: list[str], objects: list[dict[str, Any]]
) -> tuple[dict[str, Kubelet], list[Unseen]]:
    """The kubelets of nodes with GPUs."""
    names = [node.name for node in kubernetes.nodes(objects) if node.has_gpus]

    def ask(name: str) -> Kubelet | None:
        answer = machine.run(*kubectl, "get", "--raw", f"/api/v1/nodes/{name}/proxy/configz")
        return kubernetes.kubelet(answer.out) if answer.end == "ok" else None

    with ThreadPoolExecutor(LOOKS_AT_ONCE) as pool:
        answers = dict(zip(names, pool.map(ask, names), strict=True))
    silent = [name for name, answer in answers.items() if answer is None]
    how = f"kubectl get --raw /api/v1/nodes/{silent[0]}/proxy/configz" if silent else ""
    unseen = [Unseen(what=KUBELETS, why=f"{len(silent)} did not tell (nodes/proxy is a right of its own)", how=how)]
    return {name: answer for name, answer in answers.items() if answer}, unseen if silent else []


def _report(
    name: str,
    objects: list[dict[str, Any]],
    found: dict[str, list[dict[str, Any]] | None],
    kubelets: dict[str, Kubelet] | None,
    unseen: list[Unseen],
) -> ClusterReport:
    kinds, classes, slices = (found[kind] for kind in KINDS)
    return ClusterReport(
        name=name,
        taken_at=datetime.now(UTC).isoformat(timespec="seconds"),
        nodes=kubernetes.nodes(objects),
        kubelets=kubelets,
        kinds=None if kinds is None else kubernetes.names(kinds, "CustomResourceDefinition"),
        device_classes=None if classes is None else kubernetes.names(classes, "DeviceClass"),
        devices=None if slices is None else kubernetes.devices(slices),
        unseen=tuple(unseen),
    )
