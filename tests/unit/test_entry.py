"""What no verb has to care for itself: streams, locale, signals, and failures that come from below."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = str(Path(sys.executable).parent / "deploy")
PLAIN = {"PATH": "/nowhere", "HOME": "/nowhere", "LANG": "C.UTF-8"}


def deploy(
    *arguments: str, before: Callable[[], None] | None = None, **environment: str
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [DEPLOY, *arguments],
        preexec_fn=before,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=PLAIN | environment,
    )


def refused(done: "subprocess.CompletedProcess[str]", code: int, *words: str) -> None:
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == code, done.stderr
    for word in (*words, "fix:"):
        assert word in done.stderr


@pytest.mark.parametrize(
    "settings", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}]
)
def test_a_locale_without_our_signs_costs_the_signs_and_not_the_answer(settings: dict[str, str]) -> None:
    done = deploy("doctor", "--limit", "10", before=None, **settings)
    assert "Traceback" not in done.stderr
    assert "Docker" in done.stdout


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_stream_that_the_caller_has_closed_is_no_failure(number: int) -> None:
    done = deploy("gap", "--json", before=lambda: os.close(number))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_question_from_a_closed_stream_is_an_empty_one() -> None:
    done = deploy("chat", before=lambda: os.close(0))
    assert (done.returncode, "the question is empty" in done.stderr) == (2, True)


@pytest.mark.parametrize("verb", ["gap", "generations"])
def test_a_full_disk_under_the_output_is_said(verb: str) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([DEPLOY, verb], stdout=full, stderr=subprocess.PIPE, text=True, env=PLAIN, timeout=60)
    refused(done, 1, "the output: No space left")
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("arguments", [["generations"], ["gap", "--help"], ["gap", "--json"], ["sbom"], ["--version"]])
def test_a_reader_that_has_gone_is_no_failure_to_speak_of(arguments: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([DEPLOY, *arguments], stdout=writes, stderr=subprocess.PIPE, text=True, env=PLAIN)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_reader_of_errors_that_has_gone_is_none_either() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([DEPLOY, "gap", "--measured", "/none"], stdout=subprocess.PIPE, stderr=writes, env=PLAIN)
    os.close(writes)
    assert (done.returncode, done.stdout) == (141, b"")


def test_a_file_nested_thousands_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 200_000)
    refused(deploy("gap", "--trace", str(tmp_path / "deep.json")), 1, "nested too deeply")


def test_a_client_of_docker_that_answers_nonsense_is_named(tmp_path: Path) -> None:
    client = tmp_path / "docker"
    client.write_text("#!/bin/sh\necho nonsense\n")
    client.chmod(0o755)
    refused(deploy("config", PATH=str(tmp_path)), 1, "Docker's client answered something that cannot be read")


def test_a_place_that_cannot_be_used_is_named_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(deploy("generations", "prune", "--state", str(tmp_path / "file/state")), 2, "file/state", "new folder")


def test_an_interruption_while_the_verbs_load_ends_without_a_traceback() -> None:
    """At twenty moments of the start; before Python has come to our first lines it is Python's own affair."""
    code = (
        "import sys; from deploy import entry; sys.argv = ['deploy', '--help']; prepare = entry._prepare_streams\n"
        "def begun() -> None:\n    print(1, flush=True)\n    prepare()\n"
        "entry._prepare_streams = begun; entry.main()"
    )
    for moment in range(20):
        with subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as begun:
            assert begun.stdout and begun.stderr
            begun.stdout.readline()
            time.sleep(0.02 * moment)
            begun.send_signal(signal.SIGINT)
            said = begun.stderr.read()
        assert "Traceback" not in said, said
        assert begun.returncode in (0, 130, -signal.SIGINT)


def test_a_hang_up_that_the_caller_has_ignored_stays_ignored() -> None:
    """`nohup deploy watch &` must outlive its terminal."""
    code = (
        "import signal, os, typer\nfrom deploy.entry import run\napp = typer.Typer()\n"
        "@app.command()\ndef verb() -> None:\n    os.kill(os.getpid(), signal.SIGHUP)\n    print('alive')\nrun(app)"
    )
    ignored = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        capture_output=True,
        text=True,
    )
    assert ignored.stdout == "alive\n", ignored.stderr
    heard = subprocess.run(
        [sys.executable, "-c", code],
        # These tests themselves may run under nohup.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        capture_output=True,
        text=True,
    )
    assert (heard.stdout, heard.returncode) == ("", 130)


def test_json_stands_alone_on_standard_output() -> None:
    json.loads(deploy("gap", "--json", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0").stdout)


def test_the_version_names_the_controller_and_the_image_that_the_lock_in_this_folder_names() -> None:
    inputs = tomllib.loads((ROOT / "deploy.lock").read_text())["image"]["inputs"]
    done = deploy("--version")
    assert (
        done.stdout == f"deploy {metadata.version('deepseek-v4-flash-sm120')}\ndeploy.lock: image of inputs {inputs}\n"
    )


@pytest.mark.parametrize(
    ("lock", "words"),
    [
        (None, ""),
        ("[", "not valid TOML"),
        ("version = 1", "part 'image'"),
        ("[image]", "names no inputs"),
        ("\xff", "decode"),
    ],
)
def test_the_version_is_shown_whatever_the_lock(lock: str | None, words: str, tmp_path: Path) -> None:
    if lock is not None:
        (tmp_path / "deploy.lock").write_bytes(lock.encode("latin-1"))
    done = subprocess.run([DEPLOY, "--version"], cwd=tmp_path, env=PLAIN, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("deploy ") and words in done.stdout
    assert len(done.stdout.splitlines()) == (1 if lock is None else 2)


def test_the_version_does_not_wait_for_the_verbs() -> None:
    code = (
        "import sys, atexit\nfrom deploy import entry\nsys.argv = ['deploy', '--version']\n"
        "atexit.register(lambda: print({'deploy.cli', 'python_on_whales', 'scipy', 'yaml'} & set(sys.modules)))\n"
        "entry.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=PLAIN, timeout=60)
    assert done.stdout.splitlines()[-1] == "set()", done.stdout + done.stderr
