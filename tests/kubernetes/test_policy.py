"""A policy scan of what would be applied. Its exceptions are annotations of the objects, each with a reason."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import overlays, rendered, templates

ROOT = Path(__file__).parents[2]
CHECKOV = ROOT / ".cache/checkov/bin/checkov"


def workloads(item: dict[str, Any]) -> list[dict[str, Any]]:
    """A group of pods as one Deployment for each of its pods, which the scan knows."""
    if item["kind"] != "LeaderWorkerSet":
        return [item]
    return [
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {**item["metadata"], "name": role},
            "spec": {"selector": {"matchLabels": template["metadata"]["labels"]}, "template": template},
        }
        for role, template in templates(item).items()
    ]


def scan(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [CHECKOV, "--directory", folder, "--framework", "kubernetes", "--output", "json", "--quiet", "--skip-download"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def result(exports: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One scan of all: starting it takes longer than scanning."""
    if not CHECKOV.exists():
        pytest.skip("checkov is not here: make test-kubernetes brings it")
    folder = tmp_path_factory.mktemp("scan")
    for name, overlay in overlays():
        items = [part for item in rendered(exports, name, overlay) for part in workloads(item)]
        (folder / f"{name}-{overlay}.yaml").write_text(yaml.safe_dump_all(items))
    broken = next(
        part
        for item in rendered(exports, "pd", "device-plugin")
        for part in workloads(item)
        if "template" in part.get("spec", {})
    )
    spec = broken["spec"]["template"]["spec"]
    spec = {
        **spec,
        "hostNetwork": True,
        "containers": [{**spec["containers"][0], "securityContext": {"privileged": True}}],
    }
    broken = {**broken, "spec": {**broken["spec"], "template": {**broken["spec"]["template"], "spec": spec}}}
    (folder / "broken.yaml").write_text(yaml.safe_dump(broken))
    return scan(folder)


def failed(result: dict[str, Any], broken: bool) -> set[tuple[str, str]]:
    found = result["results"]["failed_checks"]
    return {
        (check["check_id"], check["resource"])
        for check in found
        if (Path(check["file_path"]).name == "broken.yaml") is broken
    }


def test_no_check_fails_that_is_not_argued_for_in_its_place(result: dict[str, Any]) -> None:
    assert result["summary"]["resource_count"] > 100
    assert failed(result, broken=False) == set()


def test_the_scan_sees_what_is_wrong(result: dict[str, Any]) -> None:
    assert {check for check, _ in failed(result, broken=True)} >= {"CKV_K8S_16", "CKV_K8S_19"}
