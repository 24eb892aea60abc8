"""Where a GPU's memory goes, before anything is started. An estimate from the published layout, not a measurement."""

from dataclasses import dataclass

WEIGHT_BYTES = 160 * 10**9
"""All weights of DeepSeek-V4-Flash as published (FP4 experts), about; each rank holds its share."""
TOKEN_BYTES = 584
"""One compressed KV entry: 576 B of data, 8 B of scales (SGLang 0.5.23, kernels/ops/attention/dsv4/kv_layout.py)."""
INDEX_BYTES = 132
"""One FP8 indexer key with its scale (same file)."""
FOLDS = ((21, 4, TOKEN_BYTES + INDEX_BYTES), (20, 128, TOKEN_BYTES))
"""(layers, tokens an entry stands for, bytes of an entry): 21 C4 layers with indexer, 20 C128 layers."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one GPU. Every rank holds the whole KV cache: the model has one KV head.

    Attributes:
        total: memory of the GPU.
        weights: this rank's share of the weights.
        kv_cache: what remains of the static share for the KV cache; negative if the weights do not fit.
        rest: activations, CUDA graphs and everything else outside the static share.
        tokens: context tokens that the KV cache holds, without the sliding windows' small part.
    """

    total: int
    weights: int
    kv_cache: int
    rest: int
    tokens: int

    @property
    def fits(self) -> bool:
        """Whether weights and at least one token fit."""
        return self.tokens > 0


def bytes_per_token() -> float:
    """KV cache bytes that one token of context takes on each rank, over all layers."""
    return sum(layers * size / fold for layers, fold, size in FOLDS)


def plan_memory(memory_mib: int, memory_fraction: float, ranks: int) -> MemoryPlan:
    """Divide a GPU's memory.

    Args:
        memory_mib: of the smallest GPU of the role.
        memory_fraction: share for weights and KV cache (`--mem-fraction-static`).
        ranks: GPUs that share the weights.
    """
    total = memory_mib * 1024**2
    static = int(total * memory_fraction)
    weights = WEIGHT_BYTES // ranks
    kv_cache = static - weights
    return MemoryPlan(total, weights, kv_cache, total - static, max(0, int(kv_cache / bytes_per_token())))
