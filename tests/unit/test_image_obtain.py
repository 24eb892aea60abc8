from pathlib import Path
from typing import Any

import pytest

from deploy.errors import DeployError
from deploy.image import obtain
from deploy.image.build import ImageReference
from deploy.image.inputs import read_inputs
from deploy.image.obtain import Sources
from deploy.image.registry import NotInRegistry, RegistryUnreachable
from deploy.image.transfer import Pulled
from deploy.lock.model import ImageLock
from tests.unit.locks import layer

ROOT = Path(__file__).parents[2]
HERE = ImageReference("tag", "sha256:1", 1, built=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins for Docker and the registry; what each answers can be changed."""
    answers: dict[str, Any] = {"find": None, "pull": Pulled(HERE, 2, 3_000_000), "build": HERE, "order": []}

    def answer(name: str) -> Any:
        def called(*arguments: Any, **named: Any) -> Any:
            answers["order"].append(name)
            if isinstance(answers[name], Exception):
                raise answers[name]
            return answers[name]

        return called

    monkeypatch.setattr(obtain, "find_image", answer("find"))
    monkeypatch.setattr(obtain, "pull", answer("pull"))
    monkeypatch.setattr(obtain, "ensure_image", answer("build"))
    return answers


def locked(inputs: str | None = None) -> ImageLock:
    identity = f"sha256:{'1' * 64}"
    return ImageLock(inputs=inputs or read_inputs(ROOT).hash, environment="0" * 64, id=identity, layer=(layer("1", 1),))


REGISTRY = Sources("registry.example")


def test_an_image_that_is_here_is_taken_without_asking_the_registry(asked: dict[str, Any]) -> None:
    asked["find"] = HERE
    assert obtain.obtain(ROOT, locked(), REGISTRY).origin == "already here"
    assert asked["order"] == ["find"]


def test_the_locked_image_comes_from_the_registry_before_it_is_built(asked: dict[str, Any]) -> None:
    assert obtain.obtain(ROOT, locked(), REGISTRY).origin == "2 layers, 3.0 MB from registry.example"
    assert asked["order"] == ["find", "pull"]


@pytest.mark.parametrize("refusal", [NotInRegistry("m", "w", "f"), RegistryUnreachable("m", "w", "f")])
def test_a_registry_without_the_image_or_out_of_reach_is_said_and_the_image_built(
    asked: dict[str, Any], refusal: DeployError
) -> None:
    asked["pull"] = refusal
    found = obtain.obtain(ROOT, locked(), REGISTRY)
    assert found.origin.startswith("built; ")
    assert asked["order"] == ["find", "pull", "build"]


def test_a_registry_with_another_image_is_an_error_and_no_reason_to_build(asked: dict[str, Any]) -> None:
    asked["pull"] = DeployError("another image", "expected a, found b", "")
    with pytest.raises(DeployError, match="another image"):
        obtain.obtain(ROOT, locked(), REGISTRY)
    assert asked["order"] == ["find", "pull"]


@pytest.mark.parametrize("lock", [None, locked("0" * 64)])
def test_an_image_that_the_lock_does_not_know_is_not_taken_from_a_registry(
    asked: dict[str, Any], lock: ImageLock | None
) -> None:
    assert "deploy.lock does not know it" in obtain.obtain(ROOT, lock, REGISTRY).origin
    assert asked["order"] == ["find", "build"]


def test_without_a_registry_the_image_is_built(asked: dict[str, Any]) -> None:
    assert obtain.obtain(ROOT, locked(), Sources()).origin == "built"
    assert asked["order"] == ["find", "build"]
