import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import DeployError
from deploy.model.hashing import folder_files, hash_files, lock_folder
from deploy.model.sampling import BLOCK_BYTES, BLOCKS, sample
from deploy.reading import CHUNK_BYTES


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_every_file_gets_its_own_sha256(tmp_path_factory: pytest.TempPathFactory, contents: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("files")
    expected: dict[Path, str] = {}
    for number, content in enumerate(contents):
        (folder / str(number)).write_bytes(content)
        expected[folder / str(number)] = hashlib.sha256(content).hexdigest()
    assert hash_files(expected) == expected


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    sizes = [0, 5, CHUNK_BYTES, 3 * CHUNK_BYTES + 1]
    for size in sizes:
        (tmp_path / str(size)).write_bytes(os.urandom(size))
    seen: list[tuple[int, int]] = []
    hash_files(tmp_path.iterdir(), lambda done, total: seen.append((done, total)), workers=3)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (sum(sizes), sum(sizes))


def test_a_sample_sees_size_beginning_middle_and_end_and_reads_no_more(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    size = 40 * BLOCKS * BLOCK_BYTES
    path.write_bytes(bytes(size))
    before = sample(path)
    last = size - BLOCK_BYTES
    for offset in (0, last * 7 // (BLOCKS - 1), size - 1):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"x")
        assert sample(path) != before
        path.write_bytes(bytes(size))
    assert sample(path) == before
    with path.open("r+b") as file:
        file.seek(2 * BLOCK_BYTES)
        file.write(b"x")
    assert sample(path) == before
    os.truncate(path, size - 1)
    assert sample(path) != before


@given(st.binary(max_size=50), st.data())
def test_a_sample_of_a_small_file_sees_every_byte(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("small") / "file"
    path.write_bytes(content)
    before = sample(path)
    changed = data.draw(st.binary(max_size=50).filter(lambda other: other != content))
    path.write_bytes(changed)
    assert sample(path) != before


def test_a_folder_is_locked_without_what_a_downloader_keeps_for_itself(tmp_path: Path) -> None:
    for name in ("config.json", "sub/model.safetensors", ".cache/lock", ".gitattributes"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    locked = lock_folder(tmp_path, "owner/name", "a" * 40)
    assert [(file.path, file.size) for file in locked.file] == [("config.json", 11), ("sub/model.safetensors", 21)]
    assert locked.file[0].sha256 == hashlib.sha256(b"config.json").hexdigest()
    assert (locked.repo, locked.revision, locked.size) == ("owner/name", "a" * 40, 32)


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_files_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    assert folder_files(tmp_path / name) == {}
    with pytest.raises(DeployError, match="no files"):
        lock_folder(tmp_path / name)


def test_ctrl_c_ends_hashing_of_a_huge_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    code = """
import sys
from pathlib import Path
from deploy.model.hashing import hash_files
hash_files([Path(sys.argv[1])], lambda done, total: print(flush=True))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as run:
        assert run.stdout
        run.stdout.readline()
        begun = time.monotonic()
        run.send_signal(2)
        run.communicate(timeout=30)
    assert time.monotonic() - begun < 10
    assert run.returncode != 0
