"""The manifests against a real API server, if one is named: applied, looked at, removed.

KUBERNETES_TEST_KUBECONFIG names a kubeconfig of a cluster to try on; never the current one, which may be at work.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from rendering import rendered

KUBECONFIG = os.environ.get("KUBERNETES_TEST_KUBECONFIG")
pytestmark = [
    pytest.mark.skipif(not KUBECONFIG, reason="KUBERNETES_TEST_KUBECONFIG names no cluster to try on"),
    pytest.mark.skipif(not shutil.which("kubectl"), reason="there is no kubectl"),
]


def kubectl(*arguments: str, text: str | None = None) -> str:
    done = subprocess.run(
        ["kubectl", f"--kubeconfig={KUBECONFIG}", *arguments], input=text, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "overlay"), [("replicas", "device-plugin"), ("pd", "device-plugin")])
def test_everything_is_taken_as_it_is_and_removed_again(exports: dict[str, Path], name: str, overlay: str) -> None:
    kinds = kubectl("api-resources", "--output=name")
    if name == "pd" and "leaderworkersets" not in kinds:
        pytest.skip("the cluster has no LeaderWorkerSet")
    folder = str(exports[name] / "overlays" / overlay)
    names = {item["metadata"]["name"] for item in rendered(exports, name, overlay)}
    try:
        kubectl("apply", "--server-side", "--validate=strict", "-k", folder)
        there = json.loads(kubectl("get", "-k", folder, "--output=json"))["items"]
        assert {item["metadata"]["name"] for item in there} == names
        # The same once more changes nothing.
        again = kubectl("apply", "--server-side", "--dry-run=server", "-k", folder)
        assert len(again.splitlines()) == len(there)
    finally:
        kubectl("delete", "--ignore-not-found", "--wait=true", "--timeout=240s", "-k", folder)
    assert not kubectl("get", "-k", folder, "--ignore-not-found", "--output=name").strip()
