"""Compiles, without a GPU, what the first calls in a serving engine would compile: `python -m sm120_kernels.bake`.

The ops' own launchers run on tensors without memory, under a driver that names the wanted GPU and launches nothing. So
Triton itself chooses each kernel's specialisation and the key it will look up at run time; nothing of it is said twice.
What is called is each op's ``serving_calls()``, for the ops that a hook of the plug-in's table can call.

The cache is written as ``sm120_kernels.baked`` reads it: a folder a kernel with its binary and its description. It
depends on the source, Triton, its settings and the GPU, and on neither the order nor the number of processes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from sm120_kernels import baked, ops
from sm120_kernels.aot import LIMITS
from sm120_kernels.plugin.table import HOOKS


@dataclass(frozen=True)
class Gpu:
    """What the launchers ask of a GPU. Source: CUDA C++ programming guide, technical specifications."""

    capability: int
    sms: int

    @property
    def shared_bytes(self) -> int:
        """Most bytes of shared memory a block may have."""
        return LIMITS[self.capability].shared_per_block


MOST_JOBS = 16
"""Processes by default at most: each holds torch, and there are not that many kernels."""

GPUS = {90: Gpu(90, 132), 120: Gpu(120, 188)}
"""H200; RTX PRO 6000 Blackwell."""


class _Driver:
    """A Triton driver that knows its target and nothing else."""

    def __init__(self, gpu: Gpu) -> None:
        self._target = GPUTarget("cuda", gpu.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def without_gpu(gpu: Gpu) -> Iterator[None]:
    """Inside, launches on fake CUDA tensors compile for `gpu` and do not run."""
    properties = SimpleNamespace(multi_processor_count=gpu.sms, shared_memory_per_block_optin=gpu.shared_bytes)
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    previous = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver(gpu))
    try:
        with (
            warnings.catch_warnings(),
            mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: properties),
            mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: divmod(gpu.capability, 10)),
            mock.patch.object(torch.cuda, "current_stream", lambda device=None: SimpleNamespace(cuda_stream=0)),
            mock.patch.object(JITFunction, "run", compile_only),
            FakeTensorMode(),
        ):
            # A tensor without memory has no address; Triton takes it as aligned, as torch's own allocations are.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        triton.runtime.driver.set_active(previous)


def op_names() -> list[str]:
    """Every op."""
    return [module.name for module in pkgutil.iter_modules(ops.__path__)]


def served_ops() -> list[str]:
    """The ops that a hook of the plug-in's table can call."""
    return sorted({hook.op for hook in HOOKS})


def serving_calls(op: str) -> list[Callable[[], object]]:
    """The calls of one op on CUDA tensors."""
    with torch.device("cuda"):
        return list(importlib.import_module(f"{ops.__name__}.{op}").serving_calls())


@dataclass
class Seen:
    """Kernels that Triton was asked for.

    Attributes:
        compiled: names of those that were in no cache.
        folders: where in the cache each of them is, the others too.
    """

    compiled: list[str] = field(default_factory=list)
    folders: set[Path] = field(default_factory=set)


@contextmanager
def watched() -> Iterator[Seen]:
    """Inside, what Triton is asked for."""
    seen = Seen()

    def listener(*, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        if not cache_hit:
            seen.compiled.append(src.name)
        seen.folders |= {Path(path).parent for path in metadata_group.values()}

    previous = triton.knobs.compilation.listener
    triton.knobs.compilation.listener = listener
    try:
        yield seen
    finally:
        triton.knobs.compilation.listener = previous


def compile_ops(capability: int, names: Sequence[str], part: int = 0, parts: int = 1) -> Seen:
    """Compile the ops' serving calls into Triton's cache (TRITON_CACHE_DIR).

    Args:
        capability: a key of `GPUS`.
        names: the ops.
        part, parts: of all kernels only those whose key falls into this part, so that processes can share the work.
    """

    def is_others(*, key: str, **_: Any) -> bool:
        return zlib.crc32(key.encode()) % parts != part

    with watched() as seen, without_gpu(GPUS[capability]):
        triton.knobs.runtime.jit_cache_hook = is_others if parts > 1 else None
        try:
            for name in names:
                for call in serving_calls(name):
                    call()
        finally:
            triton.knobs.runtime.jit_cache_hook = None
    return seen


def bake(target: Path, capability: int, names: Sequence[str], jobs: int, cache: Path) -> Seen:
    """Write a baked folder.

    Args:
        target: the folder; other kernels that are there stay.
        capability: a key of `GPUS`.
        names: the ops.
        jobs: processes.
        cache: Triton's own; what an earlier bake left there is not compiled again.
    """
    target.mkdir(parents=True, exist_ok=True)
    # Everything of this process's own settings but where the cache is goes into the keys, as at run time.
    os.environ["TRITON_CACHE_DIR"] = str(cache)
    os.environ.pop("TRITON_CACHE_MANAGER", None)
    compiled: list[str] = []
    if jobs > 1:
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            for seen in pool.map(compile_ops, repeat(capability), repeat(names), range(jobs), repeat(jobs)):
                compiled += seen.compiled
    seen = compile_ops(capability, names)
    for folder in seen.folders:
        keep(folder, target / folder.name)
    return Seen(compiled + seen.compiled, seen.folders)


def keep(kernel: Path, place: Path) -> None:
    """Copy a kernel's binary and description out of Triton's cache; the rest only a compiler needs."""
    place.mkdir(exist_ok=True)
    for path in kernel.iterdir():
        if path.suffix in (".cubin", ".json") and not path.name.startswith("__grp__"):
            shutil.copyfile(path, place / path.name)


def in_share(names: Sequence[str], share: str) -> list[str]:
    """The ops of share K of N, which does not depend on what other ops there are.

    Args:
        share: "K/N", K from 1.

    Raises:
        ValueError: it is not such a share.
    """
    place, of = (int(number) for number in share.split("/"))
    if not 1 <= place <= of:
        raise ValueError(share)
    return [name for name in names if zlib.crc32(name.encode()) % of == place - 1]


def set_times(target: Path, names: Iterable[str], seconds: float) -> None:
    """Give some folders of a folder with all that is in them, the folder and the one above the same time.

    What else is there is not touched: it lies in a lower layer of an image and would be in this one once more.
    """
    for name in names:
        for path in (target / name).rglob("*"):
            os.utime(path, (seconds, seconds))
        os.utime(target / name, (seconds, seconds))
    for path in (target, target.parent):
        os.utime(path, (seconds, seconds))


def bake_launcher(target: Path) -> None:
    """Add the extension module by which Triton talks to the driver; gcc would make it in each first start.

    It is linked against a stand-in of the driver's name and with its functions: the driver is only there at run time.
    """
    from triton.backends.nvidia import driver
    from triton.runtime.build import compile_so_from_file

    with tempfile.TemporaryDirectory() as folder:
        source = Path(driver.__file__).with_name("driver.c")
        library, stand_in = Path(folder, driver.libraries[0]), Path(folder, "stand_in.c")
        # Names from the source itself; a linker may leave out a library of which nothing is used.
        names = sorted(set(re.findall(r"\bcu[A-Z]\w+", source.read_text())))
        stand_in.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
        command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{library.name}", "-o", library, stand_in]
        subprocess.run(command, check=True)
        os.environ["TRITON_CACHE_DIR"] = folder
        os.environ.pop("TRITON_CACHE_MANAGER", None)
        made = Path(compile_so_from_file(str(source), "cuda_utils", [folder], driver.include_dirs, driver.libraries))
        (target / baked.LAUNCHER).mkdir(exist_ok=True)
        shutil.copyfile(made, target / baked.LAUNCHER / made.name)


def main() -> int:
    """Bake what the command line names; prints what was written as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m sm120_kernels.bake", description="Compile the serving kernels into a folder, without a GPU."
    )
    parser.add_argument("folder", type=Path, help="sm120_kernels.baked reads it")
    parser.add_argument("--capability", type=int, choices=sorted(GPUS), default=120)
    parser.add_argument("--op", action="append", choices=op_names(), help="this op, not those that hooks call; repeat")
    parser.add_argument(
        "--share", default="1/1", help="K/N: only this share of the ops; the first has the launcher too"
    )
    parser.add_argument("--cache", type=Path, help="Triton's own, kept from bake to bake (a temporary one)")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, MOST_JOBS), help="processes (%(default)s)")
    arguments = parser.parse_args()
    try:
        names = in_share(arguments.op or served_ops(), arguments.share)
    except ValueError:
        parser.error(f"--share {arguments.share}: expected K/N with K from 1 to N")
    with tempfile.TemporaryDirectory() as temporary:
        cache = arguments.cache or Path(temporary)
        seen = bake(arguments.folder, arguments.capability, names, arguments.jobs, cache)
    written = {folder.name for folder in seen.folders}
    if arguments.share.startswith("1/"):
        bake_launcher(arguments.folder)
        written.add(baked.LAUNCHER)
    if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
        set_times(arguments.folder, written, float(epoch))
    size = sum(path.stat().st_size for path in arguments.folder.rglob("*") if path.is_file())
    facts = {"ops": names, "kernels": len(seen.folders), "compiled": len(seen.compiled), "bytes": size}
    sys.stdout.write(json.dumps(facts) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
