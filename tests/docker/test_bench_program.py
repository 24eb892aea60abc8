"""`deploy bench` as a person runs it, against the test server: a program, its output, its files, its exit code.

Needs no container, but minutes.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtest.testserver import running


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running() as url:
        yield url


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "loadtest.cli", *arguments]


def bench(folder: Path, *arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Runs in a folder without a lock file, so that the test server need not be the locked engine."""
    return subprocess.run(command(*arguments), cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def test_64_streams_are_measured_and_reported(server: str, tmp_path: Path) -> None:
    """Nominal: the first token after 50 ms, then one every 40 ms together with all other streams."""
    arguments = ("--url", server, "--model", "lockstep", "-c", "64", "--duration", "4", "--lengths", "64/25", "--json")
    done = bench(tmp_path, *arguments, "--target", "1000@64")
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    level = result["levels"][0]
    assert result["schema"] == "dsv4-loadtest/1" and level["verdict"] == "valid", level["findings"]
    metrics = level["metrics"]
    assert metrics["output_length"]["minimum"] == metrics["output_length"]["maximum"] == 25
    assert metrics["input_length"]["minimum"] == metrics["input_length"]["maximum"] == 64
    assert metrics["errors"] == {} and abs(metrics["in_flight"] - 64) < 3.2
    with urllib.request.urlopen(server + "/truth") as answer:
        truth = [t for t in json.load(answer) if t["end"]]
    window = level["window"]
    sent = sum(window["begin"] <= at < window["end"] for t in truth for at in t["tokens"])
    assert metrics["output_tokens"] == pytest.approx(sent, rel=0.01)
    within = [t for t in truth if window["begin"] <= t["end"] < window["end"]]
    tpot = sum((t["tokens"][-1] - t["tokens"][0]) / 24 for t in within) / len(within)
    assert metrics["tpot"]["mean"] == pytest.approx(tpot, abs=0.001, rel=0.01)
    assert abs(metrics["requests"] - len(within)) <= 0.01 * len(within) + 1
    engine = level["accounts"]["server"]
    assert (
        engine["counted"]["generation_tokens"] == engine["ours"]["generation_tokens"] == 25 * engine["ours"]["requests"]
    )
    assert result["target"]["reached"] and result["target"]["factor"] < 1

    folder = tmp_path / "runs" / result["id"]
    assert {path.name for path in folder.iterdir()} == {"result.json", "report.md", "report.html", "c64-r1"}
    assert {path.name for path in (folder / "c64-r1").iterdir()} == {
        "plan.json",
        "samples.jsonl",
        "server.jsonl",
        "generator.log",
    }
    page = (folder / "report.html").read_text()
    assert page.count("<svg") >= 4 and "http-equiv" not in page and "src=" not in page and "width=device-width" in page
    assert "Target 1000 tok/s at C=64: reached" in (folder / "report.md").read_text()


def test_a_run_that_is_disturbed_is_rejected_and_shows_no_numbers(server: str, tmp_path: Path) -> None:
    """A stray request in the window; also two generator processes under a Locust master."""
    arguments = ("--url", server, "--model", "plain", "-c", "8", "--duration", "4", "--lengths", "32/20")
    process = subprocess.Popen(
        command(*arguments, "--processes", "2"),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.time() + 40
    # The window is open when the run has as many samples as a steady run needs and two seconds more.
    while time.time() < deadline and len(list(tmp_path.glob("runs/*/c8-r1/samples.jsonl"))) == 0:
        time.sleep(0.2)
    stray_until = time.time() + 30
    while process.poll() is None and time.time() < stray_until:
        time.sleep(1)
        if time.time() > deadline - 33:
            urllib.request.urlopen(server + "/stray").read()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    assert "foreign" in (tmp_path.glob("runs/*/result.json").__next__()).read_text()
    result = json.loads(next(tmp_path.glob("runs/*/result.json")).read_text())
    assert result["levels"][0]["verdict"] == "rejected" and result["levels"][0]["metrics"] is None
    assert "did more than our requests" in " ".join(output.split())
    report = next(tmp_path.glob("runs/*/report.md")).read_text()
    assert "0 of 1" in report and "tok/s | -" not in report
    samples = next(tmp_path.glob("runs/*/c8-r1/samples.jsonl")).read_text()
    assert '"worker":"worker-0"' in samples and '"worker":"worker-1"' in samples


def test_ctrl_c_keeps_what_was_measured_and_marks_it_partial(server: str, tmp_path: Path) -> None:
    arguments = ("--url", server, "--model", "plain", "-c", "4", "--duration", "60", "--lengths", "32/10")
    process = subprocess.Popen(
        command(*arguments), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.time() + 30
    while time.time() < deadline and not any(file.stat().st_size for file in tmp_path.glob("runs/*/*/samples.jsonl")):
        time.sleep(0.2)
    generators = children(process.pid)
    assert generators
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "interrupted" in output and "Traceback" not in output
    result = json.loads(next(tmp_path.glob("runs/*/result.json")).read_text())
    assert result["levels"][0]["verdict"] == "partial" and result["levels"][0]["metrics"] is None
    assert '"kind":"sample"' in next(tmp_path.glob("runs/*/*/samples.jsonl")).read_text()
    assert not any(generator.is_running() for generator in generators)


def test_a_full_disk_ends_the_run_with_the_reason(server: str, tmp_path: Path) -> None:
    """The kernel's file size limit stands for the disk: both make the generator's write fail."""
    arguments = ("--url", server, "--model", "plain", "-c", "16", "--duration", "60", "--lengths", "32/20")
    process = subprocess.Popen(
        command(*arguments), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.time() + 30
    while time.time() < deadline and not any(file.stat().st_size for file in tmp_path.glob("runs/*/*/samples.jsonl")):
        time.sleep(0.2)
    for generator in children(process.pid):
        resource.prlimit(generator.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 3, output
    words = " ".join(output.split())
    assert "partial" in words and "cannot write samples: File too large" in words and "Traceback" not in output


def test_a_generator_whose_parent_is_killed_ends_too(server: str, tmp_path: Path) -> None:
    arguments = ("--url", server, "--model", "plain", "-c", "2", "--duration", "60", "--lengths", "32/5")
    process = subprocess.Popen(command(*arguments), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 30
    while time.time() < deadline and not any(file.stat().st_size for file in tmp_path.glob("runs/*/*/samples.jsonl")):
        time.sleep(0.2)
    generators = children(process.pid)
    process.kill()
    process.wait()
    assert generators and not psutil.wait_procs(generators, timeout=15)[1]


def test_an_open_loop_sends_on_time_whatever_the_server_does(server: str, tmp_path: Path) -> None:
    """Requests of half a second at 20 a second: ten in flight, though nobody asked for ten."""
    arguments = (
        "--url",
        server,
        "--model",
        "plain",
        "--rate",
        "20",
        "--duration",
        "20",
        "--lengths",
        "32/20",
        "--json",
    )
    done = bench(tmp_path, *arguments, "--ramp", "2", "--slo", "ttft=0.2,tpot=0.03")
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads(done.stdout)["levels"][0]["metrics"]
    # 400 Poisson arrivals: three standard deviations are 15 %.
    assert metrics["request_rate"] == pytest.approx(20, rel=0.15)
    assert metrics["in_flight"] == pytest.approx(metrics["request_rate"] * metrics["e2e"]["mean"], rel=0.05)
    assert metrics["delay"]["p99"] < 0.02 and metrics["goodput_share"] > 0.95


def test_a_trace_is_replayed_at_its_times_and_lengths(server: str, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 137 * k, "input_length": 40 + k, "output_length": 5 + k % 7, "hash_ids": [k]} for k in range(40)
    ]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = bench(
        tmp_path, "--url", server, "--model", "plain", "--trace", "trace.jsonl", "--trace-speed", "2", "--json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    file = next(tmp_path.glob("runs/*/trace-r1/samples.jsonl"))
    samples = [json.loads(line) for line in file.read_text().splitlines() if '"kind":"sample"' in line]
    samples.sort(key=lambda sample: sample["index"])
    assert [s["prompt_tokens"] for s in samples] == [row["input_length"] for row in rows]
    assert [s["completion_tokens"] for s in samples] == [row["output_length"] for row in rows]
    for k, sample in enumerate(samples):
        assert sample["start"] - samples[0]["start"] == pytest.approx(0.0685 * k, abs=0.02)


def test_a_conversation_grows_turn_by_turn(server: str, tmp_path: Path) -> None:
    arguments = ("--url", server, "--model", "plain", "-c", "4", "--turns", "3", "--duration", "4", "--lengths", "32/8")
    done = bench(tmp_path, *arguments, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    lengths = json.loads(done.stdout)["levels"][0]["metrics"]["input_length"]
    # The template's five tokens count once: 32, then + 8 of the answer + 27 words, twice.
    assert (lengths["minimum"], lengths["p50"], lengths["maximum"]) == (32, 67, 102)


def test_the_plan_runs_under_plain_locust(server: str, tmp_path: Path) -> None:
    arguments = ("--url", server, "--model", "plain", "--lengths", "32/5", "--write-plan", "plan.json")
    written = bench(tmp_path, *arguments)
    assert written.returncode == 0, written.stderr
    locust = [sys.executable, "-m", *written.stdout.split(), "--headless", "-u", "3", "-r", "3", "-t", "4s"]
    done = subprocess.run(locust, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "end to end" in done.stderr and "first token" in done.stderr
    samples = [line for line in (tmp_path / "samples.jsonl").read_text().splitlines() if '"kind":"sample"' in line]
    assert len(samples) > 10 and all('"error"' not in sample for sample in samples)


def test_one_generator_takes_5000_streamed_tokens_a_second_and_core() -> None:
    done = subprocess.run(command("capacity", "--json"), capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    assert found["per_core"] >= 5000 and found["rate"] >= 5000, found


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--url", "http://127.0.0.1:9"), 1, ("cannot reach", "deploy up")),
        (("--url", "ftp://x"), 1, ("not a URL",)),
        (("--url", "http://me:secret@127.0.0.1:9"), 1, ("password", "--api-key-file")),
        (("--duration", "10 days"), 2, ("10m",)),
        (("--url", "SERVER", "--model", "nope"), 1, ("no model 'nope'", "--model")),
        (("--url", "SERVER"), 1, ("several models", "--model")),
        (("--url", "SERVER", "--model", "plain", "--api-key-file", "missing"), 1, ("cannot read the API key file",)),
        (("--url", "SERVER", "--model", "plain", "--prompts", "missing.jsonl"), 1, ("cannot read", "missing.jsonl")),
        (("--url", "SERVER", "--model", "plain", "-c", "4", "--target", "10@8"), 1, ("not measured", "-c 8")),
        (("--url", "SERVER", "--model", "plain", "--out", "/proc/x"), 1, ("cannot make the folder", "--out")),
        (("--url", "SERVER", "--model", "busy", "-c", "1"), 1, ("HTTP 429",)),
        (("-c", "one"), 2, ("expected numbers",)),
        (("--lengths", "256"), 2, ("INPUT/OUTPUT",)),
        (("--target", "fast"), 2, ("THROUGHPUT@C",)),
        (("--slo", "speed=1"), 2, ("ttft, tpot, e2e",)),
        (("--endpoint", "other"), 2, ("chat, generate",)),
        (("compare", "missing-a", "missing-b"), 2, ("cannot read",)),
        (("import", "missing"), 2, ("cannot read",)),
    ],
)
def test_bad_input_is_answered_plainly(
    server: str, tmp_path: Path, arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    done = bench(tmp_path, *(server if part == "SERVER" else part for part in arguments))
    output = " ".join((done.stdout + done.stderr).replace("│", " ").split())
    assert done.returncode == code, output
    assert all(word in output for word in words), output
    assert "Traceback" not in output
    assert not list(tmp_path.glob("runs/*/result.json"))


def test_a_wrong_key_and_a_bad_certificate_are_named(tmp_path: Path) -> None:
    (tmp_path / "right").write_text("right")
    (tmp_path / "wrong").write_text("wrong")
    with running("--api-key-file", str(tmp_path / "right")) as url:
        done = bench(tmp_path, "--url", url, "--model", "plain", "--api-key-file", "wrong")
        assert done.returncode == 1 and "refused the API key" in done.stderr and "--api-key-file" in done.stderr
        assert "wrong one" in done.stderr
    command_line = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -keyout k.pem -out c.pem -subj /CN=localhost"
    subprocess.run(command_line.split(), cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "both.pem").write_text((tmp_path / "k.pem").read_text() + (tmp_path / "c.pem").read_text())
    with running("--certificate", str(tmp_path / "both.pem")) as url:
        done = bench(tmp_path, "--url", url, "--model", "plain")
        assert done.returncode == 1 and "TLS with" in done.stderr and "--ca-file" in done.stderr


def test_the_key_is_in_no_file_argument_or_environment_of_the_generator(tmp_path: Path) -> None:
    secret = "s3cret-0123456789"
    (tmp_path / "key").write_text(secret)
    with running("--api-key-file", str(tmp_path / "key")) as url:
        arguments = ("--url", url, "--model", "plain", "-c", "2", "--duration", "60", "--lengths", "32/5")
        process = subprocess.Popen(
            command(*arguments, "--api-key-file", "key"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        deadline = time.time() + 30
        while time.time() < deadline and not any(f.stat().st_size for f in tmp_path.glob("runs/*/*/samples.jsonl")):
            time.sleep(0.2)
        for generator in children(process.pid):
            assert secret not in " ".join(generator.cmdline()) and secret not in str(generator.environ())
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert secret.encode() not in output
    for root, _, files in os.walk(tmp_path / "runs"):
        for name in files:
            assert secret not in (Path(root) / name).read_text()
