"""Everything a layer puts into its caches: the window's key, and what the compressors make of the last tokens.

One launch with programs for each of them and token: the key's norm, RoPE, quantisation and paged store; the
attention's compressor (its state, and at a group's last token the group's pooled key); the same for the indexer's.
The queries may be prepared in the same launch: they are ready later than the rest, which is done meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from sm120_kernels import kv_layout, serving
from sm120_kernels.aot import CompileCase
from sm120_kernels.checks import has_dependent_launch, require, require_device, require_index, require_rows, sm_count
from sm120_kernels.interpret import to_bf16, to_e4m3
from sm120_kernels.ops import bf16_linear_partials, indexer_logits, prepare_queries
from sm120_kernels.ops.prepare_queries import Queries, begin, prepare_queries_kernel
from sm120_kernels.rotation import hadamard, rotate

HEAD_DIM = kv_layout.HEAD_DIM
ROPE_DIM = kv_layout.ROPE_DIM
INDEX_DIM = indexer_logits.HEAD_DIM
WARPS = 4
# Programs that share a token's pool of 128 rows.
SLICES = 8
MAX_TOKENS = 4096
E4M3_MAX = tl.constexpr(448.0)
LEAST_MAXIMUM = tl.constexpr(1e-4)
HADAMARD_SCALE = tl.constexpr(INDEX_DIM**-0.5)
NOPE_DIM = tl.constexpr(kv_layout.NOPE_DIM)
DATA_BYTES = tl.constexpr(kv_layout.DATA_BYTES)
SCALE_BYTES = tl.constexpr(kv_layout.SCALE_BYTES)


@triton.jit
def _norm(x, weight_ptr, eps, DIM: tl.constexpr):
    """RMSNorm of one vector x [DIM]."""
    return x * tl.rsqrt(tl.sum(x * x) / DIM + eps) * tl.load(weight_ptr + tl.arange(0, DIM)).to(tl.float32)


@triton.jit
def _store_key(x, table_row, cache_ptr, slot, shift, page_bytes, ROUNDED: tl.constexpr):
    """RoPE, quantisation and store of a normalised key x [512] into its slot of a paged cache.

    ROUNDED: the nope values are rounded to bf16 before they are quantised.
    """
    group = tl.arange(0, 8)
    column = tl.arange(0, 64)
    x = rotate(tl.reshape(x, (8, 64)), group == 7, table_row, 8)
    row = cache_ptr + (slot >> shift).to(tl.int64) * page_bytes
    in_page = slot & ((1 << shift) - 1)
    scale_row = row + (DATA_BYTES << shift) + in_page * SCALE_BYTES
    row += in_page * DATA_BYTES
    rope = (row + NOPE_DIM).to(tl.pointer_type(tl.bfloat16))
    tl.store(rope + (group - 7)[:, None] * 64 + column[None, :], to_bf16(x), mask=(group == 7)[:, None])
    if ROUNDED:
        x = to_bf16(x).to(tl.float32)
    scale = (tl.maximum(tl.max(tl.abs(x), 1), LEAST_MAXIMUM) / E4M3_MAX).to(tl.int32, bitcast=True)
    exponent = (scale >> 23) + ((scale & 0x7FFFFF) != 0).to(tl.int32)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    quantised = to_e4m3(x * inverse[:, None]).to(tl.uint8, bitcast=True)
    tl.store(row + group[:, None] * 64 + column[None, :], quantised, mask=(group < 7)[:, None])
    tl.store(scale_row + group, exponent.to(tl.uint8), mask=group < 7)


@triton.jit
def _store_index_key(x, table_row, hadamard_ptr, cache_ptr, slot, PAGE: tl.constexpr, DIM: tl.constexpr):
    """RoPE, Hadamard rotation, quantisation and store of a normalised key x [DIM] into the indexer's cache."""
    group = tl.arange(0, DIM // 64)
    column = tl.arange(0, DIM)
    x = tl.reshape(rotate(tl.reshape(x, (DIM // 64, 64)), group == DIM // 64 - 1, table_row, DIM // 64), (DIM,))
    matrix = tl.load(hadamard_ptr + column[:, None] * DIM + column[None, :]).to(tl.float32)
    x = tl.sum(matrix * x[None, :], 1) * HADAMARD_SCALE
    scale = tl.maximum(tl.max(tl.abs(x)), LEAST_MAXIMUM) / E4M3_MAX
    page = cache_ptr + (slot // PAGE).to(tl.int64) * (PAGE * (DIM + 4))
    quantised = to_e4m3(x * (1.0 / scale)).to(tl.uint8, bitcast=True)
    tl.store(page + slot % PAGE * DIM + column, quantised)
    tl.store((page + PAGE * DIM).to(tl.pointer_type(tl.float32)) + slot % PAGE, scale)


@triton.jit
def _projected(partial_ptr, token, tokens, columns, first, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """DIM projected values of a token from column `first`: the sum of their shares."""
    place = partial_ptr + token * columns + first + tl.arange(0, DIM)
    value = tl.load(place)
    for split in tl.static_range(1, SPLITS):
        value += tl.load(place + split * tokens * columns)
    return value


@triton.jit
def _pool_4(
    partial_ptr,
    ape_ptr,
    state_ptr,
    token,
    tokens,
    columns,
    first,
    plan_ptr,
    length,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Keep the token's row; the pooled key of its group and the one before, of use at a group's last token."""
    write = tl.load(plan_ptr + 1)
    page_0 = tl.load(plan_ptr + 2)
    page_1 = tl.load(plan_ptr + 3)
    column = tl.arange(0, DIM)
    state = state_ptr + column
    early = _projected(partial_ptr, token, tokens, columns, first, DIM, SPLITS)
    late = _projected(partial_ptr, token, tokens, columns, first + DIM, DIM, SPLITS)
    early_score = _projected(partial_ptr, token, tokens, columns, first + 2 * DIM, DIM, SPLITS)
    late_score = _projected(partial_ptr, token, tokens, columns, first + 3 * DIM, DIM, SPLITS)
    pooled = early
    if length % 4 == 0:
        top = late_score + tl.load(ape_ptr + 7 * DIM + column)
        total = tl.full([DIM], 1.0, tl.float32)
        pooled = late
        for i in tl.static_range(7):
            if i < 4:
                row = state + (page_0.to(tl.int64) * 4 + i) * (4 * DIM)
                there = length > 4
            else:
                row = state + (page_1.to(tl.int64) * 4 + i - 4) * (4 * DIM) + DIM
                there = length > 0
            value = tl.load(row, mask=there & (column < DIM), other=0.0)
            score = tl.load(row + 2 * DIM, mask=there & (column < DIM), other=float("-inf"))
            score += tl.load(ape_ptr + i * DIM + column)
            new_top = tl.maximum(top, score)
            keep = tl.exp(top - new_top)
            weight = tl.exp(score - new_top)
            pooled = tl.fma(pooled, keep, value * weight)
            total = total * keep + weight
            top = new_top
        pooled = pooled / total
    begin(WAIT)
    row = state + write.to(tl.int64) * (4 * DIM)
    tl.store(row, early)
    tl.store(row + DIM, late)
    tl.store(row + 2 * DIM, early_score)
    tl.store(row + 3 * DIM, late_score)
    return pooled


@triton.jit
def _pool_128(
    partial_ptr,
    ape_ptr,
    state_ptr,
    pooled_ptr,
    arrivals_ptr,
    plan_ptr,
    token,
    tokens,
    columns,
    first,
    slice,
    length,
    DIM: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    WAIT: tl.constexpr,
):
    """Keep a slice of the token's row; at a group's last token pool it, into pooled_ptr. Is it the last slice to do so?

    128 rows are too many bytes for one program to wait for.
    """
    WIDTH: tl.constexpr = DIM // SLICES
    write = tl.load(plan_ptr + 1)
    page = tl.load(plan_ptr + 3)
    column = slice * WIDTH + tl.arange(0, WIDTH)
    own = _projected(partial_ptr, token, tokens, columns, first + slice * WIDTH, WIDTH, SPLITS)
    own_score = _projected(partial_ptr, token, tokens, columns, first + DIM + slice * WIDTH, WIDTH, SPLITS)
    pooled = own
    if length % 128 == 0:
        member = tl.arange(0, 128)
        place = state_ptr + (page.to(tl.int64) * 128 + member)[:, None] * (2 * DIM) + column[None, :]
        before = (member < 127)[:, None]
        score = tl.where(before, tl.load(place + DIM, mask=before, other=0.0), own_score[None, :])
        score += tl.load(ape_ptr + member[:, None] * DIM + column[None, :])
        value = tl.where(before, tl.load(place, mask=before, other=0.0), own[None, :])
        weight = tl.exp(score - tl.max(score, 0)[None, :])
        pooled = tl.sum(value * weight, 0) / tl.sum(weight, 0)
    begin(WAIT)
    row = state_ptr + write.to(tl.int64) * (2 * DIM) + column
    tl.store(row, own)
    tl.store(row + DIM, own_score)
    last = False
    if length % 128 == 0:
        tl.store(pooled_ptr + token * DIM + column, pooled)
        # All of this program's stores come before the count; the last program to count sees every program's.
        tl.debug_barrier()
        last = tl.atomic_add(arrivals_ptr + token, 1, sem="acq_rel", scope="gpu") == SLICES - 1
        if last:
            tl.store(arrivals_ptr + token, 0)
    return last


@triton.jit
def _store_attention_inputs_kernel(
    kv_ptr,
    kv_norm_ptr,
    rope_ptr,
    positions_ptr,
    window_ptr,
    window_slots_ptr,
    partial_ptr,
    hadamard_ptr,
    plan_ptr,
    ape_ptr,
    norm_ptr,
    state_ptr,
    pooled_ptr,
    arrivals_ptr,
    cache_ptr,
    slots_ptr,
    index_plan_ptr,
    index_ape_ptr,
    index_norm_ptr,
    index_state_ptr,
    index_cache_ptr,
    index_slots_ptr,
    tokens,
    kv_stride,
    columns,
    first_column,
    index_first_column,
    window_shift,
    window_page,
    shift,
    page_bytes,
    eps,
    q_ptr,
    index_q_ptr,
    weights_ptr,
    heads,
    q_stride,
    weights_column,
    weight_scale,
    RATIO: tl.constexpr,
    SLICES: tl.constexpr,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    INDEX_PAGE: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    QUERIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (0, token): the window's key; then the compressor, in SLICES for ratio 128; then the indexer's.

    After these PARTS, with QUERIES, the token's query heads, and its indexer's: they come from the kernel right before,
    everything else is older.
    """
    part = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    WAIT: tl.constexpr = PDL and QUERIES
    begin(PDL and not QUERIES)
    if QUERIES and part >= PARTS:
        prepare_queries_kernel(
            q_ptr,
            rope_ptr,
            positions_ptr,
            partial_ptr,
            hadamard_ptr,
            index_q_ptr,
            weights_ptr,
            tokens,
            heads,
            q_stride,
            columns,
            weights_column,
            weight_scale,
            eps,
            SPLITS,
            HEADS,
            DIM,
            INDEX_HEADS,
            INDEX_BLOCK,
            INDEX_DIM,
            ROPE_DIM,
            PARTS,
            True,
            PDL,
        )
    elif part == 0:
        slot = tl.load(window_slots_ptr + token)
        if slot >= 0:
            table_row = rope_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROPE_DIM
            key = tl.load(kv_ptr + token * kv_stride + tl.arange(0, DIM)).to(tl.float32)
            key = _norm(key, kv_norm_ptr, eps, DIM)
            begin(WAIT)
            _store_key(key, table_row, window_ptr, slot, window_shift, window_page, False)
    elif RATIO == 128:
        length = tl.load(plan_ptr + token * 4)
        last = _pool_128(
            partial_ptr,
            ape_ptr,
            state_ptr,
            pooled_ptr,
            arrivals_ptr,
            plan_ptr + token * 4,
            token,
            tokens,
            columns,
            first_column,
            part - 1,
            length,
            DIM,
            SLICES,
            SPLITS,
            WAIT,
        )
        if last:
            pooled = tl.load(pooled_ptr + token * DIM + tl.arange(0, DIM), cache_modifier=".cg")
            pooled = _norm(pooled, norm_ptr, eps, DIM)
            pooled_row = rope_ptr + (length - 128).to(tl.int64) * ROPE_DIM
            _store_key(pooled, pooled_row, cache_ptr, tl.load(slots_ptr + token), shift, page_bytes, True)
    elif RATIO == 4:
        if part == 1:
            length = tl.load(plan_ptr + token * 4)
            pooled = _pool_4(
                partial_ptr,
                ape_ptr,
                state_ptr,
                token,
                tokens,
                columns,
                first_column,
                plan_ptr + token * 4,
                length,
                DIM,
                SPLITS,
                WAIT,
            )
            if length % 4 == 0:
                pooled_row = rope_ptr + (length - 4).to(tl.int64) * ROPE_DIM
                pooled = _norm(pooled, norm_ptr, eps, DIM)
                _store_key(pooled, pooled_row, cache_ptr, tl.load(slots_ptr + token), shift, page_bytes, True)
        else:
            index_length = tl.load(index_plan_ptr + token * 4)
            index_key = _pool_4(
                partial_ptr,
                index_ape_ptr,
                index_state_ptr,
                token,
                tokens,
                columns,
                index_first_column,
                index_plan_ptr + token * 4,
                index_length,
                INDEX_DIM,
                SPLITS,
                WAIT,
            )
            if index_length % 4 == 0:
                index_row = rope_ptr + (index_length - 4).to(tl.int64) * ROPE_DIM
                index_key = _norm(index_key, index_norm_ptr, eps, INDEX_DIM)
                index_slot = tl.load(index_slots_ptr + token)
                _store_index_key(index_key, index_row, hadamard_ptr, index_cache_ptr, index_slot, INDEX_PAGE, INDEX_DIM)


@dataclasses.dataclass(frozen=True)
class Compressor:
    """One compressor of a layer and where it keeps its state.

    Attributes:
        ratio: 4 or 128 tokens a group.
        first_column: where its columns begin in `projected`. Ratio 4: 4 x dim, key and score of the group the token is
            overlapped by, of its own group, as [key of the next group's overlap, key, score of the overlap, score];
            ratio 128: 2 x dim, [key, score].
        ape: float32, added to the scores of a group's tokens: [8, dim] for ratio 4 (the group before, then the group),
            [128, dim] for ratio 128.
        norm_weight: [dim] float32.
        state: float32 [rows, 4 * dim] or [rows, 2 * dim]: each token's projected columns until its group is pooled.
        plan: [tokens, 4] int32: the request's length with this token, the token's row of the state, the state's page
            (`ratio` rows) of the group before (ratio 4 only), the page of its own group.
        cache: where pooled keys go: for dim 512 uint8 as in `sparse_mla_decode`, for dim 128 as in `indexer_logits`.
        slots: [tokens] int32 or int64: slot of the group's key, read at a group's last token only.
    """

    ratio: int
    first_column: int
    ape: torch.Tensor
    norm_weight: torch.Tensor
    state: torch.Tensor
    plan: torch.Tensor
    cache: torch.Tensor
    slots: torch.Tensor

    @property
    def columns(self) -> int:
        """Projected columns it reads."""
        return self.ape.shape[1] * (4 if self.ratio == 4 else 2)


def store_attention_inputs(
    kv: torch.Tensor,
    norm_weight: torch.Tensor,
    rope: torch.Tensor,
    positions: torch.Tensor,
    window: torch.Tensor,
    window_slots: torch.Tensor,
    *,
    projected: torch.Tensor | None = None,
    compressor: Compressor | None = None,
    index_compressor: Compressor | None = None,
    queries: Queries | None = None,
    eps: float = 1e-6,
) -> None:
    """Store each token's window key, and run the layer's compressors one token further.

    One launch. The window key is RMSNorm(kv), its last 64 values rotated by RoPE and kept in bf16, the other 448 in
    e4m3 with a power-of-two scale a group of 64: the least >= max(1e-4, largest magnitude) / 448.

    A compressor keeps the token's projected row in its state. At a group's last token it pools the group (ratio 4: and
    the group before), separately in every dimension: key = sum softmax(score + ape) key. RMSNorm, RoPE at the group's
    first position and the cache's quantisation follow; the values are rounded to bf16 before e4m3. The indexer's key is
    multiplied by the Hadamard matrix / sqrt(128) instead, and quantised in one group with a float32 scale.

    All sizes come from the shapes; lengths and slots are read on the GPU. For ratio 128 programs count each other in a
    buffer of the stream the call is made on: call once before a graph is captured, and do not replay graphs captured on
    one stream at the same time.

    Args:
        kv: [tokens, 512] bfloat16, rows contiguous: the projected key.
        norm_weight: [512] bfloat16.
        rope: [positions, 64] float32, contiguous: cos and sin of 32 frequencies, interleaved.
        positions: [tokens] int32 or int64.
        window: the sliding-window cache, uint8 as in `sparse_mla_decode`, pages of 256, 64 or 2 tokens.
        window_slots: [tokens] int32, -1 where nothing is stored.
        projected: [splits, tokens, columns] float32 from `bf16_linear_partials`, for the compressors.
        compressor: the layer's, of dim 512; None in a layer that attends to its window only.
        index_compressor: the indexer's, of dim 128 and ratio 4; with a compressor of ratio 4 only.
        queries: do what `prepare_queries` does in the same launch. Then q must be what the kernel right before this one
            writes, and kv and projected what earlier ones wrote (`checks.has_dependent_launch`).
        eps: of every norm.

    Raises:
        ValueError: a wrong dtype, shape, stride or device; over 4096 tokens with ratio 128.

    Source of the semantics: SGLang 0.5.23, `kernels/jit/csrc/deepseek_v4/`: `main_norm_rope.cuh`, `c4_v2.cuh`,
    `c128_v2.cuh`, `fused_norm_rope_v2.cuh` (`plan` is their DecodePlan).
    """
    tokens = kv.shape[0]
    require_rows(kv, "kv", torch.bfloat16, tokens)
    if kv.shape[1] != HEAD_DIM:
        raise ValueError(f"kv must have {HEAD_DIM} columns, got {kv.shape[1]}")
    require(norm_weight, "norm_weight", torch.bfloat16, (HEAD_DIM,))
    require(rope, "rope", torch.float32, (rope.shape[0], ROPE_DIM))
    require_index(positions, "positions", (tokens,))
    _require_cache(window, "window")
    require(window_slots, "window_slots", torch.int32, (tokens,))
    if (compressor is None) != (projected is None):
        raise ValueError("projected and compressor go together: give both or neither")
    if index_compressor is not None and (compressor is None or compressor.ratio != 4):
        raise ValueError("index_compressor goes with a compressor of ratio 4")
    given: dict[str, torch.Tensor | None] = {"projected": projected}
    if projected is not None and compressor is not None:
        require(projected, "projected", torch.float32, (projected.shape[0], tokens, projected.shape[-1]))
        _require_cache(compressor.cache, "compressor.cache")
        given |= _require_compressor(compressor, "compressor", HEAD_DIM, tokens, projected.shape[2])
        if index_compressor is not None:
            cache = index_compressor.cache
            if cache.dtype != torch.uint8 or cache[0].numel() != indexer_logits.PAGE_BYTES or not cache.is_contiguous():
                raise ValueError(
                    f"index_compressor.cache must be contiguous uint8 with {indexer_logits.PAGE_BYTES} bytes a page, "
                    f"got {cache.dtype} with shape {list(cache.shape)}"
                )
            given |= _require_compressor(index_compressor, "index_compressor", INDEX_DIM, tokens, projected.shape[2])
    if queries is not None:
        if queries.q.shape[0] != tokens:
            raise ValueError(f"queries must have {tokens} tokens, got {queries.q.shape[0]}")
        if queries.projected is not None and queries.projected is not projected:
            raise ValueError("queries.projected must be the same tensor as projected")
        given |= {"queries": queries.q}
    require_device(
        kv.device, norm_weight=norm_weight, rope=rope, positions=positions, window=window, slots=window_slots, **given
    )
    if tokens == 0:
        return
    pdl = has_dependent_launch(kv.device)
    # Without a compressor its arguments only need the right type.
    nothing = Compressor(0, 0, rope, rope, rope, window_slots, window, window_slots)
    first, second = compressor or nothing, index_compressor or nothing
    pooled, stream = None, 0
    parts = 1 + (compressor is not None) + (index_compressor is not None)
    if first.ratio == 128:
        parts = 1 + SLICES
        pooled = torch.empty((tokens, HEAD_DIM), dtype=torch.float32, device=kv.device)
        stream = torch.cuda.current_stream().cuda_stream if kv.is_cuda else 0
        if tokens > MAX_TOKENS:
            raise ValueError(f"at most {MAX_TOKENS} tokens, got {tokens}")
    # Without queries their arguments only need the right type.
    asked = queries or Queries(kv, 0, None, 0, 0.0, None, None)
    _store_attention_inputs_kernel[(parts + (queries.programs if queries else 0), tokens)](
        kv,
        norm_weight,
        rope,
        positions,
        window,
        window_slots,
        rope if projected is None else projected,
        hadamard(kv.device),
        first.plan,
        first.ape,
        first.norm_weight,
        first.state,
        rope if pooled is None else pooled,
        window_slots if pooled is None else _arrivals(kv.device, stream),
        first.cache,
        first.slots,
        second.plan,
        second.ape,
        second.norm_weight,
        second.state,
        second.cache,
        second.slots,
        tokens,
        kv.stride(0),
        0 if projected is None else projected.shape[2],
        first.first_column,
        second.first_column,
        window.shape[1].bit_length() - 1,
        kv_layout.page_bytes(window.shape[1]),
        first.cache.shape[1].bit_length() - 1,
        kv_layout.page_bytes(first.cache.shape[1]),
        eps,
        asked.q,
        asked.q.view(torch.float8_e4m3fn) if asked.index_q is None else asked.index_q,
        rope if asked.index_weights is None else asked.index_weights,
        asked.heads,
        asked.q.stride(0),
        asked.first_column,
        asked.weight_scale,
        RATIO=first.ratio,
        SLICES=SLICES,
        SPLITS=1 if projected is None else projected.shape[0],
        DIM=HEAD_DIM,
        INDEX_DIM=INDEX_DIM,
        INDEX_PAGE=indexer_logits.PAGE_TOKENS,
        ROPE_DIM=ROPE_DIM,
        PARTS=parts,
        HEADS=prepare_queries.QUERY_HEADS,
        INDEX_HEADS=prepare_queries.INDEX_HEADS,
        INDEX_BLOCK=prepare_queries.INDEX_HEADS_A_PROGRAM,
        QUERIES=queries is not None,
        PDL=pdl,
        num_warps=WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )


@functools.cache
def _arrivals(device: torch.device, stream: int) -> torch.Tensor:
    """Counters of finished slices, all zero between calls; one set a stream, on which calls follow each other."""
    return torch.zeros(MAX_TOKENS, dtype=torch.int32, device=device)


def _require_cache(cache: torch.Tensor, name: str) -> None:
    if cache.dtype != torch.uint8 or cache.ndim != 4 or cache.shape[2:] != (1, kv_layout.TOKEN_BYTES):
        raise ValueError(
            f"{name} must be uint8 [pages, page_size, 1, {kv_layout.TOKEN_BYTES}], got {cache.dtype} "
            f"{list(cache.shape)}"
        )
    page_size = cache.shape[1]
    if page_size not in kv_layout.PAGE_SIZES:
        raise ValueError(f"{name} must have pages of 256, 64 or 2 tokens, got {page_size}")
    if cache.shape[0] > 1 and cache.stride(0) != kv_layout.page_bytes(page_size):
        raise ValueError(
            f"{name} must have {kv_layout.page_bytes(page_size)} bytes from page to page, {cache.stride(0)}"
        )


def _require_compressor(one: Compressor, name: str, dim: int, tokens: int, columns: int) -> dict[str, torch.Tensor]:
    """Check a compressor's tensors; they by name."""
    if one.ratio not in (4, 128):
        raise ValueError(f"{name}.ratio must be 4 or 128, got {one.ratio}")
    require(one.ape, f"{name}.ape", torch.float32, (8 if one.ratio == 4 else 128, dim))
    require(one.norm_weight, f"{name}.norm_weight", torch.float32, (dim,))
    require(one.state, f"{name}.state", torch.float32, (one.state.shape[0], one.columns))
    require(one.plan, f"{name}.plan", torch.int32, (tokens, 4))
    require_index(one.slots, f"{name}.slots", (tokens,))
    if not 0 <= one.first_column <= columns - one.columns:
        raise ValueError(f"{name}.first_column must be 0 to {columns - one.columns}, got {one.first_column}")
    return {
        f"{name}.{field}": getattr(one, field) for field in ("ape", "norm_weight", "state", "plan", "cache", "slots")
    }


def serving_calls() -> Iterator[Callable[[], object]]:
    """Layers with a window only, C4 with its indexer, C128; both layouts of the window's pages."""

    def cache(page: int) -> torch.Tensor:
        stride, row = kv_layout.page_bytes(page), kv_layout.TOKEN_BYTES
        return torch.zeros(2 * stride, dtype=torch.uint8).as_strided((2, page, 1, row), (stride, row, row, 1))

    def compressor(tokens: int, ratio: int, dim: int, first: int, pooled: torch.Tensor) -> Compressor:
        ape = torch.zeros(8 if ratio == 4 else 128, dim)
        columns = dim * (4 if ratio == 4 else 2)
        # One token long: no group ends, so that no slot is read.
        plan, slots = torch.ones(tokens, 4, dtype=torch.int32), torch.full((tokens,), -1, dtype=torch.int64)
        return Compressor(ratio, first, ape, torch.zeros(dim), torch.zeros(256, columns), plan, pooled, slots)

    rope, norm = torch.zeros(256, ROPE_DIM), torch.zeros(HEAD_DIM, dtype=torch.bfloat16)
    for tokens in serving.BATCHES:
        kv = torch.zeros(tokens, 1024 + HEAD_DIM, dtype=torch.bfloat16)[:, 1024:]
        positions = torch.zeros(tokens, dtype=torch.int64)
        for page in (64, 256):
            slots = torch.full((tokens,), -1, dtype=torch.int32)
            window = functools.partial(store_attention_inputs, kv, norm, rope, positions, cache(page), slots)
            yield window
            for ratio, columns in ((4, 4 * HEAD_DIM + 4 * INDEX_DIM), (128, 2 * HEAD_DIM)):
                shares = bf16_linear_partials.plan(tokens, columns, serving.HIDDEN, sm_count(kv.device)).splits
                pooled = {"compressor": compressor(tokens, ratio, HEAD_DIM, 0, cache(64 if ratio == 4 else 2))}
                if ratio == 4:
                    index_cache = torch.zeros(2, indexer_logits.PAGE_BYTES, dtype=torch.uint8)
                    pooled["index_compressor"] = compressor(tokens, 4, INDEX_DIM, 4 * HEAD_DIM, index_cache)
                yield functools.partial(window, projected=torch.zeros(shares, tokens, columns), **pooled)


def compile_cases() -> Iterator[CompileCase]:
    """Layers with a window only, C4 with its indexer, C128; without and with the queries."""
    types = {
        "*bf16:16": "kv_ptr kv_norm_ptr hadamard_ptr q_ptr",
        "*fp8e4nv:16": "index_q_ptr",
        "*fp32:16": "rope_ptr partial_ptr ape_ptr norm_ptr state_ptr pooled_ptr index_ape_ptr index_norm_ptr "
        "index_state_ptr weights_ptr",
        "*i64:16": "positions_ptr",
        "*i32:16": "arrivals_ptr window_slots_ptr plan_ptr index_plan_ptr",
        "*u8:16": "window_ptr cache_ptr index_cache_ptr",
        "i32": "tokens window_shift shift",
        "i32:16": "kv_stride columns first_column index_first_column window_page page_bytes heads q_stride "
        "weights_column",
        "fp32": "eps weight_scale",
    }
    for (ratio, splits), queries in itertools.product(((0, 1), (4, 8), (128, 8)), (False, True)):
        yield CompileCase(
            op="store_attention_inputs",
            shape=f"ratio {ratio}, {splits} shares{', queries' if queries else ''}",
            kernel=_store_attention_inputs_kernel,
            arguments={name: kind for kind, names in types.items() for name in names.split()}
            # Without a compressor the window's slots stand in for its own.
            | {
                "slots_ptr": "*i64:16" if ratio else "*i32:16",
                "index_slots_ptr": "*i64:16" if ratio == 4 else "*i32:16",
            },
            constexprs={
                "RATIO": ratio,
                "SLICES": SLICES,
                "SPLITS": splits,
                "DIM": HEAD_DIM,
                "INDEX_DIM": INDEX_DIM,
                "INDEX_PAGE": indexer_logits.PAGE_TOKENS,
                "ROPE_DIM": ROPE_DIM,
                "PARTS": 1 + SLICES if ratio == 128 else 3 if ratio else 1,
                "HEADS": prepare_queries.QUERY_HEADS,
                "INDEX_HEADS": prepare_queries.INDEX_HEADS,
                "INDEX_BLOCK": prepare_queries.INDEX_HEADS_A_PROGRAM,
                "QUERIES": queries,
                "PDL": True,
            },
            num_warps=WARPS,
            uses_mma=queries,
            options={"launch_pdl": True},
        )
