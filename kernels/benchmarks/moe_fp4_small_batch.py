"""Times the FP4 experts of a TP4 rank, with the shared expert, against torch.

    python -m benchmarks.moe_fp4_small_batch --out results

Tokens choose 6 of 256 experts at random. The bytes counted are the weights and scales of the experts that are hit, of
the shared expert, and the activations. The torch path gathers the hit experts' weights for every route, turns them into
bf16 and multiplies: what torch does without asking the GPU which experts were hit. SGLang's kernels for sm_120
(FlashInfer's CUTLASS) do not run elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sm120_kernels.ops.moe_fp4_small_batch import moe_fp4_small_batch
from sm120_kernels.reference import fp8_block_linear as linear
from sm120_kernels.reference import moe_fp4_small_batch as reference

from benchmarks import timing

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 256, 6, 4096, 512
TOKENS = (1, 2, 4, 8, 16, 32, 64)
KINDS = ("MXFP4", "NVFP4")


def weights(kind: str, seed: int = 0) -> dict[str, Any]:
    """Random weights of a layer on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return reference.random_experts(EXPERTS, HIDDEN, INTERMEDIATE, generator, nvfp4=kind == "NVFP4")


def tokens_of(count: int, seed: int = 0) -> dict[str, Any]:
    """Random tokens and their experts on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(count, EXPERTS, generator=generator, device="cuda")
    weight = torch.rand(count, TOP_K, generator=generator, device="cuda")
    return {
        "x": torch.randn(count, HIDDEN, generator=generator, device="cuda").bfloat16(),
        "topk_ids": scores.topk(TOP_K).indices.to(torch.int32),
        "topk_weights": 1.5 * weight / weight.sum(1, keepdim=True),
    }


def ours(call: dict[str, Any]) -> Callable[[], object]:
    out = torch.empty_like(call["x"])
    return lambda: moe_fp4_small_batch(**call, out=out)


def all_torch(call: dict[str, Any]) -> Callable[[], object]:
    table = torch.tensor(reference.E2M1, dtype=torch.bfloat16, device="cuda")
    dense = {
        name: linear.dequantise(call[f"shared_{name}"], call[f"shared_{name}_scale"]).bfloat16()
        for name in ("w13", "w2")
    }

    def matrices(name: str, ids: torch.Tensor) -> torch.Tensor:
        packed, scale = call[name][ids], call[f"{name}_scale"][ids]
        values = torch.stack([table[(packed & 15).int()], table[(packed >> 4).int()]], -1).flatten(-2)
        if scale.dtype == torch.uint8:
            scale = torch.exp2(scale.float() - 127)
        else:
            scale = scale.float() * call[f"{name}_global"][ids, None, None]
        groups = values.unflatten(-1, (scale.shape[-1], -1))
        return (groups * scale.bfloat16()[..., None]).flatten(-2)

    def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)

    def run() -> torch.Tensor:
        x, ids = call["x"], call["topk_ids"].flatten().long()
        inputs = x.repeat_interleave(TOP_K, 0)[:, None]
        value = torch.bmm(swiglu(torch.bmm(inputs, matrices("w13", ids).mT)), matrices("w2", ids).mT)
        routed = (value.view(len(x), TOP_K, -1) * call["topk_weights"][..., None]).sum(1)
        return (routed + swiglu(x @ dense["w13"].T) @ dense["w2"].T).bfloat16()

    return run


def counted(call: dict[str, Any]) -> dict[str, Any]:
    """Fewest bytes and the FLOPs of a call."""
    hit, routes = call["topk_ids"].unique().numel(), call["topk_ids"].numel()
    tokens = call["x"].shape[0]
    expert = sum(call[name][0].nbytes for name in ("w13", "w13_scale", "w2", "w2_scale"))
    shared = sum(value.nbytes for name, value in call.items() if name.startswith("shared"))
    return {
        "bytes": hit * expert + shared + 2 * call["x"].nbytes,
        "flops": 2.0 * 3 * HIDDEN * INTERMEDIATE * (routes + tokens),
    }


def row(name: str, make: Callable[..., Callable[[], object]], shape: dict[str, Any], sets: list[Any]) -> timing.Row:
    """Time one implementation; its first result is compared with float64."""
    count = counted(sets[0])
    try:
        calls = [make(call) for call in sets]
        result = calls[0]()
        assert isinstance(result, torch.Tensor)
        exact = reference.moe_fp4_small_batch(**sets[0])
        text = f"error {float((result.double() - exact).norm() / exact.norm()):.1e}, "
        text += f"{sets[0]['topk_ids'].unique().numel()} experts hit"
    except Exception as error:  # the torch path may run out of memory; the table must still come out
        return timing.Row(
            "moe_fp4_small_batch", shape, name, None, note=f"{type(error).__name__}: {error}"[:200], **count
        )
    return timing.measure("moe_fp4_small_batch", shape, name, calls, note=text, **count)


def rows() -> list[timing.Row]:
    found: list[timing.Row] = []
    for kind in KINDS:
        layers = [weights(kind, seed) for seed in range(timing.INPUT_SETS)]
        for tokens in TOKENS:
            sets = [layer | tokens_of(tokens, seed) for seed, layer in enumerate(layers)]
            makers = {"ours": ours} | ({"torch": all_torch} if tokens in (1, 16) else {})
            for name, make in makers.items():
                found.append(row(name, make, {"T": tokens, "weights": kind}, sets))
                print(name, found[-1].shape, found[-1].timing, found[-1].note, file=sys.stderr, flush=True)
    return found


def main() -> None:
    options = timing.arguments("Time the FP4 experts.").parse_args()
    report = timing.Report(timing.Machine.measure(), "python -m benchmarks.moe_fp4_small_batch", rows())

    def plots(folder: Path) -> None:
        for kind in KINDS:
            name = f"moe_fp4_small_batch_{kind}.svg"
            timing.plot_times(report, "moe_fp4_small_batch", "T", folder / name, weights=kind)

    timing.publish(report, "moe_fp4_small_batch", options, plots)


if __name__ == "__main__":
    main()
