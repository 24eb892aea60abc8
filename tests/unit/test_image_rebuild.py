import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.host.errors import HostError
from deploy.image.builder import own_engine
from deploy.image.rebuild import differing_files, first_difference

digests = st.lists(st.sampled_from("abc"), max_size=4)


@given(digests, digests)
def test_two_images_first_differ_in_the_layer_up_to_which_they_are_equal(one: list[str], other: list[str]) -> None:
    place = first_difference(one, other)
    assert (place is None) == (one == other)
    if place is not None:
        assert one[:place] == other[:place]
        assert one[place : place + 1] != other[place : place + 1]


@pytest.fixture
def layers(tmp_path: Path) -> tuple[Path, Path]:
    """Two equal folders."""
    for name in ("one", "other"):
        (tmp_path / name / "opt").mkdir(parents=True)
        (tmp_path / name / "opt/a").write_text("content")
        (tmp_path / name / "opt/link").symlink_to("a")
        for path in (tmp_path / name / "opt/a", tmp_path / name / "opt"):
            os.utime(path, (1767225600, 1767225600))
        os.utime(tmp_path / name / "opt/link", (1767225600, 1767225600), follow_symlinks=False)
    return tmp_path / "one", tmp_path / "other"


def test_equal_layers_have_no_differing_file(layers: tuple[Path, Path]) -> None:
    assert differing_files(*layers) == []


def link_elsewhere(layer: Path) -> None:
    (layer / "opt/link").unlink()
    (layer / "opt/link").symlink_to("b")


CHANGES: list[tuple[Callable[[Path], object], str, str]] = [
    (lambda layer: (layer / "opt/a").write_text("Content"), "opt/a", "sha256"),
    (lambda layer: (layer / "opt/a").chmod(0o600), "opt/a", "mode -rw-r--r-- -> -rw-------"),
    (lambda layer: os.utime(layer / "opt/a", (1, 1)), "opt/a", "time 1767225600.0 -> 1.0"),
    (lambda layer: os.setxattr(layer / "opt/a", "user.x", b"1"), "opt/a", "attributes {} -> {'user.x': b'1'}"),
    (lambda layer: (layer / "new").write_text(""), "new", "only in the new one"),
    (lambda layer: (layer / "opt/a").unlink(), "opt/a", "only in the locked image"),
    (link_elsewhere, "opt/link", "target a -> b"),
]


@pytest.mark.parametrize(("change", "path", "words"), CHANGES)
def test_a_differing_file_is_named_with_what_differs(
    layers: tuple[Path, Path], change: Callable[[Path], object], path: str, words: str
) -> None:
    change(layers[1])
    (line,) = [line for line in differing_files(*layers) if line.startswith(f"{path}: ")]
    assert words in line


def test_many_differing_files_are_cut_short(layers: tuple[Path, Path]) -> None:
    for number in range(5):
        (layers[1] / f"{number}").write_text("")
    assert differing_files(*layers, most=2) == ["0: only in the new one", "1: only in the new one", "and 3 more"]


def test_a_host_without_an_engines_program_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("deploy.image.builder.DAEMON_FOLDERS", ())
    with pytest.raises(HostError, match="cannot be started"), own_engine(tmp_path / "engine"):
        pass
    assert not (tmp_path / "engine").exists()
