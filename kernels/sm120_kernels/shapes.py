"""Shapes of DeepSeek-V4-Flash, and what its layers must read and compute at the least.

Plain arithmetic that imports neither torch nor SGLang: the controller plans with it, the benchmarks hold their times
against it, and `tests/kernels/test_decode_step.py` holds it against tensors of the real sizes.

Source of the shapes: SGLang 0.5.23, `srt/configs/deepseek_v4.py` and `srt/models/deepseek_v4.py`; of the layers'
compression ratios: the published config.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sm120_kernels.kv_layout import HEAD_DIM, TOKEN_BYTES

LAYERS, HIDDEN, VOCABULARY = 43, 4096, 129280
HEADS, Q_LORA, O_LORA, O_GROUPS = 64, 1024, 1024, 8
INDEX_HEADS, INDEX_DIM, INDEX_TOP = 64, 128, 512
INDEX_BYTES = INDEX_DIM + 4
"""One FP8 indexer key with its fp32 scale (`kernels/ops/attention/dsv4/kv_layout.py`)."""
EXPERTS, TOP_EXPERTS, EXPERT_INNER = 256, 6, 2048
WINDOW = 128
STREAMS, MIXES = 4, 24
"""Hyper-connections: streams, and outputs of the linear before each of a layer's two blocks."""
RATIOS = (0, 0, *(4 if i % 2 == 0 else 128 for i in range(LAYERS - 2)))
"""Tokens that become one compressed token, layer by layer; 0: the layer attends to its window only."""
KINDS = {"C4": 4, "C128": 128, "window": 0}
SCALE_BLOCK = 128
"""FP8 weights have one fp32 scale for each block of 128 x 128."""

Variant = Literal["mxfp4", "nvfp4"]
EXPERT_BYTES: dict[Variant, float] = {"mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Of one parameter: four bits, and a byte of scale for 32 or 16 of them."""
Category = Literal["attention", "indexer", "linear", "experts", "mHC", "head"]


@dataclass(frozen=True)
class Work:
    """What one pass through the layers has to do.

    A decode step is one token of each request. `attended` and `scored` count pairs of a token and what it looks at,
    which decides the FLOPs; the bytes follow from `..._read`, which counts each cache entry once.

    Attributes:
        tokens: computed in this pass.
        outputs: of them, how many need the vocabulary's logits.
        window: pairs of a token and a key in its sliding window.
        compressed: by ratio (4 or 128), pairs of a token and a compressed key that it attends to.
        scored: pairs of a token and an indexer key.
        window_read, compressed_read, scored_read: the same, each cache entry counted once for all tokens of a request.
    """

    tokens: int
    outputs: int
    window: int
    compressed: dict[int, int]
    scored: int
    window_read: int
    compressed_read: dict[int, int]
    scored_read: int

    @staticmethod
    def decode(contexts: Sequence[int], new: int = 1) -> Work:
        """A decode step.

        Args:
            contexts: of each request, its tokens with the (last) new one.
            new: tokens a request computes at once: 1, or the draft's and one more with speculation.
        """
        window = sum(min(n, WINDOW) for n in contexts)
        selected = sum(min(n // 4, INDEX_TOP) for n in contexts)
        pooled = sum(n // 128 for n in contexts)
        # Requests that take all their tokens anyway need no scores.
        scored = sum(n // 4 for n in contexts if n // 4 > INDEX_TOP)
        # The rows of one request look at nearly the same keys.
        return Work(
            tokens=len(contexts) * new,
            outputs=len(contexts) * new,
            window=window * new,
            compressed={4: selected * new, 128: pooled * new},
            scored=scored * new,
            window_read=window,
            compressed_read={4: selected, 128: pooled},
            scored_read=scored,
        )

    @staticmethod
    def prefill(chunk: int, before: int = 0) -> Work:
        """A chunk of one prompt.

        Args:
            chunk: tokens computed at once.
            before: tokens of the prompt that are in the cache already.
        """
        end = before + chunk
        places = range(before + 1, end + 1)
        return Work(
            tokens=chunk,
            outputs=1,
            window=sum(min(n, WINDOW) for n in places),
            compressed={
                4: sum(min(n // 4, INDEX_TOP) for n in places),
                128: sum(n // 128 for n in places),
            },
            scored=sum(n // 4 for n in places if n // 4 > INDEX_TOP),
            window_read=min(end, chunk + WINDOW),
            # Together the tokens select everything, at most.
            compressed_read={4: end // 4, 128: end // 128},
            scored_read=end // 4 if end // 4 > INDEX_TOP else 0,
        )


@dataclass(frozen=True)
class Cost:
    """Bytes that must be read, and multiplications and additions of the products."""

    bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Rank:
    """One of `ranks` GPUs that share the weights; each has the whole KV cache, for the model has one KV head."""

    ranks: int
    variant: Variant = "mxfp4"

    def fp8_products(self, ratio: int) -> dict[str, tuple[int, int]]:
        """Rows and columns of each dense FP8 weight of a layer; the shared expert's are in `shared_products`."""
        heads, groups = HEADS // self.ranks, O_GROUPS // self.ranks
        return {
            "wqkv": (Q_LORA + HEAD_DIM, HIDDEN),
            "wq_b": (heads * HEAD_DIM + (INDEX_HEADS * INDEX_DIM if ratio == 4 else 0), Q_LORA),
            "wo_a": (groups * O_LORA, heads // groups * HEAD_DIM),
            "wo_b": (HIDDEN, groups * O_LORA),
        }

    def bf16_products(self, ratio: int) -> dict[str, tuple[int, int]]:
        """Rows and columns of each dense bf16 weight of a layer: the gate, and what compresses keys."""
        outputs = {0: 0, 4: 4 * HEAD_DIM + 4 * INDEX_DIM + INDEX_HEADS, 128: 2 * HEAD_DIM}[ratio]
        return {"gate": (EXPERTS, HIDDEN)} | ({"projection": (outputs, HIDDEN)} if outputs else {})

    def shared_products(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of the shared expert's FP8 weights."""
        inner = EXPERT_INNER // self.ranks
        return {"w13": (2 * inner, HIDDEN), "w2": (HIDDEN, inner)}

    def expert_parameters(self) -> int:
        """Of one routed expert on this rank."""
        return 3 * HIDDEN * EXPERT_INNER // self.ranks

    def layer(self, ratio: int, work: Work, hit: float) -> dict[Category, Cost]:
        """What one layer costs, by category.

        Args:
            ratio: 0, 4 or 128, see `RATIOS`.
            work: of the pass.
            hit: distinct routed experts that its tokens choose.
        """
        fp8, bf16, shared = self.fp8_products(ratio), self.bf16_products(ratio), self.shared_products()
        dense = _elements(fp8) + _elements(bf16)
        vectors = 2 * HIDDEN + Q_LORA + HEAD_DIM
        positions = {0: 0, 4: 8 * (HEAD_DIM + INDEX_DIM), 128: 128 * HEAD_DIM}[ratio]
        linear = _fp8_bytes(fp8) + 2 * _elements(bf16) + 2 * vectors + 4 * positions
        routed = self.expert_parameters()
        streams = 2 * MIXES * STREAMS * HIDDEN
        pairs, read = work.window, work.window_read
        if ratio:
            pairs, read = pairs + work.compressed[ratio], read + work.compressed_read[ratio]
        scored, scored_read = (work.scored, work.scored_read) if ratio == 4 else (0, 0)
        return {
            # Scores over 512 values and a weighted sum of 512, for each head of this rank.
            "attention": Cost(read * TOKEN_BYTES, 2.0 * pairs * HEADS // self.ranks * 2 * HEAD_DIM),
            "indexer": Cost(scored_read * INDEX_BYTES, 2.0 * scored * INDEX_HEADS * INDEX_DIM),
            "linear": Cost(linear, 2.0 * work.tokens * dense),
            "experts": Cost(
                _fp8_bytes(shared) + hit * routed * EXPERT_BYTES[self.variant],
                2.0 * work.tokens * (_elements(shared) + TOP_EXPERTS * routed),
            ),
            "mHC": Cost(2 * streams, 2.0 * work.tokens * streams),
        }

    def step(self, work: Work, hit: Sequence[float], head: bool = True) -> dict[Category, Cost]:
        """What a pass through the first `len(hit)` layers costs, by category.

        Args:
            work: of the pass.
            hit: distinct routed experts, layer by layer.
            head: also the product with the vocabulary, bf16.
        """
        found: dict[Category, Cost] = {}
        for ratio, experts in zip(RATIOS, hit, strict=False):
            for name, cost in self.layer(ratio, work, experts).items():
                found[name] = found.get(name, Cost()) + cost
        if head:
            elements = VOCABULARY * HIDDEN / self.ranks
            found["head"] = Cost(2.0 * elements, 2.0 * work.outputs * elements)
        return found

    def weight_bytes(self) -> float:
        """Bytes of all weights that this rank holds: `LAYERS` layers, head, and an embedding of the head's size."""
        nothing = Work(0, 0, 0, {4: 0, 128: 0}, 0, 0, {4: 0, 128: 0}, 0)
        found = self.step(nothing, [EXPERTS] * LAYERS)
        return sum(cost.bytes for cost in found.values()) + self.embedding_bytes() / 2

    def embedding_bytes(self) -> float:
        """Bytes of the embedding and the head together, bf16."""
        return 2 * 2.0 * VOCABULARY * HIDDEN / self.ranks


def distinct_experts(tokens: int) -> float:
    """Expected number of routed experts that `tokens` tokens choose: exact if each takes any 6 of 256 equally likely.

    An expert is missed by one token with probability 1 - 6/256, by all with the power of that.
    """
    return EXPERTS * (1.0 - (1.0 - TOP_EXPERTS / EXPERTS) ** tokens)


def layers_of_kind() -> dict[str, int]:
    """How many layers of each kind there are."""
    counts = Counter(RATIOS)
    return {name: counts[ratio] for name, ratio in KINDS.items()}


def _elements(products: dict[str, tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in products.values())


def _fp8_bytes(products: dict[str, tuple[int, int]]) -> int:
    return sum(
        rows * columns + 4 * -(-rows // SCALE_BLOCK) * -(-columns // SCALE_BLOCK) for rows, columns in products.values()
    )
