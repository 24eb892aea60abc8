"""Times the FP8 linear layers and wo_a against torch's and DeepGEMM's FP8 products of quantised activations.

    python -m benchmarks.fp8_block_linear --out results

Ours quantises inside; the peers get quantised activations, whose own launch is not timed. torch._scaled_mm has one
scale a tensor, DeepGEMM (package `sgl-deep-gemm`, left out where it is not installed) the same block scales as ours.
bf16 is what there is without FP8: `x @ w.T`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sm120_kernels.ops.fp8_block_linear import BLOCK, fp8_block_linear
from sm120_kernels.ops.inv_rope_wo_a import inv_rope_wo_a
from sm120_kernels.reference import fp8_block_linear as reference
from sm120_kernels.reference import inv_rope_wo_a as wo_a_reference

from benchmarks import timing

# wq_a + wkv, wq_b, wq_b with the indexer's, wo_b, and the shared expert's two.
SHAPES = ((1536, 4096), (8192, 1024), (16384, 1024), (4096, 2048), (1024, 4096), (4096, 512))
TOKENS = (1, 2, 4, 8, 16, 32, 64)
HEADS, GROUPS, RANK = 16, 2, 1024

Maker = Callable[[dict[str, Any]], Callable[[], object]]


def inputs(tokens: int, columns: int, depth: int, seed: int = 0) -> dict[str, Any]:
    """Random arguments of `ops.fp8_block_linear` on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    weight, scale = reference.random_weight(columns, depth, generator=generator)
    x = torch.randn(tokens, depth, generator=generator, device="cuda").bfloat16()
    return {"x": x, "weight": weight, "weight_scale": scale}


def wo_a_inputs(tokens: int, seed: int = 0) -> dict[str, Any]:
    """Random arguments of `ops.inv_rope_wo_a` on the GPU: a TP4 rank's."""
    generator = torch.Generator("cuda").manual_seed(seed)
    weight, scale = reference.random_weight(GROUPS, RANK, HEADS // GROUPS * 512, generator=generator)
    return {
        "o": torch.randn(tokens, HEADS, 512, generator=generator, device="cuda").bfloat16(),
        "positions": torch.randint(0, 65536, (tokens,), generator=generator, device="cuda", dtype=torch.int32),
        "rope": wo_a_reference.rope_table(65536, device="cuda"),
        "weight": weight,
        "weight_scale": scale,
    }


def ours(call: dict[str, Any]) -> Callable[[], object]:
    out = torch.empty(call["x"].shape[0], call["weight"].shape[0], dtype=torch.bfloat16, device="cuda")
    return lambda: fp8_block_linear(**call, out=out)


def ours_norm(call: dict[str, Any]) -> Callable[[], object]:
    out = torch.empty(call["x"].shape[0], call["weight"].shape[0], dtype=torch.bfloat16, device="cuda")
    norm_weight = torch.ones(call["x"].shape[1], dtype=torch.bfloat16, device="cuda")
    return lambda: fp8_block_linear(**call, norm_weight=norm_weight, out=out)


def bf16(call: dict[str, Any]) -> Callable[[], object]:
    weight = reference.dequantise(call["weight"], call["weight_scale"]).bfloat16()
    return lambda: call["x"] @ weight.T


def scaled_mm(call: dict[str, Any]) -> Callable[[], object]:
    x = call["x"].to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    weight = call["weight"].T
    return lambda: torch._scaled_mm(x, weight, one, one, out_dtype=torch.bfloat16)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x in e4m3 and its scales [rows, K / 128]."""
    groups = x.float().unflatten(-1, (-1, BLOCK))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    return (groups / scale).to(torch.float8_e4m3fn).flatten(-2), scale.squeeze(-1)


def deep_gemm(call: dict[str, Any]) -> Callable[[], object]:
    import deep_gemm as library

    x, scale = quantised(call["x"])
    scale = library.get_mn_major_tma_aligned_tensor(scale)
    out = torch.empty(x.shape[0], call["weight"].shape[0], dtype=torch.bfloat16, device="cuda")

    def run() -> torch.Tensor:
        library.fp8_gemm_nt((x, scale), (call["weight"], call["weight_scale"]), out)
        return out

    return run


def wo_a_ours(call: dict[str, Any]) -> Callable[[], object]:
    out = torch.empty(call["o"].shape[0], GROUPS * RANK, dtype=torch.bfloat16, device="cuda")
    return lambda: inv_rope_wo_a(**call, out=out)


def wo_a_bf16(call: dict[str, Any]) -> Callable[[], object]:
    """The default on sm_120 without its rotation: a bf16 einsum."""
    weight = reference.dequantise(call["weight"], call["weight_scale"]).bfloat16()
    o = call["o"].flatten(1).unflatten(1, (GROUPS, -1))
    return lambda: torch.einsum("tgd,grd->tgr", o, weight)


def note(name: str, result: object, call: dict[str, Any]) -> str:
    """How far a result is from float64."""
    assert isinstance(result, torch.Tensor)
    if "o" in call:
        if name != "ours":
            return ""
        exact = wo_a_reference.inv_rope_wo_a(**call)
        free = wo_a_reference.inv_rope_wo_a(**call, rounded=False)
    elif name == "torch._scaled_mm":
        return ""
    else:
        norm = {"norm_weight": torch.ones(call["x"].shape[1], device="cuda")} if name == "ours, RMSNorm" else {}
        exact = reference.fp8_block_linear(**call, **norm)
        free = reference.fp8_block_linear(**call, **norm, rounded=False)
    errors = [float((result.double() - e).norm() / e.norm()) for e in (exact, free)]
    return f"error {errors[0]:.1e}, against exact activations {errors[1]:.1e}"


def row(op: str, name: str, make: Maker, shape: dict[str, Any], sets: list[dict[str, Any]]) -> timing.Row:
    """Time one implementation; its first result is compared with float64."""
    weight, tokens = sets[0]["weight"], shape["M"]
    rows, depth = weight.numel() // weight.shape[-1], weight.shape[-1]
    activations = sets[0]["o"].numel() if "o" in sets[0] else tokens * depth
    counted = {
        "bytes": weight.numel() + sets[0]["weight_scale"].numel() * 4 + 2 * activations + 2 * tokens * rows,
        "flops": 2.0 * tokens * weight.numel(),
        "dtype": "fp8",
    }
    try:
        calls = [make(call) for call in sets]
        text = note(name, calls[0](), sets[0])
    except Exception as error:  # a peer may fail in any way; the table must still come out
        return timing.Row(op, shape, name, None, note=f"{type(error).__name__}: {error}"[:200], **counted)
    return timing.measure(op, shape, name, calls, note=text, **counted)


def rows() -> list[timing.Row]:
    found: list[timing.Row] = []

    def add(op: str, makers: dict[str, Maker], shape: dict[str, Any], sets: list[dict[str, Any]]) -> None:
        for name, make in makers.items():
            found.append(row(op, name, make, shape, sets))
            print(found[-1].implementation, shape, found[-1].timing, found[-1].note, file=sys.stderr, flush=True)

    linear = {"ours": ours, "torch._scaled_mm": scaled_mm, "DeepGEMM": deep_gemm, "torch bf16": bf16}
    for columns, depth in SHAPES:
        for tokens in TOKENS:
            sets = [inputs(tokens, columns, depth, seed) for seed in range(timing.INPUT_SETS)]
            makers = linear if tokens in (1, 16, 64) else {"ours": ours}
            if (columns, depth) in ((8192, 1024), (16384, 1024)):
                makers = makers | {"ours, RMSNorm": ours_norm}
            add("fp8_block_linear", makers, {"M": tokens, "N": columns, "K": depth}, sets)
    for tokens in TOKENS:
        sets = [wo_a_inputs(tokens, seed) for seed in range(timing.INPUT_SETS)]
        add("inv_rope_wo_a", {"ours": wo_a_ours, "torch bf16": wo_a_bf16}, {"M": tokens}, sets)
    return found


def main() -> None:
    options = timing.arguments("Time the FP8 linear layers and wo_a.").parse_args()
    report = timing.Report(timing.Machine.measure(), "python -m benchmarks.fp8_block_linear", rows())

    def plots(folder: Path) -> None:
        for columns, depth in SHAPES:
            name = f"fp8_block_linear_{columns}x{depth}.svg"
            timing.plot_times(report, "fp8_block_linear", "M", folder / name, N=columns, K=depth)
        timing.plot_times(report, "inv_rope_wo_a", "M", folder / "inv_rope_wo_a.svg")

    timing.publish(report, "fp8_block_linear", options, plots)


if __name__ == "__main__":
    main()
