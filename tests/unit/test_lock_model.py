from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings

from deploy.errors import DeployError
from deploy.lock.model import Lock, LockedFile, LockedWheel, dump, load, read_lock, write_lock
from tests.unit.locks import locks

REPOSITORY = Path(__file__).parents[2]


@settings(max_examples=30)
@given(locks)
def test_a_lock_written_and_read_is_the_same_lock_and_the_same_text(lock: Lock) -> None:
    assert load(dump(lock)) == lock
    assert dump(load(dump(lock))) == dump(lock)


def test_the_repositorys_lock_is_written_as_it_was_read() -> None:
    text = (REPOSITORY / "deploy.lock").read_text(encoding="utf-8")
    assert dump(load(text)) == text


def test_a_wheel_is_one_line() -> None:
    wheel = LockedWheel(file="torch-2.14.1-cp311-cp311-linux_x86_64.whl", sha256="0" * 64)
    assert wheel.version == "2.14.1"
    assert f'torch = "torch-2.14.1-cp311-cp311-linux_x86_64.whl#sha256={"0" * 64}"' in dump(
        Lock(wheels={"torch": wheel})
    )


@pytest.mark.parametrize("path", ["", "/etc/passwd", "..", "a/../../b", "../a"])
def test_a_path_that_leaves_the_folder_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="inside the folder"):
        LockedFile(path=path, size=0, sha256="0" * 64)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("version = 2\n", "version"),
        ("[kernels]\ntree = 'x'\n", "kernels.tree"),
        ("[surprise]\nx = 1\n", "surprise"),
        ("[wheels]\ntorch = 'torch.whl'\n", "wheels.torch"),
        (f"[image]\ninputs = '{'0' * 64}'\nenvironment = '{'0' * 64}'\nid = 'sha256:{'0' * 64}'\n", "layers"),
    ],
)
def test_a_lock_that_this_version_does_not_read_is_refused_by_field(text: str, complaint: str) -> None:
    with pytest.raises(DeployError) as raised:
        load(text, "old.lock")
    assert raised.value.message.startswith("old.lock ")
    assert complaint in raised.value.why


def test_a_missing_lock_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="missing") as raised:
        read_lock(tmp_path)
    assert "deploy lock" in raised.value.fix


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "deploy.lock").write_bytes(b"\xff\xfe")
    with pytest.raises(DeployError, match="cannot be read"):
        read_lock(tmp_path)


def test_a_write_that_fails_leaves_the_old_lock_and_no_litter(tmp_path: Path) -> None:
    write_lock(tmp_path, Lock(compose={"a": "0" * 64}))
    before = (tmp_path / "deploy.lock").read_bytes()
    with mock.patch("os.fsync", side_effect=OSError(28, "No space left on device")), pytest.raises(OSError):
        write_lock(tmp_path, Lock(compose={"a": "1" * 64}))
    assert (tmp_path / "deploy.lock").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["deploy.lock"]
