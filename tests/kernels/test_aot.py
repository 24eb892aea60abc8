"""Every op compiled for sm_120, against the limits and against the committed table.

Compiling is done in another process: here the kernels are defined for the interpreter.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import triton
from sm120_kernels import aot

KERNELS = Path(__file__).parents[2] / "kernels"
COMPILE = """
import json, sys
from dataclasses import asdict
from sm120_kernels import aot
rows = []
for case in aot.all_cases():
    row = aot.report(case)
    rows.append({"report": asdict(row), "problems": row.problems(aot.LIMITS[120], case.uses_mma)})
json.dump(rows, sys.stdout)
"""


@cache
def compiled() -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(KERNELS), environment.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def test_every_kernel_fits_sm_120_without_spills_and_with_tensor_cores_where_a_dot_is_meant() -> None:
    assert [problem for row in compiled() for problem in row["problems"]] == []


def test_no_kernel_needs_more_than_the_committed_table_says() -> None:
    table = json.loads(aot.TABLE_JSON.read_text())
    if table["triton"] != triton.__version__:
        pytest.skip(f"the table was written with Triton {table['triton']}, this is {triton.__version__}")
    before = {(row["op"], row["shape"], row["kernel"]): row for row in table["kernels"]}
    now = {(row["op"], row["shape"], row["kernel"]): row for row in (row["report"] for row in compiled())}
    assert before.keys() == now.keys(), "launches came or went: run `python -m sm120_kernels.aot --write` and commit"
    worse = [f"{' / '.join(key)}: {text}" for key in now for text in regressions(before[key], now[key])]
    assert worse == [], "if it is meant, run `python -m sm120_kernels.aot --write` and commit"


# The compiler's allocation of registers is not the same in every run.
REGISTERS_OF_LUCK = 8


def regressions(before: dict, now: dict) -> list[str]:
    """What a kernel needs more of, or does worse, than the committed report says."""
    slack = {"registers": REGISTERS_OF_LUCK, "shared": 0, "stack": 0, "local_accesses": 0}
    found = [f"{name} {before[name]} -> {now[name]}" for name, more in slack.items() if now[name] > before[name] + more]
    if now["blocks_per_sm"] < before["blocks_per_sm"]:
        found.append(f"blocks per SM {before['blocks_per_sm']} -> {now['blocks_per_sm']}")
    if before["mma"].keys() != now["mma"].keys():
        found.append(f"tensor-core instructions {sorted(before['mma'])} -> {sorted(now['mma'])}")
    return found


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({}, 0),
        ({"registers": 108}, 0),
        ({"registers": 109}, 1),
        ({"shared": 1025}, 1),
        ({"stack": 8, "local_accesses": 2}, 2),
        ({"blocks_per_sm": 3}, 1),
        ({"mma": {}}, 1),
    ],
)
def test_a_kernel_that_needs_more_is_a_regression(change: dict, seen: int) -> None:
    before = {"registers": 100, "shared": 1024, "stack": 0, "local_accesses": 0, "blocks_per_sm": 4, "mma": {"m": 1}}
    assert len(regressions(before, {**before, **change})) == seen


@pytest.mark.parametrize(
    "registers, warps, shared, expected",
    [
        (32, 4, 0, 12),
        (128, 4, 0, 4),
        (128, 8, 50_000, 2),
        (255, 8, 50_177, 1),
        (64, 4, 101_376, 1),
        (64, 4, 102_400, 0),
    ],
)
def test_occupancy_is_the_scarcest_of_warps_registers_and_shared_memory(
    registers: int, warps: int, shared: int, expected: int
) -> None:
    assert aot.blocks_per_sm(registers, warps, shared, aot.LIMITS[120]) == expected


def test_a_kernel_over_a_limit_is_named_with_the_reason() -> None:
    row = aot.CompileReport("op", "shape", "kernel", 4, 255, 16, 3, 110_000, 0, {})
    problems = row.problems(aot.LIMITS[120], uses_mma=True)
    assert len(problems) == 4
    assert all(problem.startswith("op / shape: ") for problem in problems)
