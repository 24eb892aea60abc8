"""Broken look-alike clusters, and the one finding that each must give."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clusters import CONFIGZ, MODEL, Cluster, healthy, listing, node, resource_slice
from hypothesis import given
from hypothesis import strategies as st

from deploy.doctor.cluster import CHECKS, ClusterNeeds, headline, run_checks
from deploy.host.cluster import ClusterReport
from deploy.host.errors import HostError
from deploy.host.machine import Ran
from deploy.host.parsers import kubernetes
from deploy.host.probe_cluster import probe_cluster, read_saved

ROOT = Path(__file__).parents[2]
DIGEST = "sha256:" + "a" * 64
NEEDS = ClusterNeeds(
    profile="pd",
    gpus=8,
    processors=32,
    memory=128 << 30,
    driver="580",
    image=DIGEST,
    image_bytes=12 << 30,
    model_label=MODEL,
)
Objects = list[dict[str, Any]]


def with_image(objects: Objects) -> Objects:
    for item in objects:
        if item["kind"] == "Node":
            item["status"]["images"].append({"names": [f"registry.lan/deepseek-v4-flash-sm120@{DIGEST}"]})
    return objects


def report(objects: Objects, configz: dict[str, Any] | None = None) -> ClusterReport:
    return probe_cluster(Cluster(objects, configz))


def found(report: ClusterReport, needs: ClusterNeeds = NEEDS) -> dict[str, str]:
    return {finding.id: finding.severity.value for finding in run_checks(report, needs)}


def test_a_healthy_cluster_has_no_findings_and_nothing_unseen() -> None:
    seen = report(with_image(healthy()))
    assert found(seen) == {}
    assert seen.unseen == ()
    assert headline(seen).startswith("fleet: 3 nodes, Kubernetes v1.36.2; 16x NVIDIA-RTX-PRO-6000")


def set_(item: dict[str, Any], path: str, value: Any) -> None:
    *folders, last = path.split("/")
    for key in folders:
        item = item[key]
    item[last] = value


def first(path: str, value: Any) -> Callable[[Objects], None]:
    return lambda objects: set_(objects[0], path, value)


def label(key: str, value: str | None) -> Callable[[Objects], None]:
    return lambda objects: _label(objects[0], key, value)


def _label(item: dict[str, Any], key: str, value: str | None) -> None:
    if value is None:
        del item["metadata"]["labels"][key]
    else:
        item["metadata"]["labels"][key] = value


def without(kind: str, part: str = "") -> Callable[[Objects], None]:
    def change(objects: Objects) -> None:
        objects[:] = [item for item in objects if item["kind"] != kind or part not in item["metadata"]["name"]]

    return change


def no_labels(objects: Objects) -> None:
    for item in objects[:2]:
        _label(item, MODEL[0], None)


def blind_slices(objects: Objects) -> None:
    without("ResourceSlice")(objects)
    objects.append(resource_slice("host-a", numa=False))


def only_control(objects: Objects) -> None:
    objects[:] = [item for item in objects if item["kind"] != "Node"] + [node("control", gpus=0)]


def no_gpus(objects: Objects) -> None:
    for part in ("capacity", "allocatable"):
        del objects[0]["status"][part]["nvidia.com/gpu"]
    without("ResourceSlice", "host-a")(objects)


def one_unhealthy(objects: Objects) -> None:
    objects[0]["status"]["allocatable"]["nvidia.com/gpu"] = "7"


def four_gpus(objects: Objects) -> None:
    for part in ("capacity", "allocatable"):
        objects[0]["status"][part]["nvidia.com/gpu"] = "4"
    without("ResourceSlice", "host-a")(objects)


BROKEN: list[tuple[str, str, Callable[[Objects], None]]] = [
    ("nodes.gpus", "error", only_control),
    ("nodes.ready", "error", first("status/conditions", [{"type": "Ready", "status": "False"}])),
    ("nodes.ready", "warning", first("spec/unschedulable", True)),
    (
        "nodes.ready",
        "error",
        first("status/conditions", [{"type": "Ready", "status": "True"}, {"type": "DiskPressure", "status": "True"}]),
    ),
    ("nodes.taints", "error", first("spec/taints", [{"key": "team", "value": "other", "effect": "NoExecute"}])),
    ("nodes.version", "error", first("status/nodeInfo/kubeletVersion", "v1.31.4")),
    ("nodes.runtime", "error", first("status/nodeInfo/containerRuntimeVersion", "containerd://1.6.21")),
    ("gpus.offered", "error", no_gpus),
    ("gpus.offered", "error", one_unhealthy),
    ("gpus.offered", "warning", four_gpus),
    ("gpus.architecture", "warning", label("nvidia.com/gpu.compute.major", "9")),
    ("gpus.architecture", "warning", label("nvidia.com/gpu.compute.minor", None)),
    ("gpus.driver", "error", label("nvidia.com/cuda.driver-version.full", "570.124.06")),
    ("placement.claims", "note", without("DeviceClass")),
    ("placement.claims", "warning", blind_slices),
    ("kinds.missing", "error", without("CustomResourceDefinition", "leaderworkerset")),
    ("kinds.missing", "note", without("CustomResourceDefinition", "keda")),
    ("image.there", "note", first("status/images", [])),
    ("model.there", "error", no_labels),
    ("model.there", "note", label(MODEL[0], None)),
    ("model.there", "error", label(MODEL[0], "another")),
    ("room.host", "error", first("status/allocatable/memory", "64Gi")),
]


@pytest.mark.parametrize(("id", "severity", "change"), BROKEN)
def test_a_broken_cluster_gives_its_finding_and_no_other(
    id: str, severity: str, change: Callable[[Objects], None]
) -> None:
    objects = with_image(healthy())
    change(objects)
    assert found(report(objects)) == {id: severity}


@pytest.mark.parametrize("policy", ["none", "best-effort", "restricted", ""])
def test_a_kubelet_that_may_spread_a_pod_over_numa_nodes_is_an_error(policy: str) -> None:
    configz = {"kubeletconfig": {**CONFIGZ["kubeletconfig"], "topologyManagerPolicy": policy}}
    seen = report(with_image(healthy()), configz)
    assert found(seen) == {"placement.topology": "error"}
    (finding, *_) = run_checks(seen, NEEDS)
    assert "topologyManagerPolicy: single-numa-node" in finding.fix


def test_an_image_that_neither_the_lock_nor_the_registry_has_is_an_error() -> None:
    seen = report(healthy())
    assert found(seen, NEEDS.model_copy(update={"image": ""}))["image.there"] == "error"
    absent = seen.model_copy(update={"image_in_registry": False})
    assert found(absent)["image.there"] == "error"
    small = healthy()
    set_(small[0], "status/allocatable/ephemeral-storage", "20Gi")
    assert found(report(small))["image.there"] == "error"


def test_every_check_has_a_broken_cluster_and_a_line_in_the_document() -> None:
    shown = {id for id, _, _ in BROKEN} | {"placement.topology"}
    assert {check.id for check in CHECKS} == shown
    text = (ROOT / "docs/kubernetes.md").read_text()
    for check in CHECKS:
        assert check.function.__doc__
        assert f"| `{check.id}` | {check.function.__doc__}" in text


def test_without_gpus_only_what_every_node_needs_is_asked() -> None:
    nodes = [node("laptop", gpus=0, **{MODEL[0]: MODEL[1]})]
    seen = report(with_image([*nodes, *healthy()[3:]]))
    assert found(seen, NEEDS.model_copy(update={"profile": "cpu", "gpus": 0})) == {}


def test_what_kubectl_may_not_see_is_said_and_is_no_finding() -> None:
    cluster = Cluster(with_image(healthy()))
    denied = Ran("failed", "", "Error from server (Forbidden): resourceslices is forbidden\n")
    cluster.broken = {"resourceslices": denied, "--raw": denied}
    seen = probe_cluster(cluster)
    assert found(seen) == {}
    assert {item.what for item in seen.unseen} == {"resourceslices", "how the kubelets place containers"}
    assert "Forbidden" in seen.unseen[0].why


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Ran("missing"), "there is no kubectl"),
        (Ran("slow"), "cannot list the nodes"),
        (Ran("failed", "", "The connection to the server was refused\n"), "cannot list the nodes"),
    ],
)
def test_a_cluster_that_does_not_answer_is_an_error_with_kubectls_words(answer: Ran, message: str) -> None:
    cluster = Cluster([])
    cluster.broken = {"get nodes": answer}
    with pytest.raises(HostError, match=message) as caught:
        probe_cluster(cluster)
    assert not answer.err or answer.err.strip() in caught.value.why


def test_saved_nodes_alone_are_enough_and_the_rest_is_not_seen(tmp_path: Path) -> None:
    file = tmp_path / "nodes.json"
    file.write_text(listing(*with_image(healthy())[:3]))
    seen = read_saved(file)
    assert found(seen) == {}
    assert len(seen.unseen) == 4
    file.write_text(listing(*with_image(healthy())))
    assert [item.what for item in read_saved(file).unseen] == ["how the kubelets place containers"]
    # A list of one kind, as the API itself answers, says the kind only at its head.
    bare = [{key: value for key, value in item.items() if key != "kind"} for item in healthy()[:3]]
    file.write_text(json.dumps({"kind": "NodeList", "items": bare}))
    assert len(read_saved(file).nodes) == 3


@pytest.mark.parametrize("text", ["", "{", "[]", '{"items": []}', '{"kind": "PodList", "items": []}', "\x00"])
def test_a_file_without_nodes_is_refused_with_the_command_that_makes_one(tmp_path: Path, text: str) -> None:
    file = tmp_path / "nodes.json"
    file.write_text(text)
    with pytest.raises(HostError) as caught:
        read_saved(file)
    assert caught.value.fix.startswith("kubectl get nodes")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(st.data())
def test_a_node_with_any_field_torn_out_or_replaced_never_breaks_the_probe(data: st.DataObject) -> None:
    item = node("host-a")
    place: Any = item
    path = data.draw(st.sampled_from(["metadata", "spec", "status"]))
    if data.draw(st.booleans()):
        place = item[path]
        path = data.draw(st.sampled_from(sorted(place)))
    place[path] = data.draw(json_values)
    objects = kubernetes.items(listing(item, resource_slice("host-a"), {"kind": "DeviceClass"}))
    seen = ClusterReport(
        name="x",
        taken_at="",
        nodes=kubernetes.nodes(objects),
        kinds=kubernetes.names(objects, "CustomResourceDefinition"),
        device_classes=kubernetes.names(objects, "DeviceClass"),
        devices=kubernetes.devices(objects),
    )
    run_checks(seen, NEEDS)
    headline(seen)


@pytest.mark.parametrize(
    ("text", "value"), [("128", 128), ("127800m", 127.8), ("1Ki", 1024), ("2G", 2e9), ("x", None), (None, None)]
)
def test_quantities_as_kubernetes_writes_them(text: str | None, value: float | None) -> None:
    assert kubernetes.amount(text) == value


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    deploy = Path(sys.executable).parent / "deploy"
    return subprocess.run([str(deploy), "doctor", *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_the_verb_reads_saved_nodes_and_ends_with_3_on_an_error(tmp_path: Path) -> None:
    file = tmp_path / "nodes.json"
    file.write_text(listing(*healthy()))
    done = run("--kubernetes", "--nodes", str(file), "--profile", "cpu", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 3
    assert answer["cluster"] == str(file)
    assert answer["checks"] == len(CHECKS)
    assert {"model.there", "image.there"} <= {finding["id"] for finding in answer["findings"]}
    text = run("--kubernetes", "--nodes", str(file), "--profile", "cpu", "--fix-script")
    assert text.stdout.startswith("#!/bin/sh")
    assert "kubectl label node host-a" in text.stdout
    assert run("--nodes", str(file)).returncode == 2
    missing = run("--kubernetes", "--nodes", str(tmp_path / "missing.json"))
    assert (missing.returncode, "Traceback" in missing.stderr) == (3, False)
