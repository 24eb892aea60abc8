"""Kernels compiled without a GPU are found by the same calls later; in other processes: here is the interpreter."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sm120_kernels import bake
from sm120_kernels.aot import all_cases
from sm120_kernels.plugin.table import HOOKS

KERNELS = Path(__file__).parents[2] / "kernels"
OPS = ["route_experts", "prepare_queries"]
COMPILE = """
import json, sys
from sm120_kernels import bake
print(json.dumps(bake.compile_ops(int(sys.argv[1]), sys.argv[2:]).compiled))
"""
BAKE = """
import json, sys
from pathlib import Path
from sm120_kernels import bake
target, cache = map(Path, sys.argv[1:3])
print(json.dumps(bake.bake(target, 120, sys.argv[4:], int(sys.argv[3]), cache).compiled))
bake.bake_launcher(target)
"""
NAMES = """
import json, sys
from unittest import mock
from sm120_kernels import bake
from triton.runtime.jit import JITFunction
found = {}
for op in bake.op_names():
    asked = set()
    def note(self, *arguments):
        asked.add(self.fn.__name__)
    with mock.patch.object(JITFunction, "_do_compile", note), bake.without_gpu(bake.GPUS[120]):
        for call in bake.serving_calls(op):
            call()
    found[op] = sorted(asked)
print(json.dumps(found))
"""


def run(code: str, *arguments: str, **environment: str) -> str:
    """What a process without the interpreter printed last."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    own |= {"PYTHONPATH": os.pathsep.join([str(KERNELS), own.get("PYTHONPATH", "")]), "TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, env=own | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def baked(folder: Path, jobs: int, ops: list[str] = OPS) -> list[str]:
    """Bake into a folder with a cache beside it; the kernels that were not in that cache."""
    return json.loads(run(BAKE, str(folder), str(folder.with_name("cache")), str(jobs), *ops))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("bake") / "baked"
    assert len(baked(made, 1)) >= 6
    return made


def compiled(folder: Path, own: Path, capability: int = 120, ops: list[str] = OPS) -> tuple[list[str], list[str]]:
    """What Triton compiles for these calls with a baked folder, by its listener and by what the cache wrote down."""
    log = own / "compiled"
    names = json.loads(
        run(
            COMPILE,
            str(capability),
            *ops,
            TRITON_CACHE_MANAGER="sm120_kernels.baked:BakedCache",
            SM120_KERNELS_BAKED=str(folder),
            SM120_KERNELS_COMPILED=str(log),
            TRITON_CACHE_DIR=str(own / "triton"),
        )
    )
    return names, log.read_text().splitlines() if log.exists() else []


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_what_was_baked_is_not_compiled_again_wherever_it_lies(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "moved")
    assert compiled(tmp_path / "moved", tmp_path) == ([], [])


def test_what_was_not_baked_is_compiled_and_written_down_once(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "short")
    gone = next(path.parent for path in sorted((tmp_path / "short").rglob("*.cubin")))
    name = next(gone.glob("*.cubin")).stem
    shutil.rmtree(gone)
    assert compiled(tmp_path / "short", tmp_path) == ([name], [f"kernel {name} {gone.name}"])
    assert (tmp_path / "compiled.begun").read_text().endswith(f" {gone.name}\n")
    # It is in the host's own cache now.
    assert compiled(tmp_path / "short", tmp_path)[0] == []


def test_kernels_of_another_gpu_are_not_taken(folder: Path, tmp_path: Path) -> None:
    names, lines = compiled(folder, tmp_path, 90, ["route_experts"])
    assert names and len(lines) == len(names)


def test_the_number_of_processes_changes_no_byte(folder: Path, tmp_path: Path) -> None:
    assert len(baked(tmp_path / "again", 2)) >= 6
    assert files(tmp_path / "again") == files(folder)


def test_a_kept_cache_saves_the_compiling_and_adds_nothing(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder.with_name("cache"), tmp_path / "cache")
    assert baked(tmp_path / "one op", 1, OPS[:1]) == []
    found = files(tmp_path / "one op")
    assert found.items() < files(folder).items()
    assert {Path(name).stem for name in found} == {"_route_experts_kernel", next((folder / "launcher").iterdir()).stem}


def test_every_binary_holds_sm_120a_code_and_is_small(folder: Path) -> None:
    found = files(folder)
    binaries = [content for name, content in found.items() if name.endswith(".cubin")]
    # ELF for CUDA: the target stands in the low bytes of e_flags' second byte since ABI 8; ptxas also names it.
    assert binaries and all(content.startswith(b"\x7fELF") and b"sm_120a" in content for content in binaries)
    assert {Path(name).suffix for name in found} == {".cubin", ".json", ".so"}
    assert sum(map(len, found.values())) < 30_000 * len(binaries)


def test_nothing_of_the_place_where_it_was_baked_is_in_it(folder: Path) -> None:
    assert not [name for name, content in files(folder).items() if str(folder.parents[1]).encode() in content]


def test_the_modules_table_and_the_calls_name_the_same_kernels() -> None:
    """Each op's `serving_calls` reach every kernel that its `compile_cases` list, so a new one is baked by itself."""
    listed: dict[str, set[str]] = {}
    for case in all_cases():
        listed.setdefault(case.op, set()).add(case.kernel.__name__)
    called = json.loads(run(NAMES))
    assert called == {op: sorted(names) for op, names in listed.items()}


def test_each_op_is_in_one_share_whatever_other_ops_there_are() -> None:
    names = bake.op_names()
    for of in (1, 2, 5, 9):
        shares = [bake.in_share(names, f"{place}/{of}") for place in range(1, of + 1)]
        without = [bake.in_share(names[1:], f"{place}/{of}") for place in range(1, of + 1)]
        assert sorted(name for share in shares for name in share) == names
        for share, others in zip(shares, without, strict=True):
            assert [name for name in share if name in names[1:]] == others
    for bad in ("0/2", "3/2"):
        with pytest.raises(ValueError, match=bad):
            bake.in_share(names, bad)


def test_what_an_earlier_share_wrote_is_not_touched_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "above" / "baked"
    for name in ("earlier", "now"):
        (target / name).mkdir(parents=True)
        (target / name / "kernel.cubin").write_text(name)
    before = [path.stat().st_ctime_ns for path in (target / "earlier", target / "earlier" / "kernel.cubin")]
    bake.set_times(target, ["now"], 7.0)
    assert before == [path.stat().st_ctime_ns for path in (target / "earlier", target / "earlier" / "kernel.cubin")]
    assert {path.stat().st_mtime for path in (target.parent, target, *(target / "now").rglob("*"), target / "now")} == {
        7.0
    }


def test_every_op_that_a_hook_calls_is_baked() -> None:
    assert bake.served_ops() == sorted({hook.op for hook in HOOKS})
    assert set(bake.served_ops()) <= set(bake.op_names())
    for op in bake.op_names():
        assert callable(importlib.import_module(f"sm120_kernels.ops.{op}").serving_calls)


def test_the_launcher_depends_on_nothing_but_the_driver(folder: Path) -> None:
    (library,) = (folder / "launcher").iterdir()
    needed = subprocess.run(["objdump", "-p", library], check=True, capture_output=True, text=True).stdout
    assert re.findall(r"NEEDED +(\S+)", needed) == ["libcuda.so.1", "libc.so.6"]
