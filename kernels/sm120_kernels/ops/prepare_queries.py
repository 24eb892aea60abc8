"""From the query projections' rows to what attention and the indexer take."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from sm120_kernels import kv_layout, serving
from sm120_kernels.aot import CompileCase
from sm120_kernels.checks import has_dependent_launch, require, require_device, require_index, require_rows
from sm120_kernels.interpret import dot, to_bf16, to_e4m3
from sm120_kernels.rotation import hadamard, rotate

HEAD_DIM = kv_layout.HEAD_DIM
ROPE_DIM = kv_layout.ROPE_DIM
INDEX_HEADS = 64
INDEX_DIM = 128
QUERY_HEADS = 4
INDEX_HEADS_A_PROGRAM = 16
WARPS = 4
E4M3_MAX = tl.constexpr(448.0)
LEAST_MAXIMUM = tl.constexpr(1e-4)
HADAMARD_SCALE = tl.constexpr(128**-0.5)


@triton.jit
def begin(PDL: tl.constexpr):
    """With PDL wait for the kernel before this one and let the next one start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _query_heads(q_row, head, heads, table_row, eps, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Norm and RoPE of HEADS query heads of one token, in place."""
    GROUPS: tl.constexpr = DIM // 64
    ROWS: tl.constexpr = HEADS * GROUPS
    places = q_row + head[:, None] * DIM + tl.arange(0, DIM)[None, :]
    q = tl.load(places, mask=(head < heads)[:, None], other=0.0).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, 1) / DIM + eps)[:, None]
    rotated = tl.arange(0, ROWS) % GROUPS == GROUPS - 1
    q = tl.reshape(rotate(tl.reshape(q, (ROWS, 64)), rotated, table_row, ROWS), (HEADS, DIM))
    tl.store(places, to_bf16(q), mask=(head < heads)[:, None])


@triton.jit
def _index_heads(q_row, out_row, head, table_row, matrix, HEADS: tl.constexpr, DIM: tl.constexpr):
    """RoPE, Hadamard rotation and quantisation of HEADS indexer heads of one token; returns their scales."""
    GROUPS: tl.constexpr = DIM // 64
    ROWS: tl.constexpr = HEADS * GROUPS
    column = tl.arange(0, DIM)
    q = tl.load(q_row + head[:, None] * DIM + column[None, :]).to(tl.float32)
    rotated = tl.arange(0, ROWS) % GROUPS == GROUPS - 1
    q = tl.reshape(rotate(tl.reshape(q, (ROWS, 64)), rotated, table_row, ROWS), (HEADS, DIM))
    # The matrix's entries are exact in bf16, so two bf16 parts carry q through the tensor cores to 16 bits.
    high = to_bf16(q)
    low = to_bf16(q - high.to(tl.float32))
    q = dot(low, matrix, dot(high, matrix)) * HADAMARD_SCALE
    scale = tl.maximum(tl.max(tl.abs(q), 1), LEAST_MAXIMUM) / E4M3_MAX
    tl.store(out_row + head[:, None] * DIM + column[None, :], to_e4m3(q * (1.0 / scale)[:, None]))
    return scale


@triton.jit
def prepare_queries_kernel(
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
    first_column,
    weight_scale,
    eps,
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_BLOCK: tl.constexpr,
    INDEX_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    SETTLED: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS query heads or INDEX_BLOCK indexer heads of one token; the grid is (FIRST others and blocks, tokens).

    SETTLED: the shares of the head weights are older than what the kernel right before this one writes.
    """
    block = tl.program_id(0) - FIRST
    token = tl.program_id(1).to(tl.int64)
    query_blocks = tl.cdiv(heads, HEADS)
    table_row = rope_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROPE_DIM
    q_row = q_ptr + token * q_stride
    if block < query_blocks:
        begin(PDL)
        _query_heads(q_row, block * HEADS + tl.arange(0, HEADS), heads, table_row, eps, HEADS, DIM)
    else:
        head = (block - query_blocks) * INDEX_BLOCK + tl.arange(0, INDEX_BLOCK)
        column = tl.arange(0, INDEX_DIM)
        matrix = tl.load(hadamard_ptr + column[:, None] * INDEX_DIM + column[None, :])
        begin(PDL and not SETTLED)
        weight = tl.zeros([INDEX_BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            weight += tl.load(partial_ptr + (split * tokens + token) * columns + first_column + head)
        begin(PDL and SETTLED)
        out_row = index_q_ptr + token * (INDEX_HEADS * INDEX_DIM)
        scale = _index_heads(q_row + heads * DIM, out_row, head, table_row, matrix, INDEX_BLOCK, INDEX_DIM)
        tl.store(weights_ptr + token * INDEX_HEADS + head, weight * weight_scale * scale)


@dataclasses.dataclass(frozen=True)
class Queries:
    """Checked arguments of `prepare_queries`, and where its results go; the fields are as there."""

    q: torch.Tensor
    heads: int
    projected: torch.Tensor | None
    first_column: int
    weight_scale: float
    index_q: torch.Tensor | None
    index_weights: torch.Tensor | None

    @staticmethod
    def of(
        q: torch.Tensor,
        heads: int,
        *,
        projected: torch.Tensor | None = None,
        first_column: int = 0,
        weight_scale: float = (INDEX_DIM * INDEX_HEADS) ** -0.5,
        index_q: torch.Tensor | None = None,
        index_weights: torch.Tensor | None = None,
    ) -> Queries:
        """Check what `prepare_queries` is given, and allocate what is None.

        Raises:
            ValueError: a wrong dtype, shape, stride or device.
        """
        tokens = q.shape[0]
        require_rows(q, "q", torch.bfloat16, tokens)
        indexed = q.shape[1] == heads * HEAD_DIM + INDEX_HEADS * INDEX_DIM
        if heads < 1 or not (indexed or q.shape[1] == heads * HEAD_DIM):
            raise ValueError(
                f"q must have {heads} x {HEAD_DIM} columns, or the indexer's 8192 after them, got {q.shape[1]}"
            )
        if q.stride(0) % 8:
            raise ValueError(f"q's rows must lie a multiple of 8 elements apart, got {q.stride(0)}")
        if indexed != (projected is not None):
            raise ValueError("projected goes with the indexer's heads in q: give both or neither")
        if projected is not None:
            require(projected, "projected", torch.float32, (projected.shape[0], tokens, projected.shape[-1]))
            if not 0 <= first_column <= projected.shape[2] - INDEX_HEADS:
                raise ValueError(f"first_column must be 0 to {projected.shape[2] - INDEX_HEADS}, got {first_column}")
            if index_q is None:
                index_q = torch.empty((tokens, INDEX_HEADS, INDEX_DIM), dtype=torch.float8_e4m3fn, device=q.device)
            if index_weights is None:
                index_weights = torch.empty((tokens, INDEX_HEADS), dtype=torch.float32, device=q.device)
            require(index_q, "index_q", torch.float8_e4m3fn, (tokens, INDEX_HEADS, INDEX_DIM))
            require(index_weights, "index_weights", torch.float32, (tokens, INDEX_HEADS))
        require_device(q.device, projected=projected, index_q=index_q, index_weights=index_weights)
        return Queries(q, heads, projected, first_column, weight_scale, index_q, index_weights)

    @property
    def view(self) -> torch.Tensor:
        """The query heads, [tokens, heads, 512]."""
        return self.q[:, : self.heads * HEAD_DIM].unflatten(1, (self.heads, HEAD_DIM))

    @property
    def programs(self) -> int:
        """Programs a token."""
        index_programs = INDEX_HEADS // INDEX_HEADS_A_PROGRAM if self.projected is not None else 0
        return triton.cdiv(self.heads, QUERY_HEADS) + index_programs


def prepare_queries(
    q: torch.Tensor,
    heads: int,
    rope: torch.Tensor,
    positions: torch.Tensor,
    *,
    eps: float = 1e-6,
    projected: torch.Tensor | None = None,
    first_column: int = 0,
    weight_scale: float = (INDEX_DIM * INDEX_HEADS) ** -0.5,
    index_q: torch.Tensor | None = None,
    index_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Norm and RoPE of the query heads; RoPE, Hadamard rotation and FP8 quantisation of the indexer's, if q has them.

    One launch. A query head is divided by its root mean square, then its last 64 values are rotated. An indexer head
    has no norm; its last 64 values are rotated, all 128 multiplied by the Hadamard matrix / sqrt(128), quantised with
    the scale s = max(1e-4, largest magnitude) / 448, which goes into the head's weight: projected x weight_scale x s.

    Args:
        q: [tokens, heads * 512] or [tokens, heads * 512 + 8192] bfloat16, rows contiguous: the query heads, then the
            indexer's 64 heads of 128. The query heads are changed in place.
        heads: query heads.
        rope: [positions, 64] float32, contiguous: cos and sin of 32 frequencies, interleaved.
        positions: [tokens] int32 or int64, contiguous.
        eps: of the norm.
        projected: with the indexer, [splits, tokens, columns] float32 from `bf16_linear_partials`.
        first_column: where its 64 head weights begin.
        weight_scale: as in the formula.
        index_q: [tokens, 64, 128] float8_e4m3fn, contiguous; allocated when None.
        index_weights: [tokens, 64] float32, contiguous; allocated when None.

    Returns:
        The query heads, a [tokens, heads, 512] view of q; index_q and index_weights, or None without the indexer.

    Raises:
        ValueError: a wrong dtype, shape, stride or device.

    Source of the semantics: SGLang 0.5.23, `fused_q_norm_rope` and `fused_q_indexer_rope_hadamard_quant` in
    `kernels/ops/attention/dsv4/norm_rope.py` (which round to bf16 between norm and RoPE, and the weights to bf16).
    """
    queries = Queries.of(
        q,
        heads,
        projected=projected,
        first_column=first_column,
        weight_scale=weight_scale,
        index_q=index_q,
        index_weights=index_weights,
    )
    tokens = q.shape[0]
    require(rope, "rope", torch.float32, (rope.shape[0], ROPE_DIM))
    require_index(positions, "positions", (tokens,))
    require_device(q.device, rope=rope, positions=positions)
    if tokens == 0:
        return queries.view, queries.index_q, queries.index_weights
    pdl = has_dependent_launch(q.device)
    prepare_queries_kernel[(queries.programs, tokens)](
        q,
        rope,
        positions,
        # Without the indexer its arguments only need the right type.
        rope if projected is None else projected,
        hadamard(q.device),
        q.view(torch.float8_e4m3fn) if queries.index_q is None else queries.index_q,
        rope if queries.index_weights is None else queries.index_weights,
        tokens,
        heads,
        q.stride(0),
        0 if projected is None else projected.shape[2],
        first_column,
        weight_scale,
        eps,
        SPLITS=1 if projected is None else projected.shape[0],
        HEADS=QUERY_HEADS,
        DIM=HEAD_DIM,
        INDEX_HEADS=INDEX_HEADS,
        INDEX_BLOCK=INDEX_HEADS_A_PROGRAM,
        INDEX_DIM=INDEX_DIM,
        ROPE_DIM=ROPE_DIM,
        FIRST=0,
        SETTLED=False,
        PDL=pdl,
        num_warps=WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )
    return queries.view, queries.index_q, queries.index_weights


def serving_calls() -> Iterator[Callable[[], object]]:
    """A rank's heads; the indexer's have a call of their own in SGLang."""
    rope = torch.zeros(1, ROPE_DIM)
    for ranks in serving.RANKS:
        heads = serving.HEADS // ranks
        for tokens in serving.BATCHES:
            positions = torch.zeros(tokens, dtype=torch.int64)
            q = torch.zeros(tokens, heads * HEAD_DIM, dtype=torch.bfloat16)
            yield functools.partial(prepare_queries, q, heads, rope, positions)


def compile_cases() -> Iterator[CompileCase]:
    """With few and many shares of the head weights."""
    for splits in (1, 8):
        yield CompileCase(
            op="prepare_queries",
            shape=f"{splits} shares",
            kernel=prepare_queries_kernel,
            arguments={
                "q_ptr": "*bf16:16",
                "rope_ptr": "*fp32:16",
                "positions_ptr": "*i64:16",
                "partial_ptr": "*fp32:16",
                "hadamard_ptr": "*bf16:16",
                "index_q_ptr": "*fp8e4nv:16",
                "weights_ptr": "*fp32:16",
                "tokens": "i32",
                **dict.fromkeys(("heads", "q_stride", "columns", "first_column"), "i32:16"),
                **dict.fromkeys(("weight_scale", "eps"), "fp32"),
            },
            constexprs={
                "SPLITS": splits,
                "HEADS": QUERY_HEADS,
                "DIM": HEAD_DIM,
                "INDEX_HEADS": INDEX_HEADS,
                "INDEX_BLOCK": INDEX_HEADS_A_PROGRAM,
                "INDEX_DIM": INDEX_DIM,
                "ROPE_DIM": ROPE_DIM,
                "FIRST": 0,
                "SETTLED": False,
                "PDL": True,
            },
            num_warps=WARPS,
            uses_mma=True,
            options={"launch_pdl": True},
        )
