"""One rank's decoder layers with random weights of the real sizes, and three ways to run them: ours, torch, float64.

A layer is what lies between two all-reduces of SGLang 0.5.23's `deepseek_v4.py`, twice: attention and experts, each
after an mHC boundary. Both ways are lists of (category, call) that work on a `Step`'s tensors, so that a benchmark can
capture all of them or one category.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sm120_kernels import kv_layout, shapes
from sm120_kernels.kv_layout import HEAD_DIM
from sm120_kernels.ops.bf16_linear_partials import bf16_linear_partials
from sm120_kernels.ops.fp8_block_linear import fp8_block_linear
from sm120_kernels.ops.indexer_logits import PAGE_BYTES as INDEX_PAGE_BYTES
from sm120_kernels.ops.indexer_logits import PAGE_TOKENS, indexer_logits
from sm120_kernels.ops.inv_rope_wo_a import inv_rope_wo_a
from sm120_kernels.ops.mhc_post_pre_norm import mhc_post_pre_norm
from sm120_kernels.ops.moe_fp4_small_batch import SWIGLU_LIMIT, moe_fp4_small_batch
from sm120_kernels.ops.prepare_queries import Queries
from sm120_kernels.ops.route_experts import route_experts
from sm120_kernels.ops.sparse_mla_decode import sparse_mla_decode
from sm120_kernels.ops.store_attention_inputs import Compressor, store_attention_inputs
from sm120_kernels.ops.topk_indices import TOPK, Workspace, topk_indices
from sm120_kernels.reference import fp8_block_linear as linear_reference
from sm120_kernels.reference import indexer_logits as indexer_reference
from sm120_kernels.reference import mhc_post_pre_norm as mhc_reference
from sm120_kernels.reference import moe_fp4_small_batch as moe_reference
from sm120_kernels.reference import prepare_queries as queries_reference
from sm120_kernels.reference import route_experts as route_reference
from sm120_kernels.reference import sparse_mla_decode as mla_reference
from sm120_kernels.reference import store_attention_inputs as store_reference
from sm120_kernels.reference import topk_indices as topk_reference
from sm120_kernels.reference.inv_rope_wo_a import inverse_rope, rope_table
from sm120_kernels.reference.rotation import hadamard
from sm120_kernels.shapes import (
    EXPERTS,
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    LAYERS,
    O_LORA,
    Q_LORA,
    TOP_EXPERTS,
    WINDOW,
)

RANKS = 4
RANK = shapes.Rank(RANKS)
HEADS, O_GROUPS = shapes.HEADS // RANKS, shapes.O_GROUPS // RANKS
INTERMEDIATE = shapes.EXPERT_INNER // RANKS
WINDOW_PAGE = 256
COMPRESSED_PAGE = {4: 64, 128: 2}
CATEGORIES = ("attention", "indexer", "linear", "experts", "mHC", "glue")
Calls = list[tuple[str, Callable[[], object]]]


@dataclasses.dataclass(frozen=True)
class Weights:
    """A layer's weights, those of one of four tensor-parallel ranks. `dense` has, by name, e4m3 weights and scales."""

    ratio: int
    fn: list[torch.Tensor]
    scale: list[torch.Tensor]
    base: list[torch.Tensor]
    norm: list[torch.Tensor]
    dense: dict[str, tuple[torch.Tensor, torch.Tensor]]
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    sink: torch.Tensor
    projection: torch.Tensor | None
    ape: list[torch.Tensor]
    pooled_norm: list[torch.Tensor]
    gate: torch.Tensor
    gate_bias: torch.Tensor
    experts: dict[str, Any]

    @staticmethod
    def random(ratio: int, generator: torch.Generator) -> Weights:
        """Outputs of order 1 for inputs of order 1; on the generator's device."""
        device = generator.device

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        def near_one(size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return (1 + 0.2 * normal(size)).to(dtype)

        outputs = RANK.bf16_products(ratio).get("projection", (0, HIDDEN))[0]
        dims = {0: [], 4: [HEAD_DIM, INDEX_DIM], 128: [HEAD_DIM]}[ratio]
        mixes = mhc_reference.MIXES
        return Weights(
            ratio=ratio,
            fn=[(normal(mixes, 4 * HIDDEN) / (4 * HIDDEN) ** 0.5).to(torch.bfloat16) for _ in range(2)],
            scale=[1 + 0.3 * normal(3) for _ in range(2)],
            base=[normal(mixes) for _ in range(2)],
            norm=[near_one(HIDDEN) for _ in range(2)],
            dense={
                name: linear_reference.random_weight(*shape, generator=generator)
                for name, shape in RANK.fp8_products(ratio).items()
            },
            q_norm=near_one(Q_LORA),
            kv_norm=near_one(HEAD_DIM),
            sink=normal(HEADS),
            projection=(normal(outputs, HIDDEN) / HIDDEN**0.5).to(torch.bfloat16) if outputs else None,
            ape=[normal(8 if ratio == 4 else 128, dim) for dim in dims],
            pooled_norm=[near_one(dim, torch.float32) for dim in dims],
            gate=(normal(EXPERTS, HIDDEN) / HIDDEN**0.5).to(torch.bfloat16),
            gate_bias=0.1 * normal(EXPERTS),
            experts=moe_reference.random_experts(EXPERTS, HIDDEN, INTERMEDIATE, generator),
        )


@dataclasses.dataclass(frozen=True)
class Requests:
    """The requests of a step and what all layers share. Request i has context - i tokens, this step's token included.

    Attributes:
        lengths: [requests] int32.
        positions: [requests] int32 of the new tokens.
        window_slots: [requests] int32, where the new token's key goes.
        window_indices, window_lengths: the window's slots, [requests, 128] int32, and how many of them count.
        compressed: by ratio, how many compressed tokens a request has, [requests] int32.
        tables: by ratio, its pages, [requests, pages] int32.
        indices: of ratio 128, the slots of all compressed tokens, [requests, width] int32.
        selected: of ratio 4, how many tokens attention takes: at most 512.
        slots: by ratio, where the group that the new token may end goes, [requests] int32.
        plans: by ratio, [requests, 4] int32, see `Compressor`.
        rope: [positions, 64] float32.
    """

    context: int
    lengths: torch.Tensor
    positions: torch.Tensor
    window_slots: torch.Tensor
    window_indices: torch.Tensor
    window_lengths: torch.Tensor
    compressed: dict[int, torch.Tensor]
    tables: dict[int, torch.Tensor]
    indices: torch.Tensor
    selected: torch.Tensor
    slots: dict[int, torch.Tensor]
    plans: dict[int, torch.Tensor]
    rope: torch.Tensor

    @staticmethod
    def staggered(count: int, context: int, generator: torch.Generator) -> Requests:
        """`count` requests; pages lie in random order. The first ends a group of 128, every fourth one of 4."""
        device = generator.device
        lengths = context - torch.arange(count, device=device)
        request = torch.arange(count, device=device)
        back = torch.arange(WINDOW, device=device)
        window_lengths = lengths.clamp(max=WINDOW)
        at = (lengths - window_lengths)[:, None] + back
        ring = torch.randperm(count, generator=generator, device=device)[:, None] * WINDOW_PAGE
        window = torch.where(back < window_lengths[:, None], ring + at % WINDOW_PAGE, -1)
        compressed, tables, slots, plans = {}, {}, {}, {}
        for ratio, size in COMPRESSED_PAGE.items():
            compressed[ratio] = (lengths // ratio).int()
            pages = ceil_div(ceil_div(context, ratio), size)
            order = torch.randperm(count * pages, generator=generator, device=device)
            tables[ratio] = order.view(count, pages).int()
            last = (compressed[ratio] - 1).clamp(min=0).long()
            slots[ratio] = (tables[ratio].gather(1, (last // size)[:, None])[:, 0] * size + last % size).int()
            page = request * 2 + (lengths - 1) // ratio % 2
            before = request * 2 + (lengths - 1 - ratio).clamp(min=0) // ratio % 2
            write = request * 2 * ratio + (lengths - 1) % (2 * ratio)
            plans[ratio] = torch.stack([lengths, write, before, page], 1).int()
        size = COMPRESSED_PAGE[128]
        token = torch.arange(ceil_div(context, 128), device=device)
        return Requests(
            context=context,
            lengths=lengths.int(),
            positions=(lengths - 1).int(),
            window_slots=(ring[:, 0] + (lengths - 1) % WINDOW_PAGE).int(),
            window_indices=window.int(),
            window_lengths=window_lengths.int(),
            compressed=compressed,
            tables=tables,
            indices=(tables[128][:, token // size] * size + token % size).int().contiguous(),
            selected=compressed[4].clamp(max=TOPK),
            slots=slots,
            plans=plans,
            rope=rope_table(context + 1, 160000.0, device),
        )

    @property
    def count(self) -> int:
        """Requests, and tokens of a step."""
        return len(self.lengths)

    def work(self) -> shapes.Work:
        """What the step has to do."""
        return shapes.Work.decode(self.lengths.tolist())


def ceil_div(number: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-number // divisor)


def random_paged(slots: int, page: int, generator: torch.Generator) -> torch.Tensor:
    """A cache whose tokens are copies of at most 4096 random ones, page by page."""
    some = mla_reference.random_cache(min(slots, max(4096, page)), page, generator)
    size = kv_layout.page_bytes(page)
    pages = ceil_div(slots, page)
    raw = some.as_strided((some.shape[0], size), (size, 1))
    raw = raw.repeat(ceil_div(pages, len(raw)), 1)[:pages].contiguous()
    return raw.as_strided(
        (pages, page, 1, kv_layout.TOKEN_BYTES), (size, kv_layout.TOKEN_BYTES, kv_layout.TOKEN_BYTES, 1)
    )


@dataclasses.dataclass(frozen=True)
class Caches:
    """A layer's caches and compressors."""

    window: torch.Tensor
    compressed: torch.Tensor | None
    index: torch.Tensor | None
    compressors: list[Compressor]

    @staticmethod
    def random(weights: Weights, requests: Requests, generator: torch.Generator) -> Caches:
        """Caches full of random tokens."""
        ratio, count = weights.ratio, requests.count
        window = random_paged(count * WINDOW_PAGE, WINDOW_PAGE, generator)
        if ratio == 0:
            return Caches(window, None, None, [])
        pages = requests.tables[ratio].numel()
        compressed = random_paged(pages * COMPRESSED_PAGE[ratio], COMPRESSED_PAGE[ratio], generator)
        index = None
        caches = [compressed]
        if ratio == 4:
            some = indexer_reference.random_cache(min(pages, 64), generator)
            index = some.repeat(ceil_div(pages, len(some)), 1)[:pages].contiguous()
            caches.append(index)
        found, first = [], 0
        for ape, norm, cache in zip(weights.ape, weights.pooled_norm, caches, strict=True):
            columns = ape.shape[1] * (4 if ratio == 4 else 2)
            rows = count * 2 * ratio
            state = torch.randn(rows, columns, generator=generator, device=generator.device)
            found.append(
                Compressor(ratio, first, ape, norm, state, requests.plans[ratio], cache, requests.slots[ratio])
            )
            first += columns
        return Caches(window, compressed, index, found)


def first_state(requests: int, generator: torch.Generator) -> SimpleNamespace:
    """What the first layer gets: streams, a last block's output, and the weights of its boundary."""
    given = mhc_reference.random_arguments(requests, generator)
    return SimpleNamespace(**{name: given[name] for name in ("y", "residual", "post", "comb")})


def ours(weights: Weights, caches: Caches, requests: Requests, s: SimpleNamespace) -> Calls:
    """The layer with this package's ops; each call reads and writes attributes of `s`."""
    w, ratio, count = weights, weights.ratio, requests.count
    compressors = dict(zip(("compressor", "index_compressor"), caches.compressors, strict=False))
    head_weights = sum(one.columns for one in caches.compressors)
    shared_width = 0
    if ratio == 4:
        shared_width = requests.tables[4].shape[1] * PAGE_TOKENS
        if not hasattr(s, "workspace"):
            device = requests.lengths.device
            s.workspace = Workspace.allocate(count, shared_width, device)
            s.logits = torch.empty(count, shared_width, device=device)

    def boundary(block: int) -> None:
        s.residual, s.post, s.comb, s.x = mhc_post_pre_norm(
            s.y, s.residual, s.post, s.comb, w.fn[block], w.scale[block], w.base[block], w.norm[block]
        )

    def qkv() -> None:
        s.qkv = fp8_block_linear(s.x, *w.dense["wqkv"])

    def project() -> None:
        assert w.projection is not None
        s.projected = bf16_linear_partials(s.x, w.projection, settled=True)

    def query() -> None:
        # With compressors their projection lies between this kernel and the one that makes its input.
        s.q = fp8_block_linear(
            s.qkv[:, :Q_LORA], *w.dense["wq_b"], norm_weight=w.q_norm, settled=w.projection is not None
        )

    def prepare() -> None:
        indexed = {"projected": s.projected, "first_column": head_weights} if ratio == 4 else {}
        queries = Queries.of(s.q, HEADS, **indexed)
        store_attention_inputs(
            s.qkv[:, Q_LORA:],
            w.kv_norm,
            requests.rope,
            requests.positions,
            caches.window,
            requests.window_slots,
            projected=s.projected if ratio else None,
            queries=queries,
            **compressors,
        )
        s.query, s.index_q, s.index_weights = queries.view, queries.index_q, queries.index_weights

    def score() -> None:
        assert caches.index is not None
        indexer_logits(
            s.index_q[:, None],
            caches.index,
            s.index_weights,
            requests.compressed[4],
            requests.tables[4],
            shared_width,
            out=s.logits,
            skip_length=TOPK,
        )

    def select() -> None:
        s.selected = topk_indices(s.logits, requests.compressed[4], requests.tables[4], workspace=s.workspace)

    def attend() -> None:
        extra = {}
        if ratio:
            extra = {
                "extra_cache": caches.compressed,
                "extra_indices": s.selected if ratio == 4 else requests.indices,
                "extra_lengths": requests.selected if ratio == 4 else requests.compressed[128],
            }
        s.attended, _ = sparse_mla_decode(
            s.query, caches.window, requests.window_indices, requests.window_lengths, sink=w.sink, **extra
        )

    def output_a() -> None:
        weight, scale = w.dense["wo_a"]
        weight = weight.view(O_GROUPS, O_LORA, -1)
        s.low = inv_rope_wo_a(s.attended, requests.positions, requests.rope, weight, scale)

    def output_b() -> None:
        s.y = fp8_block_linear(s.low, *w.dense["wo_b"])

    def gate() -> None:
        s.gates = bf16_linear_partials(s.x, w.gate)

    def route() -> None:
        s.ids, s.expert_weights = route_experts(s.gates, w.gate_bias)

    def experts() -> None:
        s.y = moe_fp4_small_batch(s.x, s.ids, s.expert_weights, **w.experts)

    calls: Calls = [("mHC", lambda: boundary(0)), ("linear", qkv)]
    if ratio:
        calls.append(("linear", project))
    calls += [("linear", query), ("glue", prepare)]
    if ratio == 4:
        calls += [("indexer", score), ("indexer", select)]
    calls += [("attention", attend), ("linear", output_a), ("linear", output_b)]
    return [*calls, ("mHC", lambda: boundary(1)), ("linear", gate), ("glue", route), ("experts", experts)]


@dataclasses.dataclass(frozen=True)
class TorchWeights:
    """What the torch way makes of a layer's weights when it loads them: dense weights in bf16, mHC's in fp32."""

    dense: dict[str, torch.Tensor]
    shared: list[torch.Tensor]
    fn: list[torch.Tensor]

    @staticmethod
    def of(weights: Weights) -> TorchWeights:
        """Convert a layer's weights."""

        def bf16(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            return (weight.float() * wide).to(torch.bfloat16)

        e = weights.experts
        return TorchWeights(
            {name: bf16(*pair) for name, pair in weights.dense.items()},
            [bf16(e[f"shared_{name}"], e[f"shared_{name}_scale"]) for name in ("w13", "w2")],
            [fn.float() for fn in weights.fn],
        )


@functools.cache
def constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The values of the FP4 codes, and the Hadamard matrix divided by the square root of its size."""
    codes = torch.tensor(moe_reference.E2M1, dtype=torch.bfloat16, device=device)
    return codes, hadamard(torch.eye(INDEX_DIM, device=device)).float()


def all_torch(
    weights: Weights, converted: TorchWeights, caches: Caches, requests: Requests, s: SimpleNamespace
) -> Calls:
    """The layer with torch's functions alone, as SGLang's fallbacks write it; of the same shapes for any data."""
    w, ratio = weights, weights.ratio
    functional = torch.nn.functional
    device = requests.lengths.device
    head_weights = sum(one.columns for one in caches.compressors)
    e2m1, matrix = constants(device)

    def rms(x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        x = x.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return x if weight is None else x * weight.float()

    def rotate(x: torch.Tensor, positions: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        table = requests.rope[positions.long()].view(-1, *[1] * (x.ndim - 2), 32, 2)
        cos, sin = table[..., 0], -table[..., 1] if inverse else table[..., 1]
        re, im = x[..., -64:].float().unflatten(-1, (32, 2)).unbind(-1)
        turned = torch.stack([re * cos - im * sin, re * sin + im * cos], -1).flatten(-2)
        return torch.cat([x[..., :-64].float(), turned], -1)

    def boundary(block: int) -> None:
        streams = s.post[..., None] * s.y[:, None, :] + (s.comb[..., None] * s.residual[:, :, None, :]).sum(1)
        s.residual = streams.to(torch.bfloat16)
        flat = s.residual.flatten(1).float()
        mixes = functional.linear(flat, converted.fn[block])
        mixes = mixes * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)
        scale, base = w.scale[block], w.base[block]
        pre = torch.sigmoid(mixes[:, :4] * scale[0] + base[:4]) + 1e-6
        s.post = 2 * torch.sigmoid(mixes[:, 4:8] * scale[1] + base[4:8])
        comb = (mixes[:, 8:] * scale[2] + base[8:]).view(-1, 4, 4).softmax(-1) + 1e-6
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
        for _ in range(19):
            comb = comb / (comb.sum(-1, keepdim=True) + 1e-6)
            comb = comb / (comb.sum(-2, keepdim=True) + 1e-6)
        s.comb = comb
        x = (pre[..., None] * s.residual.float()).sum(1).to(torch.bfloat16)
        s.x = rms(x, w.norm[block]).to(torch.bfloat16)

    def qkv() -> None:
        s.qkv = functional.linear(s.x, converted.dense["wqkv"])
        if w.projection is not None:
            s.projected = functional.linear(s.x, w.projection).float()

    def put(cache: torch.Tensor, slots: torch.Tensor, key: torch.Tensor, wanted: torch.Tensor) -> None:
        page = cache.shape[1]
        size = kv_layout.page_bytes(page)
        raw = cache.as_strided((cache.shape[0] * size,), (1,))
        groups = key[:, :448].unflatten(1, (7, 64))
        exponent = torch.ceil(torch.log2(groups.abs().amax(-1).clamp(min=1e-4) / 448))
        nope = (groups * torch.exp2(-exponent)[..., None]).to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
        rope = key[:, 448:].to(torch.bfloat16).view(torch.uint8)
        data = torch.cat([nope, rope, (exponent + 127).to(torch.uint8)], 1)
        slots = slots.long()[:, None]
        first = slots // page * size
        columns = torch.arange(576, device=device)
        scales = first + page * 576 + slots % page * 8 + torch.arange(7, device=device)
        place = torch.cat([first + slots % page * 576 + columns, scales], 1)
        raw[place] = torch.where(wanted[:, None], data, raw[place])

    def pool(one: Compressor) -> torch.Tensor:
        dim = one.ape.shape[1]
        write, before, page = one.plan[:, 1].long(), one.plan[:, 2].long(), one.plan[:, 3].long()
        one.state[write] = s.projected[:, one.first_column : one.first_column + one.columns]
        groups = one.state.view(-1, ratio, one.columns)
        if ratio == 4:
            old, new = groups[before], groups[page]
            value = torch.cat([old[..., :dim], new[..., dim : 2 * dim]], 1)
            score = torch.cat([old[..., 2 * dim : 3 * dim], new[..., 3 * dim :]], 1)
        else:
            value, score = groups[page].split(dim, -1)
        pooled = (torch.softmax(score + one.ape, 1) * value).sum(1)
        return rotate(rms(pooled, one.norm_weight), (one.plan[:, 0] - ratio).clamp(min=0))

    def store() -> None:
        key = rotate(rms(s.qkv[:, Q_LORA:], w.kv_norm), requests.positions)
        put(caches.window, requests.window_slots, key, requests.window_slots >= 0)
        for one in caches.compressors:
            ending = one.plan[:, 0] % ratio == 0
            key = pool(one)
            if key.shape[1] == HEAD_DIM:
                put(one.cache, one.slots, key, ending)
                continue
            key = key @ matrix
            scale = key.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
            data = (key / scale).to(torch.float8_e4m3fn).view(torch.uint8)
            raw = one.cache.view(-1)
            slots = one.slots.long()[:, None]
            first = slots // PAGE_TOKENS * INDEX_PAGE_BYTES
            columns = first + slots % PAGE_TOKENS * INDEX_DIM + torch.arange(INDEX_DIM, device=device)
            raw[columns] = torch.where(ending[:, None], data, raw[columns])
            place = first + PAGE_TOKENS * INDEX_DIM + slots % PAGE_TOKENS * 4 + torch.arange(4, device=device)
            raw[place] = torch.where(ending[:, None], scale.view(torch.uint8), raw[place])

    def query() -> None:
        low = rms(s.qkv[:, :Q_LORA], w.q_norm).to(torch.bfloat16)
        s.q = functional.linear(low, converted.dense["wq_b"])

    def prepare() -> None:
        q = s.q[:, : HEADS * HEAD_DIM].unflatten(1, (HEADS, HEAD_DIM))
        s.query = rotate(rms(q), requests.positions).to(torch.bfloat16)
        if ratio == 4:
            q = rotate(s.q[:, HEADS * HEAD_DIM :].unflatten(1, (INDEX_HEADS, INDEX_DIM)), requests.positions) @ matrix
            scale = q.abs().amax(-1).clamp(min=1e-4) / 448
            s.index_q = (q / scale[..., None]).to(torch.float8_e4m3fn)
            weight = s.projected[:, head_weights:] * (INDEX_DIM * INDEX_HEADS) ** -0.5
            s.index_weights = weight * scale

    def score() -> None:
        assert caches.index is not None
        pages = caches.index[requests.tables[4].long()]
        keys = pages[..., : PAGE_TOKENS * INDEX_DIM].contiguous().view(torch.float8_e4m3fn).to(torch.bfloat16)
        scales = pages[..., PAGE_TOKENS * INDEX_DIM :].contiguous().view(torch.float32).flatten(1)
        keys = keys.view(requests.count, -1, INDEX_DIM)
        products = torch.bmm(s.index_q.to(torch.bfloat16), keys.mT).float()
        s.logits = (products.relu() * s.index_weights[..., None]).sum(1) * scales

    def select() -> None:
        width = s.logits.shape[1]
        token = torch.arange(width, device=device)
        logits = s.logits.masked_fill(token >= requests.compressed[4][:, None], -torch.inf)
        values, chosen = logits.topk(min(TOPK, width))
        pages = requests.tables[4].gather(1, chosen // PAGE_TOKENS)
        s.selected = torch.where(values == -torch.inf, -1, pages * PAGE_TOKENS + chosen % PAGE_TOKENS)

    def read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        page = cache.shape[1]
        size = kv_layout.page_bytes(page)
        raw = cache.as_strided((cache.shape[0] * size,), (1,))
        slots = slots.long().clamp(min=0)[..., None]
        first = slots // page * size
        data = raw[first + slots % page * 576 + torch.arange(576, device=device)]
        scales = raw[first + page * 576 + slots % page * 8 + torch.arange(7, device=device)]
        nope = data[..., :448].contiguous().view(torch.float8_e4m3fn).to(torch.bfloat16).unflatten(-1, (7, 64))
        nope = nope * torch.exp2(scales.float() - 127).to(torch.bfloat16)[..., None]
        return torch.cat([nope.flatten(-2), data[..., 448:].contiguous().view(torch.bfloat16)], -1)

    def attend() -> None:
        keys, listed = [read(caches.window, requests.window_indices)], [requests.window_indices >= 0]
        if ratio:
            assert caches.compressed is not None
            slots = s.selected if ratio == 4 else requests.indices
            count = requests.selected if ratio == 4 else requests.compressed[128]
            keys.append(read(caches.compressed, slots))
            listed.append((slots >= 0) & (torch.arange(slots.shape[1], device=device) < count[:, None]))
        values, there = torch.cat(keys, 1), torch.cat(listed, 1)
        scores = torch.bmm(s.query, values.mT).float() * HEAD_DIM**-0.5
        scores = scores.masked_fill(~there[:, None], -torch.inf)
        scores = torch.cat([scores, w.sink[None, :, None].expand(len(scores), -1, 1)], -1).softmax(-1)
        s.attended = torch.bmm(scores[..., :-1].to(torch.bfloat16), values)

    def output_a() -> None:
        o = rotate(s.attended, requests.positions, inverse=True).to(torch.bfloat16)
        weight = converted.dense["wo_a"].view(O_GROUPS, O_LORA, -1)
        s.low = torch.einsum("tgd,gnd->tgn", o.view(len(o), O_GROUPS, -1), weight).flatten(1)

    def output_b() -> None:
        s.y = functional.linear(s.low, converted.dense["wo_b"])

    def gate() -> None:
        s.gates = functional.linear(s.x, w.gate).float()

    def route() -> None:
        scores = functional.softplus(s.gates).sqrt()
        s.ids = (scores + w.gate_bias).topk(TOP_EXPERTS).indices
        chosen = scores.gather(1, s.ids)
        s.expert_weights = 1.5 * chosen / (chosen.sum(-1, keepdim=True) + 1e-20)

    def unpack(name: str, ids: torch.Tensor) -> torch.Tensor:
        packed, scale = w.experts[name][ids], w.experts[f"{name}_scale"][ids]
        values = torch.stack([e2m1[(packed & 15).int()], e2m1[(packed >> 4).int()]], -1).flatten(-2)
        scale = torch.exp2(scale.float() - 127).to(torch.bfloat16)
        return (values.unflatten(-1, (-1, 32)) * scale[..., None]).flatten(-2)

    def clamped(gate_up: torch.Tensor) -> torch.Tensor:
        gate_, up = gate_up.float().chunk(2, -1)
        gated = functional.silu(gate_.clamp(max=SWIGLU_LIMIT)) * up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        return gated.to(torch.bfloat16)

    def experts() -> None:
        up, down = converted.shared
        y = functional.linear(clamped(functional.linear(s.x, up)), down).float()
        for place in range(TOP_EXPERTS):
            ids = s.ids[:, place].long()
            hidden = clamped(torch.bmm(unpack("w13", ids), s.x[..., None])[..., 0])
            y = y + torch.bmm(unpack("w2", ids), hidden[..., None])[..., 0] * s.expert_weights[:, place, None]
        s.y = y.to(torch.bfloat16)

    calls: Calls = [
        ("mHC", lambda: boundary(0)),
        ("linear", qkv),
        ("glue", store),
        ("linear", query),
        ("glue", prepare),
    ]
    if ratio == 4:
        calls += [("indexer", score), ("indexer", select)]
    calls += [("attention", attend), ("linear", output_a), ("linear", output_b)]
    return [*calls, ("mHC", lambda: boundary(1)), ("linear", gate), ("glue", route), ("experts", experts)]


def in_float64(
    weights: Weights,
    caches: Caches,
    requests: Requests,
    s: SimpleNamespace,
    selected: torch.Tensor | None = None,
    ids: torch.Tensor | None = None,
) -> None:
    """The layer in float64, on `s`. Only what lies in the caches is rounded: run it after a step stored its keys.

    Args:
        selected: attend to these slots, not to the best by the reference's own scores.
        ids: take these experts, not the best by the reference's own logits.
    """
    w, ratio = weights, weights.ratio

    def boundary(block: int) -> None:
        found = mhc_reference.mhc_post_pre_norm(
            s.y, s.residual, s.post, s.comb, w.fn[block], w.scale[block], w.base[block], w.norm[block]
        )
        s.residual, s.post, s.comb, s.x = found

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ linear_reference.dequantise(*w.dense[name]).T

    boundary(0)
    low = linear(s.x, "wqkv")[:, :Q_LORA]
    head_weights = None
    if ratio == 4:
        assert w.projection is not None
        head_weights = s.x @ w.projection[-INDEX_HEADS:].double().T
    q = linear(store_reference.norm(low, w.q_norm), "wq_b")
    s.query, s.index_q, s.index_weights = queries_reference.prepare_queries(
        q, HEADS, requests.rope, requests.positions, head_weights=head_weights, quantised=False
    )
    extra: dict[str, torch.Tensor | None] = {}
    if ratio == 4:
        assert caches.index is not None
        if selected is None:
            table, lengths = requests.tables[4], requests.compressed[4]
            width = table.shape[1] * PAGE_TOKENS
            s.logits = indexer_reference.indexer_logits(
                s.index_q[:, None], caches.index, s.index_weights, lengths, table, width
            )
            best = topk_reference.topk_indices(s.logits.nan_to_num(-torch.inf), lengths)
            selected = torch.full((len(best), TOPK), -1, dtype=torch.int32, device=table.device)
            for row, positions in enumerate(best):
                slots = topk_reference.slots(positions, table[row])
                selected[row, : len(slots)] = torch.tensor(slots, dtype=torch.int32, device=table.device)
        s.selected = selected
        extra = {"extra_cache": caches.compressed, "extra_indices": selected, "extra_lengths": requests.selected}
    elif ratio:
        extra = {
            "extra_cache": caches.compressed,
            "extra_indices": requests.indices,
            "extra_lengths": requests.compressed[128],
        }
    s.attended, _ = mla_reference.sparse_mla_decode(
        s.query, caches.window, requests.window_indices, requests.window_lengths, sink=w.sink, **extra
    )
    o = inverse_rope(s.attended, requests.positions, requests.rope).view(requests.count, O_GROUPS, -1)
    weight = linear_reference.dequantise(*w.dense["wo_a"]).view(O_GROUPS, O_LORA, -1)
    s.y = linear(torch.einsum("tgd,gnd->tgn", o, weight).flatten(1), "wo_b")
    s.attention_y = s.y
    boundary(1)
    logits = s.x @ w.gate.double().T
    s.ids, s.expert_weights = route_reference.route_experts(logits, w.gate_bias)
    if ids is not None:
        scores = torch.nn.functional.softplus(logits, threshold=1e6).sqrt().gather(1, ids.long())
        s.ids, s.expert_weights = ids, 1.5 * scores / scores.sum(-1, keepdim=True)
    s.y = moe_reference.moe_fp4_small_batch(s.x, s.ids, s.expert_weights, **w.experts)


def layers(step: Callable[[int], Calls]) -> Iterator[Calls]:
    """The calls of each of the 43 layers."""
    for layer in range(LAYERS):
        yield step(layer)
