"""The real router behind its gate finds engines in the pods that an export makes; Kubernetes' API is a stand-in."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/unit"))

from fleets import files  # noqa: E402

SCRIPT = Path(__file__).with_name("discovery_standin.py")


def exported(name: str) -> dict[str, Any]:
    """The router's arguments and environment, and the metadata of each engine's pods, as an export has them."""
    router: dict[str, Any] = {}
    pods: dict[str, Any] = {}
    written = files(name)
    for file in ("base/engines.yaml", "base/router.yaml"):
        for item in yaml.safe_load_all(written[file]):
            spec = item.get("spec", {})
            group = spec.get("leaderWorkerTemplate", {})
            for template in (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")):
                if template:
                    (container,) = template["spec"]["containers"]
                    if container["name"] == "router":
                        router = container
                    else:
                        pods[container["name"]] = template["metadata"]
    environment = {item["name"]: item["value"] for item in router["env"]}
    return {"args": router["args"], "env": environment, "pods": pods}


def run(image: str, name: str, folder: Path) -> dict[str, Any]:
    folder.chmod(0o755)
    file = folder / "exported.json"
    file.write_text(json.dumps(exported(name)))
    for key in ("api_key", "admin_key"):
        (folder / key).write_text(f"a-{key}-of-the-test\n")
    mounts = [f"{SCRIPT}:/script.py:ro", f"{file}:/exported.json:ro"]
    # As the pod: each key a file below /run/secrets.
    mounts += [f"{folder / key}:/run/secrets/{key}:ro" for key in ("api_key", "admin_key")]
    volumes = [word for mount in mounts for word in ("--volume", mount)]
    confined = ["--network", "none", "--read-only", "--cap-drop", "ALL", "--tmpfs", "/tmp:mode=1777"]
    command = [image, "python", "/script.py", "/exported.json"]
    done = subprocess.run(
        ["docker", "run", "--rm", *confined, *volumes, "--env", "KEYS=/run/secrets", *command],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "asked", "bootstrap"),
    [("pd", ["127.0.0.11", "127.0.0.12"], [["127.0.0.11", 8998]]), ("replicas", 1, [])],
)
def test_the_router_takes_ready_pods_with_the_exported_labels_and_no_others(
    image: str, tmp_path: Path, name: str, asked: Any, bootstrap: Any
) -> None:
    steps = run(image, name, tmp_path)
    assert steps["found"], steps.get("log")
    assert (steps["ready"], steps["answer"]) == (200, 200)
    # Of prefill and decode both got the question, with the port that the pod's annotation names.
    assert (steps["asked"], steps["bootstrap"]) == (asked, bootstrap)
    assert steps["one more, ready now"], steps.get("log")
    assert steps["gone when its deletion begins"], steps.get("log")
    # A router may list the pods of its namespace and nothing else.
    assert steps["paths"] == ["/api/v1/namespaces/dsv4-test/pods"]
