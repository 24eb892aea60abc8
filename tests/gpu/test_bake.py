"""What was baked without a GPU is what the first calls on a GPU look up: not one kernel is compiled.

The bake runs in a process that sees no GPU; the calls run in another with an empty cache of its own. Prints what it
counted: `pytest -s tests/gpu/test_bake.py`.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from sm120_kernels import bake

BAKE = """
import json, sys
from pathlib import Path
from sm120_kernels import bake
import torch
target = Path(sys.argv[1])
seen = bake.bake(target, int(sys.argv[2]), bake.op_names(), int(sys.argv[3]), target.with_name("cache"))
print(json.dumps({"gpu": torch.cuda.is_available(), "kernels": len(seen.folders)}))
"""
CALL = """
import json, sys, time
import torch
from sm120_kernels import bake
counts = {}
with bake.watched() as seen:
    for op in sys.argv[1].split(","):
        before, begun = len(seen.compiled), time.monotonic()
        calls = bake.serving_calls(op)
        for call in calls:
            call()
        torch.cuda.synchronize()
        counts[op] = {"calls": len(calls), "compiled": len(seen.compiled) - before, "seconds": time.monotonic() - begun}
print(json.dumps(counts))
"""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def run(code: str, *arguments: str, **environment: str) -> dict:
    """What a process of its own printed last, as JSON."""
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    found = {"TRITON_DISABLE_LINE_INFO": "1"} | environment
    done = subprocess.run(command, env=os.environ | found, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def baked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    if capability not in bake.GPUS:
        pytest.skip(f"no figures of sm_{capability}")
    folder = tmp_path_factory.mktemp("bake") / "baked"
    begun = time.monotonic()
    jobs = str(min(14, os.cpu_count() or 1))
    made = run(BAKE, str(folder), str(capability), jobs, CUDA_VISIBLE_DEVICES="")
    assert made["gpu"] is False
    say(f"\nbaked {made['kernels']} kernels for sm_{capability}a in {time.monotonic() - begun:.0f} s without a GPU")
    return folder


def call(baked: Path, own: Path, ops: list[str]) -> tuple[dict, list[str]]:
    """Run the ops' serving calls with an empty cache; by op what was compiled, and what the cache wrote down."""
    log = own / "compiled"
    counts = run(
        CALL,
        ",".join(ops),
        TRITON_CACHE_MANAGER="sm120_kernels.baked:BakedCache",
        SM120_KERNELS_BAKED=str(baked),
        SM120_KERNELS_COMPILED=str(log),
        TRITON_CACHE_DIR=str(own / "triton"),
    )
    lines = log.read_text().splitlines() if log.exists() else []
    return counts, [line for line in lines if line.startswith("kernel ")]


def test_the_first_call_of_every_op_compiles_nothing(baked: Path, tmp_path: Path) -> None:
    counts, written = call(baked, tmp_path, bake.op_names())
    for op, count in counts.items():
        say(f"{op}: {count['calls']} calls, {count['compiled']} compiled, {count['seconds']:.1f} s")
    say(f"compiled in all: {sum(count['compiled'] for count in counts.values())}; written down: {len(written)}")
    assert len(counts) == len(bake.op_names())
    assert {op: count["compiled"] for op, count in counts.items()} == dict.fromkeys(counts, 0)
    assert written == []


def test_without_the_baked_folder_the_same_calls_compile(tmp_path: Path) -> None:
    counts, written = call(tmp_path / "nothing", tmp_path, ["route_experts"])
    say(f"control, nothing baked: {counts['route_experts']['compiled']} compiled")
    assert counts["route_experts"]["compiled"] == len(written) > 0
