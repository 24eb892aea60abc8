"""Compiles, in the image build and without a GPU, what SGLang itself would compile with nvcc at its first start.

Usage: python bake_modules.py FOLDER

They go to FOLDER, laid out as SGLang's cache, whose keys hold contents and no host; the engine's entry point links
them into the cache. They get the flags that a 12.0 GPU gets (nvcc 13 compiles for sm_120f then: the family-specific
code of sm_120).

nvcc names what has internal linkage after a random number, hence a fixed seed, and files after its process, hence no
symbol table. `ninja` runs as many compilers as there are processors, which changes no byte.
"""

import ctypes
import functools
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

CAPABILITY = (12, 0)
SEED = "-frandom-seed=1"
OPS = "sglang.kernels.ops"
# Compilers at a time at most; one was seen to take 0.7 GB.
MOST_JOBS = 8


def sglang_calls(torch: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """The functions of SGLang 0.5.23 that load a module, with the arguments of DeepSeek-V4-Flash on sm_120.

    Read from its sources for the switches of compose.yaml. What another switch needs (top-k v2, DeepGEMM's metadata)
    is compiled at the first start like everything that is not here.
    """
    bf16, fp32, e4m3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
    layout = importlib.import_module(f"{OPS}.attention.dsv4.kv_layout").KVLayout.V4
    norm_rope, compress = "attention.dsv4.norm_rope", "attention.dsv4.compress"
    calls: list[tuple[str, tuple[Any, ...]]] = [
        (f"{norm_rope}._jit_fused_rope_module", ()),
        (f"{norm_rope}._jit_main_q_norm_rope_module", (bf16, 512, 64, True)),
        (f"{norm_rope}._jit_main_q_norm_rope_module", (bf16, 512, 64, False)),
        (f"{norm_rope}._jit_main_q_indexer_rope_hadamard_quant_module", (bf16,)),
        (f"{compress}._jit_compress_plan_module", ()),
        ("attention.dsv4.topk._jit_topk_v1_module", ()),
        ("moe.dsv4._jit_hash_topk_module", ()),
        ("moe.dsv4._jit_mask_topk_module", ()),
        ("activation.silu_and_mul_clamp._jit_silu_and_mul_clamp_module", (bf16,)),
        # Input and output, group, then UE8M0 scales, rows, alignment, no SwiGLU, no mask, dependent launch.
        ("quantization.per_token_group_quant._jit_module", (bf16, e4m3, 128, False, False, True, False, False, True)),
    ]
    # Pages of the sliding window: 64 tokens with SGLANG_OPT_SM120_DIRECT_SWA_KV, else 256.
    for page in (64, 256):
        calls.append((f"{norm_rope}._jit_main_k_norm_rope_flashmla_module", (bf16, 512, 64, page, layout)))
    # C4, C128 and the indexer's keys; what they are pooled from is fp32.
    for dim, ratio, page in ((512, 4, 64), (512, 128, 2), (128, 4, 64)):
        calls.append((f"{compress}._jit_compress_module", (dim, fp32, fp32, fp32, ratio)))
        calls.append((f"{compress}._jit_compress_norm_rope_module", (fp32, dim, 64, page, False, layout)))
    return calls


def pretend_gpu(torch: Any) -> None:
    """Let this process believe that there is one GPU, as far as choosing flags goes."""
    for name, value in (
        ("is_available", True),
        ("device_count", 1),
        ("current_device", 0),
        ("get_device_capability", CAPABILITY),
        ("get_device_name", "NVIDIA RTX PRO 6000 Blackwell"),
    ):
        mock.patch.object(torch.cuda, name, functools.partial(_answer, value)).start()


def _answer(value: Any, *_: Any, **__: Any) -> Any:
    return value


def stand_in_driver(folder: Path) -> None:
    """Load an empty library of the driver's name: modules that were linked against the driver load without one."""
    library, empty = folder / "libcuda.so.1", folder / "empty.c"
    empty.touch()
    command = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{library.name}", "-o", library, empty]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def say(text: str) -> None:
    """A line for the build's log."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def timed(call: Any, *arguments: Any) -> float:
    """Seconds that a call takes."""
    begun = time.monotonic()
    call(*arguments)
    return time.monotonic() - begun


def keep(library: Path, folder: Path) -> None:
    """Copy a library without its symbol table, in which nvcc left the number of its process."""
    subprocess.run(["strip", "--strip-all", "-o", folder / library.name, library], check=True)


def bake_sglang(target: Path, jobs: int) -> None:
    """Build SGLang's modules and keep what its cache looks at: the library and the list of what it was made from."""
    torch: Any = importlib.import_module("torch")
    pretend_gpu(torch)
    cache = Path(os.environ["SGLANG_JIT_CACHE_DIR"])
    calls: list[tuple[str, tuple[Any, ...], Any]] = []
    for path, arguments in sglang_calls(torch):
        module, _, name = path.rpartition(".")
        calls.append((name, arguments, getattr(importlib.import_module(f"{OPS}.{module}"), name)))
    # ninja takes all processors for one module, but each is one file: several modules at a time.
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(timed, call, *arguments) for _, arguments, call in calls]
        for (name, _, _), one in zip(calls, running, strict=True):
            say(f"{name}: {one.result():.1f} s")
    for library in sorted(cache.glob("*/*/build-*/deps-*/*.so")):
        place = target / library.parent.relative_to(cache)
        place.mkdir(parents=True)
        shutil.copyfile(library.with_name("sgl_deps.json"), place / "sgl_deps.json")
        keep(library, place)


def main() -> None:
    """Bake into the folder that the command line names."""
    with tempfile.TemporaryDirectory() as folder:
        # Before anything is imported, FlashInfer for one looks at its own but once.
        os.environ |= {
            "NVCC_APPEND_FLAGS": SEED,
            "SGLANG_JIT_CACHE_DIR": f"{folder}/sglang",
            "FLASHINFER_WORKSPACE_BASE": folder,
        }
        stand_in_driver(Path(folder))
        bake_sglang(Path(sys.argv[1]), min(os.cpu_count() or 1, MOST_JOBS))


if __name__ == "__main__":
    main()
