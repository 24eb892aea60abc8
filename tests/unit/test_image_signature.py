from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.errors import DeployError
from deploy.image.build import ImageReference
from deploy.image.registry import parse_registry
from deploy.image.signature import NotSigned, require_signature, sign
from deploy.lock.model import ImageLock
from deploy.spec.load import load
from deploy.stack import up
from tests.unit.locks import image, layer

DIGEST = f"sha256:{'1' * 64}"
REGISTRY = parse_registry("127.0.0.1:5000")


def test_without_cosign_nothing_counts_as_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cosign.pub").write_text("key")
    monkeypatch.setenv("PATH", str(tmp_path))
    for act in (sign, require_signature):
        with pytest.raises(DeployError, match="cosign is not installed"):
            act(REGISTRY, DIGEST, tmp_path / "cosign.pub")


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="is missing") as raised:
        require_signature(REGISTRY, DIGEST, tmp_path / "cosign.pub")
    assert str(tmp_path / "cosign.pub") in raised.value.why


LOCKED = image("1", layer("1", 1), manifest=DIGEST)


@pytest.mark.parametrize(
    ("locked", "found"),
    [
        (None, LOCKED.id),
        (image("1", layer("1", 1)), LOCKED.id),
        (LOCKED, f"sha256:{'2' * 64}"),
    ],
)
def test_up_refuses_an_image_that_no_signature_can_be_over(
    locked: ImageLock | None, found: str, tmp_path: Path
) -> None:
    (tmp_path / "deploy.toml").write_text('[image]\nregistry = "127.0.0.1:5000"\npublic_key = "cosign.pub"\n')
    spec_file = load(tmp_path / "deploy.toml")
    with pytest.raises(NotSigned):
        up._require_signed(spec_file, locked, ImageReference("tag", found, 1, False))  # pyright: ignore[reportPrivateUsage]


def test_up_asks_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deploy.image.obtain import Obtained
    from deploy.stack.state import State

    (tmp_path / "deploy.toml").write_text(
        'profile = "cpu"\n[image]\nregistry = "127.0.0.1:5000"\npublic_key = "cosign.pub"\n'
    )

    def obtain(*arguments: Any) -> Obtained:
        return Obtained(ImageReference("tag", f"sha256:{'2' * 64}", 1, False), "already here")

    def started(*arguments: Any) -> Any:
        raise AssertionError("the stack was planned with an image that is not signed")

    def plan(root: Path, spec_file: Any, state: Any, image: str) -> Any:
        return (SimpleNamespace(), []) if not image else started()

    for name, value in (("obtain", obtain), ("plan", plan)):
        monkeypatch.setattr(up, name, value)
    monkeypatch.setattr(up, "check_host", lambda *arguments: "")  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(NotSigned):
        root = Path(__file__).parents[2]
        up.up(root, load(tmp_path / "deploy.toml"), State(tmp_path / "state"), lambda event: None)
