"""Times the mHC boundary against torch's functions.

    python -m benchmarks.mhc_post_pre_norm --out benchmarks/results
    python -m benchmarks.mhc_post_pre_norm --sweep      # every cut of the first launch

The torch way is SGLang 0.5.23's `_mhc_post_torch` and `_mhc_pre_torch` with the RMSNorm, in fp32.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from sm120_kernels.ops.mhc_post_pre_norm import HIDDEN, Boundary, Plan, mhc_post_pre_norm, plan
from sm120_kernels.reference import mhc_post_pre_norm as reference

from benchmarks import timing

OP = "mhc_post_pre_norm"
TOKENS = (1, 4, 16, 32, 64, 128, 256)
BARS = {1: 6.0, 16: 8.0, 64: 10.0, 256: 15.0}


def inputs(tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random arguments on the GPU."""
    return reference.random_arguments(tokens, torch.Generator("cuda").manual_seed(seed))


def all_torch(call: dict[str, torch.Tensor]) -> Boundary:
    """The boundary with torch's functions."""
    streams = call["post"][..., None] * call["y"][:, None, :]
    streams = (streams + (call["comb"][..., None] * call["residual"][:, :, None, :]).sum(1)).to(torch.bfloat16)
    flat = streams.flatten(1).float()
    mixes = torch.nn.functional.linear(flat, call["fn"].float())
    mixes = mixes * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
    scale, base = call["scale"], call["base"]
    pre = torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + 1e-6
    post = 2 * torch.sigmoid(mixes[:, 4:8] * scale[1] + base[4:8])
    comb = (mixes[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4).softmax(-1) + 1e-6
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
    x = (pre[..., None] * streams.float()).sum(1)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * call["norm_weight"].float()
    return Boundary(streams, post, comb, x.to(torch.bfloat16))


def least_bytes(tokens: int) -> int:
    """Streams read and written once, block output read, input written, mixing matrix read."""
    return tokens * HIDDEN * 2 * (4 + 4 + 1 + 1) + 24 * 4 * HIDDEN * 2


def ours(call: dict[str, torch.Tensor], chosen: Plan | None = None) -> Callable[[], object]:
    out = Boundary.empty(call["y"].shape[0], "cuda")
    return lambda: mhc_post_pre_norm(**call, out=out, chosen=chosen)


def rows() -> list[timing.Row]:
    found: list[timing.Row] = []
    for tokens in TOKENS:
        sets = [inputs(tokens, seed) for seed in range(timing.INPUT_SETS)]
        expected = reference.mhc_post_pre_norm(**sets[0])
        error = [
            float((mine.double() - other).norm() / other.norm())
            for mine, other in zip(mhc_post_pre_norm(**sets[0]), expected, strict=True)
        ]
        bar = f"bar {BARS[tokens]:.0f} µs; " if tokens in BARS else ""
        note = bar + "error " + " ".join(f"{n} {e:.1e}" for n, e in zip(Boundary._fields, error, strict=True))
        counted = {"bytes": least_bytes(tokens), "flops": 2.0 * tokens * 24 * 4 * HIDDEN}
        found.append(timing.measure(OP, {"T": tokens}, "ours", [ours(s) for s in sets], note=note, **counted))
        if tokens in BARS:
            calls = [lambda s=s: all_torch(s) for s in sets]
            found.append(timing.measure(OP, {"T": tokens}, "torch", calls, **counted))
        print(found[-1].shape, [(r.implementation, r.timing, r.note) for r in found[-2:]], file=sys.stderr, flush=True)
    return found


def sweep() -> None:
    """Print the time of every cut, best first."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    for tokens in (1, 16, 64, 256):
        sets = [inputs(tokens, seed) for seed in range(timing.INPUT_SETS)]
        found: list[tuple[float, Plan]] = []
        for block, (columns, warps), steps in itertools.product((16, 32), ((32, 4), (64, 8)), (1, 2, 4, 8)):
            programs = HIDDEN // (columns * steps) * -(-tokens // block)
            if programs < 32 or programs > 1100 or (block == 32 and tokens < 32):
                continue
            cut = Plan(block, columns, steps, warps)
            try:
                time = timing.time_calls([ours(s, cut) for s in sets], replays=6).microseconds
            except Exception as error:  # a cut may not compile; the others must still come out
                print(cut, type(error).__name__, str(error)[:100])
                continue
            found.append((time, cut))
        print(f"T={tokens}, plan {plan(tokens, sms)}")
        for time, cut in sorted(found, key=lambda entry: entry[0]):
            print(f"  {time:7.2f} µs  {cut}", flush=True)


def main() -> None:
    parser = timing.arguments("Time the mHC boundary.")
    parser.add_argument("--sweep", action="store_true", help="time every cut of the first launch instead")
    options = parser.parse_args()
    if options.sweep:
        sweep()
        return
    report = timing.Report(timing.Machine.measure(), f"python -m benchmarks.{OP}", rows())

    def plots(folder: Path) -> None:
        timing.plot_times(report, OP, "T", folder / f"{OP}.svg")

    timing.publish(report, OP, options, plots)


if __name__ == "__main__":
    main()
