import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import DeployError
from deploy.lock.model import Lock, dump
from deploy.patches import release
from deploy.patches.release import folder_source, install_release, locked_release
from tests.unit.web import serve

ROOT = Path(__file__).parents[2]
UV = ROOT / ".tools/bin/uv"
FILES = {"sglang/__init__.py": "VERSION = 9\n", "sglang/srt/x.py": "def f():\n    return 1\n"}


def no_progress(what: str, done: int, total: int) -> None:
    pass


def write_wheel(folder: Path) -> Path:
    """A wheel of SGLang 9.9 that depends on something no index has."""
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\nRequires-Dist: no-such-package\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    names = [*FILES, *(f"sglang-9.9.dist-info/{name}" for name in about), "sglang-9.9.dist-info/RECORD"]
    path = folder / "sglang-9.9-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
        for name, text in about.items():
            archive.writestr(f"sglang-9.9.dist-info/{name}", text)
        archive.writestr("sglang-9.9.dist-info/RECORD", "".join(f"{name},,\n" for name in names))
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package index that has SGLang 9.9 and nothing else, as the one that uv is set up with."""
    write_wheel(tmp_path / "simple/sglang")
    with serve(tmp_path / "simple") as server:
        monkeypatch.setenv("UV_DEFAULT_INDEX", server.address)
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
        yield server


@pytest.mark.slow
@pytest.mark.skipif(not UV.exists(), reason="needs .tools/bin/uv")
def test_a_release_comes_from_the_configured_index_without_its_dependencies(index: Any, tmp_path: Path) -> None:
    install_release(UV, "9.9", tmp_path / "tree")
    source = folder_source(tmp_path / "tree")
    assert {name: source(name) for name in FILES} == FILES
    assert source("sglang/missing.py") is None
    assert {path.split("/")[1] for path in index.requested} == {"sglang"}


@pytest.mark.slow
@pytest.mark.skipif(not UV.exists(), reason="needs .tools/bin/uv")
def test_a_version_that_is_not_published_is_refused_with_what_uv_says(index: Any, tmp_path: Path) -> None:
    with pytest.raises(DeployError, match=r"SGLang 9\.8 could not be fetched") as failure:
        install_release(UV, "9.8", tmp_path / "tree")
    assert "9.8" in failure.value.why


@pytest.mark.parametrize("version", ["", "--help", "latest", "1 2", "git+https://example.org", "1.0;x"])
def test_what_is_no_version_never_reaches_uv(tmp_path: Path, version: str) -> None:
    def run(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        pytest.fail("uv was started")

    with pytest.raises(DeployError, match="is no version"):
        install_release(UV, version, tmp_path, run)


def test_a_missing_uv_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="uv does not run") as failure:
        install_release(tmp_path / "uv", "9.9", tmp_path)
    assert failure.value.fix == "make .tools/bin/uv"


def test_the_locked_release_is_read_from_the_wheel_that_uv_lock_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = write_wheel(tmp_path)
    asked: list[Path] = []

    def engine_wheel(root: Path, *_: Any) -> tuple[Path, str]:
        asked.append(root)
        return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()

    monkeypatch.setattr(release, "engine_wheel", engine_wheel)
    with locked_release(ROOT, no_progress) as source:
        assert {name: source(name) for name in FILES} == FILES
        assert source("sglang/missing.py") is None
    assert asked == [ROOT]


def test_without_a_lock_there_is_no_locked_release(tmp_path: Path) -> None:
    (tmp_path / "deploy.lock").write_text(dump(Lock()))
    with pytest.raises(DeployError, match="no SGLang is locked"), locked_release(tmp_path, no_progress):
        pass
