"""`doctor --probe` in the real image: a real all-reduce, real NIXL transfers, and what it says when they go wrong."""

import json
import subprocess
import time

import pytest

from deploy.host.probe_active import CONTAINER_SECONDS, ActiveProbe, container
from deploy.host.probe_host import LocalMachine

LIMIT = 3


def probe(image: str, *program: str) -> tuple[int, dict[str, object], float]:
    """Exit status, result and seconds of one probe program in the image, without network."""
    started = time.monotonic()
    done = subprocess.run(
        container("deploy-probe-test", image, program, [], "none"), capture_output=True, text=True, timeout=200
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert results, done.stderr
    return done.returncode, json.loads(results[-1]), time.monotonic() - started


def test_host_memory_travels_between_processes_and_between_containers(image: str) -> None:
    tests = ActiveProbe(LocalMachine(CONTAINER_SECONDS), image, [], [], print).run()
    assert tests.not_run == []
    assert [(result.outcome, result.ranks) for result in tests.all_reduces] == [("ok", 2)]
    found = {result.transport: result for result in tests.transfers}
    assert {result.outcome for result in tests.transfers} == {"ok"}
    assert all(result.bytes_per_second for result in tests.transfers)
    # In one container UCX reads the other process's memory; between two only the network is left.
    assert found["isolated"].used == ["tcp"]
    assert found["p2p"].used and "tcp" not in found["p2p"].used
    for listing in (["ps", "--all"], ["network", "ls"]):
        names = subprocess.run(["docker", *listing, "--filter=name=deploy-probe-"], capture_output=True, text=True)
        assert "deploy-probe-" not in names.stdout


@pytest.mark.parametrize(
    ("plant", "status", "outcome"), [("wrong", 3, "wrong_values"), ("hang", 4, "hang"), ("crash", 1, "failed")]
)
def test_an_all_reduce_that_goes_wrong_says_how(image: str, plant: str, status: int, outcome: str) -> None:
    code, result, seconds = probe(image, "all_reduce", "--device=cpu", f"--plant={plant}", f"--limit={LIMIT}")
    assert (code, result["outcome"]) == (status, outcome) and result["said"]
    assert seconds < 120


@pytest.mark.parametrize(("plant", "status", "outcome"), [("wrong", 3, "wrong_values"), ("hang", 4, "hang")])
def test_a_transfer_that_goes_wrong_says_how(image: str, plant: str, status: int, outcome: str) -> None:
    small = ["--memory=cpu", f"--bytes={2**20}", f"--limit={LIMIT}"]
    code, result, _ = probe(image, "nixl_transfer", "pair", *small, f"--plant={plant}")
    assert (code, result["outcome"]) == (status, outcome) and result["said"]


def test_a_copy_that_arrives_wrong_is_seen(image: str) -> None:
    size = f"--bytes={2**20}"
    assert probe(image, "memory_copy", "--device=cpu", "--count=2", size)[0] == 0
    code, result, _ = probe(image, "memory_copy", "--device=cpu", size, "--plant=wrong")
    assert (code, result["correct"]) == (3, False)
