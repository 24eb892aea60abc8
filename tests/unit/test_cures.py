"""What is said of a failure of the operating system, whichever it is."""

import errno
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deploy.cures import cure
from deploy.host.probe_host import LocalMachine

NUMBERS = st.sampled_from(sorted(errno.errorcode))
NAMES = st.none() | st.binary(min_size=1).map(os.fsdecode) | st.binary(min_size=1) | st.integers(0, 1000)


@given(NUMBERS, NAMES)
@example(errno.EIO, "a b/c")
@example(errno.EBUSY, "a;b")
def test_there_is_a_way_out_of_every_failure_and_a_name_in_it_is_one_word_of_the_shell(
    number: int, name: str | bytes | int | None
) -> None:
    words = cure(OSError(number, os.strerror(number), name))
    assert words.strip()
    text = str(name or "") if isinstance(name, int | None) else os.fsdecode(name)
    folder = shlex.quote(os.path.dirname(text) or ".")  # noqa: PTH120
    # Shorter names are also in the words around them.
    if shlex.quote(text) != text and len(text) > 2:
        assert text not in words.replace(shlex.quote(text), "").replace(folder, "")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EIO, "dmesg"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENFILE, "fs.file-max"),
        (errno.ETXTBSY, "fuser"),
        (errno.EBUSY, "fuser"),
        (errno.EXDEV, "one file system"),
        (errno.ESTALE, "mount"),
        (errno.ENOLCK, "local disk"),
        (errno.ENOMEM, "free memory"),
        (errno.EFBIG, "ulimit -f"),
        (errno.ENOEXEC, "uname -m"),
        (errno.EDQUOT, "df -h"),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_what_can_really_happen_has_its_own_command(number: int, words: str) -> None:
    assert words in cure(OSError(number, os.strerror(number), "folder/file"))


def test_every_failure_that_reaches_the_command_line_is_a_message_with_a_fix() -> None:
    """All numbers in one process: each raised by a verb, with a file's name and without."""
    code = (
        "import errno, os, sys, typer\nfrom deploy.entry import OUTPUT, run\napp = typer.Typer()\n"
        "@app.command()\ndef verb() -> None:\n    raise OSError(number, os.strerror(number), *name)\n"
        "sys.argv = ['deploy']\n"
        "for number in errno.errorcode.keys() - {errno.EPIPE, errno.ESHUTDOWN}:\n"
        "    for name in ((), ('folder/file',)):\n"
        "        if number in OUTPUT and not name:\n            continue  # these are of the output itself\n"
        "        try:\n            run(app)\n        except SystemExit as end:\n            print(number, end.code)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr, done.stderr
    ends = [line.split() for line in done.stdout.splitlines()]
    assert {int(number) for number, _ in ends} == errno.errorcode.keys() - {errno.EPIPE, errno.ESHUTDOWN}
    assert {code for _, code in ends} == {"1"}
    assert done.stderr.count("error: ") == done.stderr.count("\n  fix: ") == len(ends)


def test_a_process_that_may_open_no_more_files_says_so(tmp_path: Path) -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (7, 7))

    deploy = str(Path(sys.executable).parent / "deploy")
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\nexec sleep 0\n")
    client.chmod(0o755)
    environment = {"PATH": str(tmp_path), "LANG": "C.UTF-8"}
    for verb in ("config", "status"):
        done = subprocess.run(
            [deploy, verb], preexec_fn=few, capture_output=True, text=True, timeout=60, env=environment
        )
        assert "Too many open files" in done.stderr and "fix:" in done.stderr
        assert "Traceback" not in done.stderr and "not installed" not in done.stderr


def test_a_program_that_cannot_be_started_is_not_one_that_is_missing(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF of another machine")
    broken.chmod(0o755)
    ran = LocalMachine(5).run(str(broken))
    assert (ran.end, ran.err) == ("failed", os.strerror(errno.ENOEXEC))
    assert LocalMachine(5).run(str(tmp_path / "none")).end == "missing"
