"""Exports as Kustomize renders them."""

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from fleets import TOML, files

FLEETS = tuple(TOML)
KUSTOMIZE = [["kustomize", "build"], ["kubectl", "kustomize"]]


def kustomize() -> list[str]:
    """The command that renders a folder."""
    for command in KUSTOMIZE:
        if shutil.which(command[0]):
            return command
    pytest.skip("there is neither kustomize nor kubectl here")


@cache
def render(folder: Path) -> list[dict[str, Any]]:
    """What `kubectl apply -k` would send."""
    done = subprocess.run([*kustomize(), str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def overlays() -> list[tuple[str, str]]:
    """Every overlay of every fleet."""
    return [
        (name, path.split("/")[1]) for name in FLEETS for path in sorted(files(name)) if path.startswith("overlays/")
    ]


def rendered(exports: dict[str, Path], name: str, overlay: str) -> list[dict[str, Any]]:
    return render(exports[name] / "overlays" / overlay)


def templates(item: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Pod templates of an object by the name of their first container, with how many pods each makes."""
    spec = item.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    found = [spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate")]
    return {
        template["spec"]["containers"][0]["name"]: template
        for template in found
        if template and "containers" in template.get("spec", {})
    }
