"""Compiles every shape of every op for a GPU that need not be present, and reports what it would occupy there.

Each module in ``sm120_kernels.ops`` has ``compile_cases()``, which lists its launches as :class:`CompileCase`. The
committed tables beside this file hold the reports for sm_120; ``python -m sm120_kernels.aot --write`` renews them and
``tests/kernels/test_aot.py`` compares them with a fresh compile.
"""

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sm120_kernels import ops

TABLE_JSON = Path(__file__).with_name("sm120_compile_table.json")
TABLE_MARKDOWN = TABLE_JSON.with_suffix(".md")


@dataclass(frozen=True)
class SmLimits:
    """What one streaming multiprocessor holds. Source: CUDA C++ programming guide, technical specifications."""

    shared_per_block: int
    shared_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int
    registers_per_sm: int = 65536
    shared_reserved_per_block: int = 1024
    shared_unasked: int = 49152
    register_granularity: int = 256


LIMITS = {
    90: SmLimits(shared_per_block=232448, shared_per_sm=233472, warps_per_sm=64, blocks_per_sm=32),
    120: SmLimits(shared_per_block=101376, shared_per_sm=102400, warps_per_sm=48, blocks_per_sm=24),
}


@dataclass(frozen=True)
class CompileCase:
    """One kernel as one launch compiles it.

    Args:
        op: name of the op's module.
        shape: the launch in words, unique within the op; the row's name in the table.
        kernel: the ``@triton.jit`` function.
        arguments: type of each argument that is not a constexpr, in Triton's ahead-of-time notation: ``*bf16:16``
            is a pointer to bf16 aligned to 16 bytes, ``i32:16`` an integer divisible by 16, ``fp32`` a float.
        constexprs: value of each constexpr.
        num_warps, num_stages: as launched.
        uses_mma: whether the kernel must contain tensor-core instructions.
        options: further compiler options, as launched.
    """

    op: str
    shape: str
    kernel: Any
    arguments: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int = 1
    uses_mma: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CompileReport:
    """What one kernel needs on the target; ``stack`` in bytes a thread, above 0 when registers spilled.

    ``shared`` is all shared memory of a block, ``static`` the part of it that the kernel declares itself.
    """

    op: str
    shape: str
    kernel: str
    warps: int
    registers: int
    stack: int
    local_accesses: int
    shared: int
    blocks_per_sm: int
    mma: dict[str, int]
    static: int = 0

    def problems(self, limits: SmLimits, uses_mma: bool) -> list[str]:
        """What makes the kernel unfit for the target, in words; empty when it fits."""
        found = []
        if self.shared > limits.shared_per_block:
            found.append(f"{self.shared} B of shared memory, the limit is {limits.shared_per_block} B")
        # Triton asks for more only where its own part is more than this.
        if self.static and self.shared > limits.shared_unasked:
            found.append(f"{self.shared} B of shared memory, {self.static} B its own: more than a launch gets unasked")
        if self.stack or self.local_accesses:
            found.append(f"{self.stack} B of stack, {self.local_accesses} local loads and stores: registers spilled")
        if uses_mma and not self.mma:
            found.append("no tensor-core instruction although a dot is meant")
        if self.blocks_per_sm == 0:
            found.append("no block fits a multiprocessor")
        return [f"{self.op} / {self.shape}: {problem}" for problem in found]


def blocks_per_sm(registers: int, warps: int, shared: int, limits: SmLimits) -> int:
    """Blocks of ``warps`` warps, ``registers`` a thread and ``shared`` bytes that one multiprocessor holds at once."""
    granularity = limits.register_granularity
    registers_per_warp = -(-registers * 32 // granularity) * granularity
    return min(
        limits.blocks_per_sm,
        limits.warps_per_sm // warps,
        limits.registers_per_sm // (registers_per_warp * warps),
        limits.shared_per_sm // (shared + limits.shared_reserved_per_block),
    )


def all_cases() -> Iterator[CompileCase]:
    """Every launch of every op."""
    for module in pkgutil.iter_modules(ops.__path__):
        yield from importlib.import_module(f"{ops.__name__}.{module.name}").compile_cases()


def compile_case(case: CompileCase, capability: int = 120) -> triton.compiler.CompiledKernel:
    """Compiles ``case`` for compute capability ``capability`` (90, 120); no GPU is used."""
    signature, attributes = {}, {}
    for position, name in enumerate(case.kernel.arg_names):
        if name in case.constexprs:
            signature[name] = "constexpr"
            continue
        kind, _, divisor = case.arguments[name].partition(":")
        signature[name] = kind
        if divisor:
            attributes[(position,)] = [["tt.divisibility", int(divisor)]]
    source = ASTSource(case.kernel, signature, dict(case.constexprs), attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def report(case: CompileCase, capability: int = 120) -> CompileReport:
    """Compiles ``case`` and reads the binary's resource usage and instructions."""
    compiled = compile_case(case, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _cuobjdump("--dump-resource-usage", cubin.name)
        sass = _cuobjdump("--dump-sass", cubin.name)
    counts = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED):(\d+)", usage)}
    # What the GPU reserves is counted with what the kernel declares.
    static = max(0, counts["SHARED"] - LIMITS[capability].shared_reserved_per_block)
    shared = compiled.metadata.shared + static
    mma = Counter(re.findall(r"\b(?:mma\.sync|wgmma\.mma_async)\.\S+", compiled.asm["ptx"]))
    return CompileReport(
        op=case.op,
        shape=case.shape,
        kernel=case.kernel.__name__,
        warps=case.num_warps,
        registers=counts["REG"],
        stack=counts["STACK"],
        local_accesses=len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        shared=shared,
        blocks_per_sm=blocks_per_sm(counts["REG"], case.num_warps, shared, LIMITS[capability]),
        mma=dict(sorted(mma.items())),
        static=static,
    )


def _cuobjdump(option: str, path: str) -> str:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    return subprocess.run([tool, option, path], check=True, capture_output=True, text=True).stdout


def markdown(reports: Iterable[CompileReport]) -> str:
    """The reports as a table for people."""
    lines = [
        "# What each kernel needs on sm_120",
        "",
        f"Written by `python -m sm120_kernels.aot --write` with Triton {triton.__version__}; nothing here was run or "
        "timed on an sm_120 GPU.",
        f"A block may use {LIMITS[120].shared_per_block:,} B of shared memory.",
        "",
        "| op | launch | kernel | warps | registers | spills | shared B | blocks per SM | tensor-core instructions |",
        "| --- | --- | --- | --: | --: | --: | --: | --: | --- |",
    ]
    for row in reports:
        mma = ", ".join(f"{count} `{name}`" for name, count in row.mma.items()) or "none"
        lines.append(
            f"| {row.op} | {row.shape} | {row.kernel} | {row.warps} | {row.registers} | {row.local_accesses} "
            f"| {row.shared:,} | {row.blocks_per_sm} | {mma} |"
        )
    return "\n".join(lines) + "\n"


def read_table() -> list[CompileReport]:
    """The committed reports."""
    return [CompileReport(**row) for row in json.loads(TABLE_JSON.read_text())["kernels"]]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sm120_kernels.aot", description="Compile every op for sm_120 and report what it needs there."
    )
    parser.add_argument("--op", help="only this op")
    parser.add_argument("--capability", type=int, choices=sorted(LIMITS), default=120)
    parser.add_argument("--write", action="store_true", help="renew the committed tables (all ops, sm_120)")
    arguments = parser.parse_args()
    if arguments.write and (arguments.op or arguments.capability != 120):
        parser.error("--write renews the whole sm_120 table: leave out --op and --capability")

    cases = [case for case in all_cases() if arguments.op in (None, case.op)]
    reports = [report(case, arguments.capability) for case in cases]
    if arguments.write:
        rows = [asdict(row) for row in reports]
        TABLE_JSON.write_text(json.dumps({"triton": triton.__version__, "kernels": rows}, indent=1) + "\n")
        TABLE_MARKDOWN.write_text(markdown(reports))
    sys.stdout.write(markdown(reports))
    limits = LIMITS[arguments.capability]
    problems = [text for row, case in zip(reports, cases, strict=True) for text in row.problems(limits, case.uses_mma)]
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
