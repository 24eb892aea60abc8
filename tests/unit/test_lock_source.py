import subprocess
from pathlib import Path

import pytest

from deploy.errors import DeployError
from deploy.lock.model import Lock, write_lock
from deploy.lock.source import named_lock

OLD, NEW = Lock(compose={"compose.yaml": "0" * 64}), Lock(compose={"compose.yaml": "1" * 64})


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "--initial-branch=main")
    git("commit", "--allow-empty", "-m", "without a lock")
    for lock in (OLD, NEW):
        write_lock(tmp_path, lock)
        git("add", "deploy.lock")
        git("commit", "-m", "lock")
    return tmp_path


def test_a_lock_is_read_from_a_file_a_folder_or_a_revision(repository: Path) -> None:
    assert named_lock(repository, str(repository / "deploy.lock")) == NEW
    assert named_lock(repository, str(repository)) == NEW
    assert named_lock(repository, "HEAD") == NEW
    assert named_lock(repository, "main~1") == OLD


@pytest.mark.parametrize("name", ["nonsense", "HEAD~2", "--output=x", ""])
def test_what_is_neither_is_refused(repository: Path, name: str) -> None:
    with pytest.raises(DeployError) as raised:
        named_lock(repository, name)
    assert "revision" in raised.value.fix
    assert not (repository / "x").exists()


def test_a_file_that_is_no_lock_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\xff\xd8")
    with pytest.raises(DeployError, match="picture"):
        named_lock(tmp_path, str(tmp_path / "picture.png"))


def test_of_a_file_that_is_no_toml_the_repositorys_own_lock_is_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("a = 1\0\n")
    with pytest.raises(DeployError, match=r"other\.toml does not parse") as caught:
        named_lock(tmp_path, str(tmp_path / "other.toml"))
    assert "git checkout" not in caught.value.fix
