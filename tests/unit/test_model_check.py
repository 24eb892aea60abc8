import os
from pathlib import Path

import pytest

from deploy.lock.model import ModelLock
from deploy.model import check
from deploy.model.check import FileDrift, check_folder
from deploy.model.hashing import lock_folder
from deploy.model.sampling import BLOCK_BYTES

BIG = 40 * 16 * BLOCK_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "model/big.safetensors").write_bytes(bytes(BIG))
    return tmp_path / "model"


@pytest.fixture
def model(folder: Path) -> ModelLock:
    return lock_folder(folder)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"x")


@pytest.mark.parametrize("full", [False, True])
def test_an_untouched_folder_has_no_drift(folder: Path, model: ModelLock, full: bool) -> None:
    assert check_folder(folder, model, full=full) == []


@pytest.mark.parametrize("full", [False, True])
def test_missing_surplus_and_cut_files_are_named_with_both_sizes(folder: Path, model: ModelLock, full: bool) -> None:
    (folder / "config.json").unlink()
    (folder / "extra.safetensors").write_text("surplus")
    os.truncate(folder / "big.safetensors", 5)
    assert check_folder(folder, model, full=full) == [
        FileDrift("big.safetensors", f"{BIG} bytes", "5 bytes"),
        FileDrift("config.json", "2 bytes", "no such file"),
        FileDrift("extra.safetensors", "no such file", "7 bytes"),
    ]


def test_a_sample_finds_damage_in_a_sampled_block_and_the_full_check_finds_any(folder: Path, model: ModelLock) -> None:
    flip(folder / "big.safetensors", 0)
    (drift,) = check_folder(folder, model)
    assert drift.expected.startswith("sample ") and drift.found.startswith("sample ")
    flip(folder / "big.safetensors", 2 * BLOCK_BYTES)
    with (folder / "big.safetensors").open("r+b") as file:
        file.write(b"\0")
    assert check_folder(folder, model) == []
    (drift,) = check_folder(folder, model, full=True)
    assert drift.expected == f"sha256 {model.file[0].sha256}"


def test_a_file_that_changed_after_a_full_check_is_hashed_anew(folder: Path, model: ModelLock, tmp_path: Path) -> None:
    memory = tmp_path / "state" / "models.json"
    assert check_folder(folder, model, full=True, memory=memory) == []
    assert check_folder(folder, model, memory=memory) == []
    flip(folder / "big.safetensors", 2 * BLOCK_BYTES)
    (drift,) = check_folder(folder, model, memory=memory)
    assert drift.path == "big.safetensors" and drift.found.startswith("sha256 ")


def test_a_touched_file_with_the_same_content_is_no_drift(folder: Path, model: ModelLock, tmp_path: Path) -> None:
    memory = tmp_path / "models.json"
    check_folder(folder, model, full=True, memory=memory)
    os.utime(folder / "big.safetensors", ns=(1, 1))
    assert check_folder(folder, model, memory=memory) == []
    before = memory.read_bytes()
    assert check_folder(folder, model, memory=memory) == []
    assert memory.read_bytes() == before


def test_a_large_file_that_changed_is_left_to_the_full_check(
    folder: Path, model: ModelLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "models.json"
    check_folder(folder, model, full=True, memory=memory)
    monkeypatch.setattr(check, "SMALL_BYTES", 100)
    os.utime(folder / "big.safetensors", ns=(1, 1))
    (drift,) = check_folder(folder, model, memory=memory)
    assert "--full" in drift.found
    assert check_folder(folder, model, full=True, memory=memory) == []
    assert check_folder(folder, model, memory=memory) == []


@pytest.mark.parametrize("damage", ["not json", "[1]", ""])
def test_a_damaged_memory_is_no_obstacle(folder: Path, model: ModelLock, tmp_path: Path, damage: str) -> None:
    memory = tmp_path / "models.json"
    memory.write_text(damage)
    assert check_folder(folder, model, memory=memory) == []
    assert check_folder(folder, model, full=True, memory=memory) == []


def test_files_locked_without_a_sample_are_compared_by_size(folder: Path, model: ModelLock) -> None:
    bare = ModelLock(file=tuple(file.model_copy(update={"sample": ""}) for file in model.file))
    assert check_folder(folder, bare) == []
    os.truncate(folder / "big.safetensors", 5)
    assert len(check_folder(folder, bare)) == 1
