"""Where a GPU's memory goes, before anything is started. Computed from shapes and layouts, not measured."""

from dataclasses import dataclass
from math import ceil

from sm120_kernels.kv_layout import HEAD_DIM, TOKEN_BYTES
from sm120_kernels.shapes import INDEX_BYTES, INDEX_DIM, LAYERS, RATIOS, WINDOW, Rank

from deploy.spec.model import Spec, Variant

C4_LAYERS, C128_LAYERS = RATIOS.count(4), RATIOS.count(128)
PAGE, STATE_BYTES = 256, 4
"""Compressor state is float32 (SGLANG_DSV4_COMPRESS_STATE_DTYPE)."""
EVICTION_INTERVAL = 128
"""SGLANG_SWA_EVICTION_INTERVAL: a request may hold so many tokens beyond its window, for each draft token."""
CACHED_TAILS = 4
"""Windows of ended requests that stay addressable, for each running request."""

ASSUMED_MIB = 97887
"""RTX PRO 6000 Blackwell, as nvidia-smi shows it."""
REQUESTS, CHUNK = 64, 8192
"""Defaults of MAX_RUNNING_REQUESTS and CHUNKED_PREFILL_SIZE in the compose files."""
DSPARK_TOKENS = 8
"""A block of 7 and the token it starts from, unless its checkpoint says otherwise."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one GPU. Every rank holds the whole KV cache: the model has one KV head.

    Attributes:
        total: memory of the GPU.
        weights: this rank's share of the weights, the draft layer's included.
        windows: sliding windows and compressor states, which depend on the number of requests and not on their length.
        kv_cache: what remains of the static share for the compressed KV cache; negative if it does not suffice.
        rest: activations, CUDA graphs, workspace and everything else outside the static share.
        tokens: context tokens that the KV cache holds, of all requests together.
    """

    total: int
    weights: int
    windows: int
    kv_cache: int
    rest: int
    tokens: int

    @property
    def fits(self) -> bool:
        """Whether weights, windows and at least one token fit."""
        return self.tokens > 0

    def __str__(self) -> str:
        total, weights, windows, cache, rest = (
            f"{size / 1024**3:.1f}" for size in (self.total, self.weights, self.windows, self.kv_cache, self.rest)
        )
        return (
            f"of {total} GiB a GPU {weights} hold weights, {windows} sliding windows, {cache} the KV cache of at most "
            f"{self.tokens / 1e6:.2f} million tokens, {rest} activations, CUDA graphs and workspace (computed)"
        )


def weight_bytes(variant: Variant) -> int:
    """Bytes of the weights that are loaded: the decoder layers, embedding and head in bfloat16.

    With the MTP layer, whose experts are MXFP4 in both checkpoints, this is within 1 % of what is published: 160 GB for
    deepseek-ai/DeepSeek-V4-Flash, 168 GB for nvidia/DeepSeek-V4-Flash-NVFP4.
    """
    return int(Rank(1, variant).weight_bytes())


def draft_bytes() -> int:
    """Bytes of the MTP layer, which is loaded for EAGLE only; DSpark's draft is taken to be as large.

    It is taken to be a decoder layer of the average size.
    """
    whole = Rank(1)
    return int((whole.weight_bytes() - whole.embedding_bytes()) / LAYERS)


def bytes_per_token() -> float:
    """Compressed KV bytes that one token of context takes on each rank, over all layers."""
    return C4_LAYERS * (TOKEN_BYTES + INDEX_BYTES) / 4 + C128_LAYERS * TOKEN_BYTES / 128


def window_bytes(requests: int, chunk: int, draft_tokens: int) -> int:
    """Bytes of the pools that SGLang sizes by the number of requests (`DSV4PoolConfigurator`, cap mode).

    Args:
        requests: running at most.
        chunk: tokens of a prompt computed at once.
        draft_tokens: verified at once; 0 without speculation.
    """
    ring_4, ring_128 = (16, 256) if draft_tokens else (8, 128)
    step = 2 * draft_tokens if draft_tokens else PAGE
    request = WINDOW + EVICTION_INTERVAL * max(draft_tokens, 1) + PAGE + step
    tokens = request * requests + 2 * chunk + PAGE + CACHED_TAILS * requests * (WINDOW + PAGE)
    tokens = ceil(tokens / PAGE) * PAGE
    state = ring_4 / PAGE * 4 * (HEAD_DIM + INDEX_DIM) * STATE_BYTES
    windows = tokens * (LAYERS * TOKEN_BYTES + C4_LAYERS * state)
    states = ((requests + 2) * ring_128 + 1) * 2 * HEAD_DIM * STATE_BYTES * C128_LAYERS
    return int(windows * _inflation(draft_tokens) + states)


def _inflation(draft_tokens: int) -> float:
    """What SGLang adds for the draft worker's layer."""
    return (LAYERS + 1) / LAYERS if draft_tokens else 1.0


def plan_memory(memory_mib: int, spec: Spec, ranks: int | None = None) -> MemoryPlan:
    """Divide the memory of one GPU.

    Args:
        memory_mib: of the smallest GPU of the engine.
        spec: what is to run.
        ranks: GPUs that share the weights; those of the spec's engines if None.
    """
    engine = spec.engine
    draft = {"none": 0, "eagle": engine.speculation_steps + 1, "dspark": DSPARK_TOKENS}[engine.speculation]
    loaded = weight_bytes(spec.model.variant) + (draft_bytes() if draft else 0)
    weights = loaded // (ranks or spec.gpus_per_engine)
    requests, chunk = limits(spec)
    windows = window_bytes(requests, chunk, draft)
    total = memory_mib * 1024**2
    static = int(total * engine.memory_fraction)
    kv_cache = static - weights - windows
    tokens = max(0, int(kv_cache / (bytes_per_token() * _inflation(draft))))
    return MemoryPlan(total, weights, windows, kv_cache, total - static, tokens)


def limits(spec: Spec) -> tuple[int, int]:
    """Running requests and chunk size, the defaults of the compose files where the spec does not say."""
    if spec.profile == "pd":
        return spec.decode.max_running_requests, spec.prefill.chunked_prefill_size
    values = (spec.variables.get("MAX_RUNNING_REQUESTS", REQUESTS), spec.variables.get("CHUNKED_PREFILL_SIZE", CHUNK))
    try:
        requests, chunk = map(int, values)
    except ValueError:
        # SGLang refuses them itself.
        return REQUESTS, CHUNK
    return requests, chunk


def least_fraction(plan: MemoryPlan, tokens: int) -> float:
    """The `memory_fraction`, in hundredths, with which so many context tokens would fit beside the rest."""
    return ceil(100 * (plan.weights + plan.windows + tokens * bytes_per_token()) / plan.total) / 100
