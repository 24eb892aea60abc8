"""Compiles with nvcc, without a GPU, the modules of this model that are too long for the image build.

Usage: python compile_modules.py [NAME ...]     in a container of the image, beside deploy/image/bake_modules.py

They go where the engine of a 12.0 GPU looks for them: FlashInfer's into its folder of modules that came compiled, which
the image links into the engines' cache; SGLang's into its own cache. What is there already stays. Compiling is done in
a folder of the cache that is no part of it (`engine_runtime.caches`), so what a stopped run left is taken up again.

Prints a line of JSON for each module: {"module", "seconds", "bytes"}, seconds of all its compilers together. Between
them are ninja's own lines, which begin with [STEP/STEPS].
"""

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

bake_modules: Any = importlib.import_module("bake_modules")

CACHE = Path("/var/cache/engine")
WORK = CACHE / "tmp"
"""Left out when the cache is packed."""
FLASHINFER = {
    # Attention, in decode and in prefill.
    "sparse_mla_sm120": "flashinfer.jit.mla.gen_sparse_mla_sm120_module",
    # The experts in FP4, of native MXFP4 as of NVFP4.
    "fused_moe_120": "flashinfer.jit.fused_moe.gen_cutlass_fused_moe_sm120_module",
    # The experts' input.
    "mxfp8_quantization_sm100": "flashinfer.jit.fp8_quantization.gen_mxfp8_quantization_sm100_module",
    # The order of the experts' scales, when the weights are loaded.
    "fp4_quantization_120f": "flashinfer.jit.fp4_quantization.gen_fp4_quantization_sm120f_module",
    # A request that asks for top-k, top-p or min-p.
    "sampling": "flashinfer.jit.sampling.gen_sampling_module",
}
"""By name, FlashInfer's own functions that describe the modules which SGLang 0.5.23 calls on sm_120 with the switches
of compose.yaml; read from `kernels/ops/attention/flash_mla_sm120.py`, `srt/layers/moe/moe_runner/flashinfer_cutlass.py`
and, of `srt/layers`, `quantization/mxfp4_flashinfer_cutlass_moe.py` and `sampler.py`."""
SGLANG = {"fp8_blockwise_scaled_mm": ("gemm.fp8_blockwise_gemm", "_jit_fp8_blockwise_module")}
"""By name, SGLang's functions that load what it compiles itself: the linear layers."""
NAMES = (*FLASHINFER, *SGLANG)


def say(**facts: object) -> None:
    """A line of JSON."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def called(path: str) -> Any:
    """What a dotted path names, called."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)()


def compile_flashinfer(names: Iterable[str]) -> None:
    """Build FlashInfer's modules at once, and put those that are complete into their place."""
    environment, core = (importlib.import_module(f"flashinfer.jit.{name}") for name in ("env", "core"))
    # The image's link: into the engines' cache, below FlashInfer's version and the GPU's kind.
    place = Path(os.path.realpath(environment.FLASHINFER_AOT_DIR))
    if not place.is_relative_to(CACHE):
        sys.exit(f"{environment.FLASHINFER_AOT_DIR} leads to {place}, not into {CACHE}: an image before this step")
    missing = [name for name in names if not (place / name / f"{name}.so").exists()]
    if not missing:
        return
    specs = [called(FLASHINFER[name]) for name in missing]
    core.build_jit_specs(specs, verbose=True)
    for name, spec in zip(missing, specs, strict=True):
        (place / name).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=WORK) as folder:
            bake_modules.keep(spec.jit_library_path, Path(folder))
            Path(folder, f"{name}.so").replace(place / name / f"{name}.so")
        say(module=name, seconds=seconds_of(spec.build_dir), bytes=(place / name / f"{name}.so").stat().st_size)


def seconds_of(folder: Path) -> float:
    """Seconds of all compilers of a module, from ninja's own notes beside its folder (milliseconds from its start)."""
    lines = (folder.parent / ".ninja_log").read_text().splitlines()[1:]
    spans = {fields[3]: int(fields[1]) - int(fields[0]) for fields in map(str.split, lines)}
    return round(sum(span for path, span in spans.items() if folder.name in Path(path).parts) / 1000, 1)


def compile_sglang(names: Iterable[str]) -> None:
    """Build SGLang's modules, and keep what its cache looks at: the library and the list of what it was made from."""
    work, cache = Path(os.environ["SGLANG_JIT_CACHE_DIR"]), CACHE / "sglang-jit"
    for name in names:
        if any(cache.glob(f"*/*{name}*/build-*/deps-*/*.so")):
            continue
        module, function = SGLANG[name]
        seconds = bake_modules.timed(called, f"{bake_modules.OPS}.{module}.{function}")
        for library in sorted(work.glob(f"*/*{name}*/build-*/deps-*/*.so")):
            place = cache / library.parent.relative_to(work)
            place.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library.with_name("sgl_deps.json"), place / "sgl_deps.json")
            bake_modules.keep(library, place)
            say(module=name, seconds=round(seconds, 1), bytes=(place / library.name).stat().st_size)


def main() -> None:
    """Compile what the command line names, or everything."""
    names = sys.argv[1:] or NAMES
    if unknown := [name for name in names if name not in NAMES]:
        sys.exit(f"compile_modules: {', '.join(unknown)}: not one of {', '.join(NAMES)}")
    WORK.mkdir(parents=True, exist_ok=True)
    # Before anything is imported: FlashInfer looks at its own but once.
    os.environ |= {"SGLANG_JIT_CACHE_DIR": str(WORK / "sglang"), "FLASHINFER_WORKSPACE_BASE": str(WORK)}
    bake_modules.stand_in_driver(Path(tempfile.mkdtemp()))
    torch: Any = importlib.import_module("torch")
    bake_modules.pretend_gpu(torch)
    with ThreadPoolExecutor(1) as beside:
        # One file, compiled for minutes: beside the others.
        own = beside.submit(compile_sglang, [name for name in names if name in SGLANG])
        compile_flashinfer([name for name in names if name in FLASHINFER])
        own.result()


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"compile_modules: {error}")
