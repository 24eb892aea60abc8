"""`make test-kubernetes` brings what these tests need."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests/unit"), str(ROOT / "engine")]
# kustomize, which the Makefile unpacks for the tests.
os.environ["PATH"] = f"{ROOT / '.cache/programs/usr/bin'}:{os.environ['PATH']}"

from rendering import FLEETS, files  # noqa: E402


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with the manifests of each fleet."""
    found: dict[str, Path] = {}
    for name in FLEETS:
        found[name] = tmp_path_factory.mktemp(name)
        for path, text in files(name).items():
            (found[name] / path).parent.mkdir(parents=True, exist_ok=True)
            (found[name] / path).write_text(text)
    return found
