"""The roofline of one pass: bytes, FLOPs, all-reduces and launches, each turned into seconds. Pure.

Everything it returns is a prediction. `assumptions` says in words what it rests on.
"""

from dataclasses import dataclass
from typing import Literal

from sm120_kernels.gpus import Gpu
from sm120_kernels.shapes import (
    HIDDEN,
    LAYERS,
    RATIOS,
    Cost,
    Rank,
    Variant,
    Work,
    distinct_experts,
    layers_of_kind,
)

Kernels = Literal["sglang", "sm120"]
AllReduce = Literal["nccl", "ipc"]
Speculation = Literal["none", "eagle", "dspark"]

LAUNCHES: dict[Kernels, dict[str, int]] = {
    "sglang": {"C4": 65, "C128": 53, "window": 49},
    "sm120": {"C4": 20, "C128": 18, "window": 17},
}
"""Launches a layer. sglang: estimate from the source of SGLang 0.5.23. sm120: counted on an H200 by
`benchmarks.decode_step`, where every op is this package's, from three requests on (one fewer below); a server replaces
only some of them."""
FP8_PRODUCTS = ("linear", "experts", "indexer")
SMALL_BYTES = 12288
NCCL_SMALL, IPC_SMALL, SMALL_GPUS = 205e-6, 5.3e-6, 8
"""All-reduce of 12 KiB on 8 GPUs over PCIe, by SGLang 0.5.23's docstring of its PCIe IPC all-reduce."""
BYTES_PER_VALUE = 2
REDUCES_PER_LAYER = 2
DRAFT_PASSES = {"none": 0, "eagle": 3, "dspark": 1}
VERIFIED = {"none": 1, "eagle": 4, "dspark": 8}
"""Tokens of a request that one pass verifies, the one that follows from the last pass included."""


@dataclass(frozen=True)
class Setting:
    """What runs on what.

    Attributes:
        gpu: each of them.
        ranks: GPUs of one engine.
        engines: that decode, each with an equal share of the requests.
        all_reduce: "nccl", or SGLang's over PCIe without NCCL ("ipc") for small messages.
        accepted: tokens a request gets from a pass, on average; 1 without speculation.
    """

    gpu: Gpu
    ranks: int = 4
    engines: int = 1
    variant: Variant = "mxfp4"
    kernels: Kernels = "sglang"
    all_reduce: AllReduce = "nccl"
    speculation: Speculation = "none"
    accepted: float = 1.0


@dataclass(frozen=True)
class Part:
    """One part of a pass.

    Attributes:
        name: a category of `Rank.step`, "draft", "all-reduce" or "launches".
        seconds: at the least, alone.
        bound: what takes them: "bytes", "FLOPs", "link" or "launches".
    """

    name: str
    seconds: float
    bound: str
    bytes: float = 0.0
    flops: float = 0.0
    count: int = 0


@dataclass(frozen=True)
class Pass:
    """One pass through an engine. `roofline` is memory and products alone, which nothing can be faster than.

    `seconds` adds all-reduces and launches one after the other, as a CUDA graph on one stream runs them.
    """

    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def roofline(self) -> float:
        return sum(part.seconds for part in self.parts if part.bound in ("bytes", "FLOPs"))

    def seconds_of(self, name: str) -> float:
        """Of the parts of that name; 0 if there is none."""
        return sum(part.seconds for part in self.parts if part.name == name)


@dataclass(frozen=True)
class Ceiling:
    """What `users` requests in flight can get at most, over all engines; `step` is that of the fullest engine."""

    users: int
    context: int
    step: Pass
    tokens_per_second: float
    roofline_tokens_per_second: float


def all_reduce_seconds(message: float, setting: Setting) -> float:
    """Of one all-reduce over the GPUs of an engine.

    NCCL: a ring, 2 (n - 1) hops of the same latency, 2 (n - 1) / n of the message over the link. IPC: each GPU reads
    the others' message at once. The latencies are those that give the two published times. Larger messages take
    whichever is faster.

    Args:
        message: bytes of one GPU's part.
    """
    n, link = setting.ranks, setting.gpu.link_bytes_per_second
    if n == 1:
        return 0.0
    hop = (NCCL_SMALL - 2 * (SMALL_GPUS - 1) / SMALL_GPUS * SMALL_BYTES / link) / (2 * (SMALL_GPUS - 1))
    ring = 2 * (n - 1) * hop + 2 * (n - 1) / n * message / link
    if setting.all_reduce == "nccl":
        return ring
    start = IPC_SMALL - (SMALL_GPUS - 1) * SMALL_BYTES / link
    return min(ring, max(0.0, start) + (n - 1) * message / link)


def one_pass(work: Work, setting: Setting, requests: int = 1) -> Pass:
    """Predict one pass of one engine.

    Args:
        work: of the pass.
        requests: whose next tokens are drafted, with speculation.
    """
    hit = [distinct_experts(work.tokens)] * LAYERS
    rank = Rank(setting.ranks, setting.variant)
    parts = [_part(name, cost, setting.gpu) for name, cost in rank.step(work, hit).items()]
    launches = sum(LAUNCHES[setting.kernels][kind] * count for kind, count in layers_of_kind().items())
    reduces = REDUCES_PER_LAYER * LAYERS + 1
    drafts = DRAFT_PASSES[setting.speculation]
    if drafts:
        each = VERIFIED[setting.speculation] - 1 if drafts == 1 else 1
        guess = Work.decode([work.window_read // max(requests, 1)] * requests, each)
        costs = rank.layer(RATIOS[0], guess, distinct_experts(guess.tokens))
        head = rank.step(guess, [])["head"]
        whole = sum((*costs.values(), head), Cost())
        parts.append(_part("draft", Cost(whole.bytes * drafts, whole.flops * drafts), setting.gpu))
        launches += drafts * LAUNCHES[setting.kernels]["window"]
        reduces += drafts * REDUCES_PER_LAYER
    message = work.tokens * HIDDEN * BYTES_PER_VALUE
    if setting.ranks > 1:
        seconds = reduces * all_reduce_seconds(message, setting)
        parts.append(Part("all-reduce", seconds, "link", bytes=float(reduces * message), count=reduces))
    parts.append(Part("launches", launches * setting.gpu.launch_seconds, "launches", count=launches))
    return Pass(tuple(parts))


def _part(name: str, cost: Cost, gpu: Gpu) -> Part:
    rate = gpu.fp8_flop_per_second if name in FP8_PRODUCTS else gpu.bf16_flop_per_second
    by_bytes, by_flops = cost.bytes / gpu.bandwidth, cost.flops / rate
    bound = "bytes" if by_bytes >= by_flops else "FLOPs"
    return Part(name, max(by_bytes, by_flops), bound, cost.bytes, cost.flops)


def decode_step(requests: int, context: int, setting: Setting) -> Pass:
    """A decode step of one engine with `requests` requests of `context` tokens each."""
    return one_pass(Work.decode([context] * requests, VERIFIED[setting.speculation]), setting, requests)


def shares(users: int, engines: int) -> list[int]:
    """Requests of each engine, as even as can be; the largest first."""
    return [users // engines + (i < users % engines) for i in range(engines)]


def ceiling(users: int, context: int, setting: Setting) -> Ceiling:
    """What `users` requests in flight can get. Raises ValueError for fewer than one."""
    if users < 1 or context < 1:
        raise ValueError("at least one request of at least one token")
    steps = [(n, decode_step(n, context, setting)) for n in shares(users, setting.engines) if n]
    return Ceiling(
        users,
        context,
        steps[0][1],
        sum(n * setting.accepted / step.seconds for n, step in steps),
        sum(n * setting.accepted / step.roofline for n, step in steps),
    )


def prefill(prompt: int, chunk: int, setting: Setting) -> list[Pass]:
    """The passes that read one prompt, chunk by chunk."""
    starts = range(0, prompt, chunk)
    plain = Setting(setting.gpu, setting.ranks, 1, setting.variant, setting.kernels, setting.all_reduce)
    return [one_pass(Work.prefill(min(chunk, prompt - start), start), plain) for start in starts]


def step_budget(throughput: float, users: int, accepted: float = 1.0) -> float:
    """Seconds that a step may take for `throughput` tokens a second with `users` in flight."""
    return users * accepted / throughput


def assumptions(setting: Setting) -> list[str]:
    """What every figure of a setting rests on, a sentence each."""
    gpu = setting.gpu
    said = [
        f"{gpu.name}: {gpu.bytes_per_second / 1e12:.2f} TB/s by the datasheet, {gpu.reached:.0%} of it reached "
        "(as an H200 reaches of its own)",
        f"products at {gpu.bf16_flop_per_second / 1e12:.0f} (bf16) and {gpu.fp8_flop_per_second / 1e12:.0f} (FP8) "
        "TFLOP/s; only products count, not activations",
        "each token takes any 6 of 256 experts equally likely and independently; real routing and tokens that resemble "
        "each other hit fewer",
        f"{gpu.launch_seconds * 1e6:.1f} us a launch (an empty kernel in a CUDA graph on an H200), launches a layer "
        + ("estimated from SGLang's source" if setting.kernels == "sglang" else "counted in benchmarks.decode_step"),
        "kernels, all-reduces and launches follow one another; nothing overlaps, nothing idles between steps",
    ]
    if setting.ranks > 1:
        way = {
            "nccl": "NCCL rings with the latency that gives 205 us for 12 KiB on 8 GPUs",
            "ipc": "PCIe IPC with the latency that gives 5.3 us for 12 KiB on 8 GPUs",
        }[setting.all_reduce]
        said.append(
            f"all-reduce: {way} (SGLang's docstring), {gpu.link_bytes_per_second / 1e9:.0f} GB/s to another GPU, "
            f"{REDUCES_PER_LAYER * LAYERS + 1} a pass"
        )
    if setting.speculation != "none":
        said.append(
            f"{setting.speculation}: {VERIFIED[setting.speculation]} tokens of a request verified at once, "
            f"{setting.accepted:g} kept on average; the draft is {DRAFT_PASSES[setting.speculation]} passes of one "
            "layer and the head"
        )
    return said
