"""`deploy bench` against the real CPU stack: prefill, decode and router in containers."""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import API_KEY, ROOT, Project, docker, new_project, running

# What another load on the test machine can do to a window. Nothing of it may touch the counts.
DISTURBED = {"client-lag", "drift", "not-steady", "occupancy"}
OUTPUT = 32
WARMUP, WINDOW, SETTLED = 15, 30, 25


@pytest.fixture(scope="module")
def project(image: str, model: Path, api_key_file: Path) -> Iterator[Project]:
    variables = {"IMAGE": image, "MODEL_PATH": str(model), "API_KEY_FILE": str(api_key_file)}
    with running(new_project("compose.yaml", "compose.cpu.yaml", **variables)) as started:
        yield started


@pytest.fixture
def bench(project: Project, api_key_file: Path, model: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of a run against the project's router."""

    def command(*arguments: str) -> list[str]:
        server = ["--url", f"http://127.0.0.1:{project.variables['PORT']}", "--api-key-file", str(api_key_file)]
        workload = ["--lengths", f"64/{OUTPUT}", "--tokenizer", str(model), "--out", str(tmp_path), "--json"]
        return [sys.executable, "-m", "deploy.cli", "bench", *server, *workload, *arguments]

    return command


def run(command: list[str]) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def reasons(level: dict[str, Any]) -> dict[str, str]:
    """What each rule that rejects says, of all engines together."""
    found: dict[str, str] = {}
    for finding in level["findings"]:
        if finding["severity"] == "reject":
            found[finding["id"]] = f"{found.get(finding['id'], '')} {finding['text']}"
    return found


def ask(project: Project) -> None:
    httpx.post(
        f"http://127.0.0.1:{project.variables['PORT']}/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "not yours"}], "max_tokens": 5},
        headers={"Authorization": f"Bearer {API_KEY}"},
        timeout=60,
    ).raise_for_status()


def when_measuring(folder: Path, then: Callable[[], None]) -> threading.Thread:
    """Calls `then` once a generator in `folder` has been sending for so long that the window must be open."""

    def wait() -> None:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            lines = [line for file in folder.glob("*/*/samples.jsonl") for line in file.read_text().splitlines()]
            times = [json.loads(line)["at"] for line in lines if '"kind":"tick"' in line and line.endswith("}")]
            if times and times[-1] - times[0] > SETTLED:
                return then()
            time.sleep(0.5)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_at_1_16_and_64_our_counts_are_the_engines_counts(bench: Callable[..., list[str]]) -> None:
    code, result = run(bench("-c", "1,16,64", "--duration", "10", "--warmup-limit", "60"))
    assert [level["users"] for level in result["levels"]] == [1, 16, 64]
    for level in result["levels"]:
        assert set(reasons(level)) <= DISTURBED, reasons(level)
        assert set(level["accounts"]) == {"prefill", "decode"}
        decode, prefill = level["accounts"]["decode"], level["accounts"]["prefill"]
        for name in ("requests", "prompt_tokens", "generation_tokens"):
            assert decode["counted"][name] == decode["ours"][name] > 0
        for name in ("requests", "prompt_tokens"):
            assert prefill["counted"][name] == prefill["ours"][name] == decode["ours"][name]
        assert decode["ours"]["generation_tokens"] == OUTPUT * decode["ours"]["requests"]
        assert decode["ours"]["prompt_tokens"] == 64 * decode["ours"]["requests"]
        if level["verdict"] == "valid":
            assert level["metrics"]["errors"] == {}
            assert level["metrics"]["in_flight"] == pytest.approx(level["users"], rel=0.05)
    assert code == (0 if all(level["verdict"] == "valid" for level in result["levels"]) else 3)
    assert result["environment"]["lock"]["sglang"] == "0.5.23" and result["environment"]["image"]
    assert {info["version"] for info in result["environment"]["engines"].values()} == {"0.5.23"}
    assert API_KEY not in json.dumps(result)


def test_a_stray_request_in_the_window_is_detected(
    project: Project, bench: Callable[..., list[str]], tmp_path: Path
) -> None:
    watcher = when_measuring(tmp_path, lambda: ask(project))
    code, result = run(bench("-c", "4", "--duration", str(WINDOW), "--warmup-limit", str(WARMUP)))
    watcher.join()
    found = reasons(result["levels"][0])
    assert code == 3 and result["levels"][0]["metrics"] is None
    assert "+1 requests" in found["foreign-work"] and "decode" in found["foreign-work"], found


def test_a_restarted_decode_is_detected_and_its_requests_are_counted_as_failed(
    project: Project, bench: Callable[..., list[str]], tmp_path: Path
) -> None:
    def kill() -> None:
        # As a crash, not as `docker kill`: a stop by hand is not restarted.
        os.kill(int(docker("inspect", "--format", "{{.State.Pid}}", project.container("decode"))), signal.SIGKILL)

    watcher = when_measuring(tmp_path, kill)
    limits = ("--request-timeout", "20", "--drain-limit", "25", "--warmup-limit", str(WARMUP))
    code, result = run(bench("-c", "4", "--duration", str(WINDOW), *limits))
    watcher.join()
    level = result["levels"][0]
    found = reasons(level)
    assert code == 3 and level["metrics"] is None
    assert {"restart", "unreachable"} & set(found), found
    samples = [json.loads(line) for line in (tmp_path / result["id"] / level["folder"] / "samples.jsonl").open()]
    failed = [sample for sample in samples if sample["kind"] == "sample" and sample.get("error")]
    assert len(failed) >= 4 and not {"connect", "tls"} & {sample["error"] for sample in failed}
    last = [sample for sample in samples if sample["kind"] == "tick"][-1]
    assert last["failed"] == sum(sample["error"] != "cancelled" for sample in failed)
    wait_served(project)


def wait_served(project: Project) -> None:
    """Until a request crosses both engines again: the router's own readiness may still be that of the dead one."""
    deadline = time.monotonic() + 180
    while True:
        try:
            return ask(project)
        except httpx.HTTPError as error:
            assert time.monotonic() < deadline, error
            time.sleep(1)


@pytest.mark.quiet
def test_sglangs_own_benchmark_measures_the_same(project: Project, bench: Callable[..., list[str]]) -> None:
    """Alternating runs of both at C=8. Theirs has ramp and tail in it, and a connection a request (docs/metrics.md)."""
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    users, requests = 8, 96
    for seed in range(1, 3):
        _, result = run(bench("-c", str(users), "--duration", "12", "--seed", str(seed), "--warmup-limit", "40"))
        level = result["levels"][0]
        assert set(reasons(level)) <= DISTURBED, reasons(level)
        if level["metrics"]:
            ours.append(level["metrics"])
        prompt = 64 - result["workload"]["vocabulary"]["overhead"]
        shape = ("--random-input-len", str(prompt), "--random-output-len", str(OUTPUT), "--random-range-ratio", "1")
        script = (
            "import os,sys,runpy; os.environ['OPENAI_API_KEY'] = open('/tmp/key').read().strip(); "
            "sys.argv = ['bench', *sys.argv[1:]]; runpy.run_module('sglang.bench_serving', run_name='__main__')"
        )
        docker("exec", project.container("prefill"), "sh", "-c", f"umask 077; echo {API_KEY} > /tmp/key")
        project.execute(
            *("prefill", "python", "-c", script, "--backend", "sglang-oai-chat", "--base-url", "http://router:30000"),
            *("--model", "tiny", "--tokenizer", "/model", "--dataset-name", "random-ids", *shape),
            *("--num-prompts", str(requests), "--max-concurrency", str(users), "--warmup-requests", str(users)),
            *("--seed", str(seed), "--output-file", f"/tmp/{seed}.jsonl"),
        )
        theirs.append(json.loads(project.execute("prefill", "cat", f"/tmp/{seed}.jsonl")))
    if not ours:
        pytest.skip("the machine was too busy: no window of ours was valid")
    # The first token is not compared here: a connection a request, and a ramp that all prefill at once, are in theirs.
    for mine, yours in (
        ([m["output_throughput"] for m in ours], [t["output_throughput"] for t in theirs]),
        ([m["tpot"]["p50"] * 1000 for m in ours], [t["median_tpot_ms"] for t in theirs]),
    ):
        spread = max(max(yours) - min(yours), max(mine) - min(mine), 0.25 * statistics.mean(yours))
        assert abs(statistics.mean(mine) - statistics.mean(yours)) <= spread, (mine, yours)
