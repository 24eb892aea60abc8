"""The file that an init container runs alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.model import sampling, tiny
from deploy.model.hashing import lock_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.generate(tmp_path / "model")


def run(manifest: dict[str, object], folder: Path, tmp_path: Path) -> tuple[int, str]:
    file = tmp_path / "model.json"
    file.write_text(json.dumps(manifest))
    # -S, -E: nothing but the standard library, as in the container.
    done = subprocess.run(
        [sys.executable, "-S", "-E", sampling.__file__, str(file), str(folder)], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def listed(folder: Path) -> dict[str, object]:
    return {"file": [file.model_dump() for file in lock_folder(folder).file]}


def test_the_locked_folder_passes(folder: Path, tmp_path: Path) -> None:
    assert run(listed(folder), folder, tmp_path)[0] == 0


@pytest.mark.parametrize("without_list", [False, True])
def test_a_missing_shard_stops_it_even_if_no_model_is_locked(folder: Path, tmp_path: Path, without_list: bool) -> None:
    shard = next(folder.glob("*.safetensors"))
    (folder / sampling.INDEX).write_text(json.dumps({"weight_map": {"a": shard.name}}))
    manifest: dict[str, object] = {"file": []} if without_list else listed(folder)
    assert run(manifest, folder, tmp_path)[0] == 0
    shard.unlink()
    code, text = run(manifest, folder, tmp_path)
    assert (code, text) == (1, f"{shard.name}: No such file or directory\n")


def test_a_cut_file_and_one_with_other_bytes_are_named(folder: Path, tmp_path: Path) -> None:
    manifest = listed(folder)
    shard = next(folder.glob("*.safetensors"))
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.write(b"other")
    (folder / "config.json").write_text("{}")
    code, text = run(manifest, folder, tmp_path)
    assert code == 1
    assert f"{shard.name}: other bytes than deploy.lock's" in text
    assert "config.json: expected" in text
    with shard.open("r+b") as file:
        file.truncate(size - 1)
    assert f"expected {size} bytes, found {size - 1}" in run(manifest, folder, tmp_path)[1]
