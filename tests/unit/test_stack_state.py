import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.errors import DeployError
from deploy.stack.state import LockHeld, State, copy_api_key, write

HOLD = """
import sys
from deploy.stack.state import *
with State(Path(sys.argv[1])).lock("up"):
    print("held", flush=True)
    input()
"""


def test_a_second_command_is_refused_and_told_who_holds_the_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout and holder.stdout.readline() == "held\n"
    with pytest.raises(LockHeld) as caught, State(tmp_path).lock("down"):
        pass
    assert f"`deploy up` (pid {holder.pid}" in caught.value.message
    holder.kill()
    holder.wait()
    with State(tmp_path).lock("down"):
        assert str(os.getpid()) in (tmp_path / "lock").read_text()


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError), State(tmp_path).lock("up"):
        raise ValueError
    with State(tmp_path).lock("up"):
        pass


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a" / "stack.env"
    write(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write(file, "new \ud800")
    assert file.read_text() == "old"
    assert list(file.parent.iterdir()) == [file]


def test_the_containers_copy_of_a_key_is_readable_only_through_its_mount(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    target = State(tmp_path).api_key
    copy_api_key(tmp_path / "key", target)
    assert target.read_text() == "secret"
    assert target.stat().st_mode & 0o777 == 0o444
    assert target.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("text", ["", "two words"])
def test_a_key_file_without_exactly_one_word_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(DeployError, match="one word"):
        copy_api_key(tmp_path / "key", tmp_path / "copy")
