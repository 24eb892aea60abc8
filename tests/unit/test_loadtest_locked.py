"""A run's engines against deploy.lock."""

from pathlib import Path
from typing import Any

import pytest

from deploy.lock.model import Lock, dump
from deploy.stack.roles import locked_role
from loadtest.errors import BenchError
from loadtest.locked import Locks, differences, is_locked, read_locks
from tests.unit.locks import image, layer

ARGUMENTS = ["--served-model-name=tiny", "--page-size=1"]
LOCK = Lock(
    roles={
        "pd": {"decode": locked_role("decode", ["decode", "--served-model-name=flash"], {})},
        "cpu": {"decode": locked_role("decode", ["decode", *ARGUMENTS], {})},
    },
    image=image("1", layer("1", 1)),
)
LOCKS = Locks({}, "0.5.23", LOCK)
REPORT = {"version": "0.5.23", "served_model_name": "tiny", "page_size": 1, "disaggregation_mode": "decode"}


def test_engines_as_locked_show_no_difference() -> None:
    assert differences(LOCKS, {"decode": REPORT, "decode-2": REPORT}, f"sha256:{'1' * 64}") == []
    assert is_locked(LOCKS, {"decode": REPORT})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": "0.5.22"}, "decode has version = '0.5.22', the lock says '0.5.23'"),
        ({"page_size": 64}, "decode has page_size = 64, the lock says 1"),
    ],
)
def test_an_engine_that_reports_otherwise_is_named(change: dict[str, Any], text: str) -> None:
    assert differences(LOCKS, {"decode": REPORT | change}, None) == [text]


def test_another_image_is_named_with_the_command_that_locks_it() -> None:
    [text] = differences(LOCKS, {"decode": REPORT}, f"sha256:{'9' * 64}")
    assert "sha256:999" in text and "deploy lock --update image" in text


def test_a_server_of_another_kind_is_not_locked() -> None:
    other = REPORT | {"served_model_name": "qwen"}
    assert differences(LOCKS, {"decode": other}, None) == []
    assert not is_locked(LOCKS, {"decode": other})
    assert is_locked(LOCKS, {"decode": None}) and is_locked(Locks(), {"decode": other})


def test_locks_are_read_from_the_folder_or_from_the_file_named(tmp_path: Path) -> None:
    assert read_locks(None, tmp_path) == Locks()
    (tmp_path / "uv.lock").write_text('[[package]]\nname = "sglang"\nversion = "0.5.23"\n')
    (tmp_path / "deploy.lock").write_text(dump(LOCK))
    locks = read_locks(None, tmp_path)
    assert locks.version == "0.5.23" and locks.lock == LOCK and set(locks.files) == {"uv.lock", "deploy.lock"}
    assert read_locks(tmp_path / "uv.lock", Path("/")).lock is None


def test_a_lock_that_cannot_be_read_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot read the lock"):
        read_locks(tmp_path / "none.lock", tmp_path)
    (tmp_path / "deploy.lock").write_text("version = 7")
    with pytest.raises(BenchError, match=r"cannot read the lock deploy\.lock"):
        read_locks(None, tmp_path)
