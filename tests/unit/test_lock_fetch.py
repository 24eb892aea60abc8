import hashlib
from pathlib import Path

import pytest

from deploy.errors import DeployError
from deploy.lock.fetch import fetch
from tests.unit.web import serve

CONTENT = b"wheel" * 100_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.whl").write_bytes(CONTENT)
    return tmp_path


def test_a_file_is_fetched_once_and_then_taken_from_the_cache_without_network(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    with serve(folder) as server:
        url = f"{server.address}/a.whl"
        path = fetch(url, SHA256, folder / "cache", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT)) and len(seen) > 1
    assert fetch(url, SHA256, folder / "cache") == path


def test_a_damaged_file_in_the_cache_is_fetched_again(folder: Path) -> None:
    (folder / "cache").mkdir()
    (folder / "cache" / SHA256).write_bytes(b"damaged")
    with serve(folder) as server:
        assert fetch(f"{server.address}/a.whl", SHA256, folder / "cache").read_bytes() == CONTENT


def test_other_bytes_than_the_locked_are_refused_with_both_hashes(folder: Path) -> None:
    with serve(folder) as server, pytest.raises(DeployError) as raised:
        fetch(f"{server.address}/a.whl", "1" * 64, folder / "cache")
    assert SHA256 in raised.value.why and "1" * 64 in raised.value.why
    assert list((folder / "cache").iterdir()) == []


@pytest.mark.parametrize("path", ["cut.whl", "gone.whl"])
def test_what_does_not_come_whole_leaves_nothing_behind(folder: Path, path: str) -> None:
    with serve(folder, cuts=1 if path == "cut.whl" else 0) as server, pytest.raises(DeployError) as raised:
        fetch(f"{server.address}/{path}", SHA256, folder / "cache")
    assert path in raised.value.message
    assert "deploy.lock is as it was" in raised.value.fix
    assert list((folder / "cache").iterdir()) == []


def test_no_network_is_an_error_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(DeployError) as raised:
        fetch("http://127.0.0.1:1/a.whl", SHA256, tmp_path)
    assert "network" in raised.value.fix


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((DeployError, NotADirectoryError, FileExistsError)) as raised:
        fetch("http://127.0.0.1:1/a.whl", SHA256, tmp_path / "file" / "cache")
    assert "file" in str(raised.value)
