"""What an export refuses before it asks Compose for anything."""

from pathlib import Path

import pytest
from fleets import IMAGE

from deploy.errors import WrongInput
from deploy.kubernetes.source import BY_DIGEST, Wishes, prepare
from deploy.spec.load import parse


def test_what_is_named_wrongly_is_said_before_what_is_behind(tmp_path: Path) -> None:
    """The folder has no deploy.lock at all."""
    for wishes, message in (
        (Wishes(tmp_path, "dsv4", 1), "in no registry"),
        (Wishes(tmp_path, "dsv4", 1, image="i:tag"), "not an image by digest"),
        (Wishes(tmp_path, "dsv4", 1, image=IMAGE, model_folder="model"), "not an absolute path"),
        (Wishes(tmp_path, "dsv4", 1, image=IMAGE, draft_folder="draft"), "not an absolute path"),
    ):
        with pytest.raises(WrongInput, match=message):
            prepare(tmp_path, parse("", Path("deploy.toml")), wishes)


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("registry.lan:5000/team/image", True),
        ("[fd00::1]:5000/image", True),
        ("registry.lan/a__b/c.d-e:v1.2", True),
        ("image", True),
        ("bad@host/i", False),
        ("registry.lan/UPPER", False),
        ("registry.lan//i", False),
        ("registry.lan/i:", False),
        ("https://registry.lan/i", False),
        ("registry.lan/i\n", False),
        ("\x1b[31m/i", False),
        ("", False),
    ],
)
def test_an_image_by_digest_has_the_name_of_one(name: str, good: bool) -> None:
    assert bool(BY_DIGEST.fullmatch(f"{name}@sha256:{'0' * 64}")) == good
