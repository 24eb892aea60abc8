"""Every patch is needed: without it, and with all others, a test of this folder fails."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PATCHES = FOLDER.parents[1] / "patches"
SERIES = [line for line in (PATCHES / "series").read_text().splitlines() if not line.startswith("#")]


def copy_patched(patch: Path, folder: Path) -> None:
    """The installed, patched files that a patch touches."""
    for path in re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), re.MULTILINE):
        copy = folder / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(Path(sysconfig.get_path("purelib"), path).read_bytes())


def outcome(overlay: Path) -> tuple[int, str]:
    """Exit status and words of the other tests of this folder with these files of SGLang."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-qx", "--ignore", __file__, str(FOLDER)]
    done = subprocess.run(command, env=os.environ | {"SGLANG_OVERLAY": str(overlay)}, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("name", SERIES)
def test_a_test_fails_without(name: str, tmp_path: Path) -> None:
    copy_patched(PATCHES / name, tmp_path)
    # Fuzz is allowed here: a later patch may have changed the lines around.
    undo = ["patch", "--strip=1", "--reverse", "--batch", f"--directory={tmp_path}"]
    subprocess.run(undo, input=(PATCHES / name).read_bytes(), check=True, capture_output=True)
    status, words = outcome(tmp_path)
    assert status == pytest.ExitCode.TESTS_FAILED, words


def test_none_fails_with_all_of_them_in_an_overlay(tmp_path: Path) -> None:
    for name in SERIES:
        copy_patched(PATCHES / name, tmp_path)
    status, words = outcome(tmp_path)
    assert status == pytest.ExitCode.OK, words
