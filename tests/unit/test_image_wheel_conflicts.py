"""Files that two wheels install with different content."""

import sys
from pathlib import Path

import pytest

from deploy.image import wheel_conflicts
from deploy.image.wheel_conflicts import UNWANTED, claims, conflicts


def install(site_packages: Path, name: str, files: dict[str, str]) -> None:
    folder = site_packages / f"{name}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "RECORD").write_text("".join(f"{path},sha256={digest},1\n" for path, digest in files.items()))
    for path in files:
        (site_packages / path).parent.mkdir(parents=True, exist_ok=True)
        (site_packages / path).write_text(name)


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    return tmp_path / "lib" / "python3.11" / "site-packages"


def run(site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["wheel_conflicts.py", str(site_packages)])
    wheel_conflicts.main()


def test_the_same_file_twice_is_no_conflict(site_packages: Path) -> None:
    install(site_packages, "one", {"shared.py": "a", "one.py": "b"})
    install(site_packages, "two", {"./shared.py": "a"})
    assert conflicts(claims(site_packages)) == {}


def test_a_known_conflict_is_removed_and_nothing_else(site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unwanted = sorted(UNWANTED)
    install(site_packages, "one", {**dict.fromkeys(unwanted, "a"), "one.py": "b"})
    install(site_packages, "two", dict.fromkeys(unwanted, "c"))
    run(site_packages, monkeypatch)
    assert not any((site_packages / path).exists() for path in unwanted)
    assert (site_packages / "one.py").exists()


def test_a_file_that_one_wheel_alone_brings_stays(site_packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site_packages, "one", {"build_backend.py": "a"})
    run(site_packages, monkeypatch)
    assert (site_packages / "build_backend.py").exists()


def test_an_unknown_conflict_stops_the_build_and_names_both_wheels(
    site_packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site_packages, "one", {"needed.py": "a"})
    install(site_packages, "two", {"needed.py": "b"})
    with pytest.raises(SystemExit, match=r"needed\.py by one-1\.0 and two-1\.0"):
        run(site_packages, monkeypatch)
    assert (site_packages / "needed.py").exists()
