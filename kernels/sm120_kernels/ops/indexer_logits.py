"""Scores of every compressed token of a request for its query rows: the first half of the sparse-attention indexer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from sm120_kernels import serving
from sm120_kernels.aot import CompileCase
from sm120_kernels.checks import (
    capability,
    check_page_table,
    has_dependent_launch,
    require,
    require_device,
    require_rows,
    sm_count,
)
from sm120_kernels.ops.topk_indices import TOPK

HEADS = 64
HEAD_DIM = 128
PAGE_TOKENS = 64
PAGE_BYTES = PAGE_TOKENS * (HEAD_DIM + 4)

MAX_ROWS = 2
MAX_BALANCED_UNITS = 512
STAGES = 5
WARPS = 4
# Programs a multiprocessor holds at once, by compute capability and rows a unit; 2 elsewhere.
PROGRAMS_PER_SM = {(9, 0): {1: 4, 2: 4}, (12, 0): {1: 3, 2: 2}}
# Register caps, by the same keys. ptxas aims at 168, for a third program that shared memory does not let in: it spills.
REGISTERS = {(12, 0): {2: 184}}


@triton.jit
def _unit_pages(lengths_ptr, unit, units, rows_per_request, width, skip_length, ROWS: tl.constexpr, PAGE: tl.constexpr):
    """Pages to score for a unit (ROWS query rows of one request): those of its longest row that is not skipped."""
    units_per_request = tl.cdiv(rows_per_request, ROWS)
    request = unit // units_per_request
    first = (unit % units_per_request) * ROWS
    longest = unit * 0
    for r in tl.static_range(ROWS):
        inside = (unit < units) & (first + r < rows_per_request)
        length = tl.load(lengths_ptr + request * rows_per_request + first + r, mask=inside, other=0)
        length = tl.minimum(length, width)
        longest = tl.maximum(longest, tl.where(length > skip_length, length, 0))
    return tl.cdiv(longest, PAGE)


@triton.jit
def _indexer_logits_kernel(
    q_ptr,
    keys_ptr,
    scales_ptr,
    weights_ptr,
    lengths_ptr,
    table_ptr,
    out_ptr,
    units,
    rows_per_request,
    width,
    skip_length,
    table_stride,
    out_stride,
    UNITS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    if UNITS > 0:
        unit_ids = tl.arange(0, UNITS)
        pages = _unit_pages(lengths_ptr, unit_ids, units, rows_per_request, width, skip_length, ROWS, PAGE)
        total = tl.sum(pages)
        active = tl.sum((pages > 0).to(tl.int32))
        # sum(ceil(pages / share)) <= total / share + active: one item a program whenever half of them suffice.
        share = tl.maximum(tl.cdiv(total, tl.maximum(programs - active, programs // 2)), 1)
        items = tl.cdiv(pages, share)
        ends = tl.cumsum(items)
        item_count = tl.sum(items)
    else:
        item_count = programs

    units_per_request = tl.cdiv(rows_per_request, ROWS)
    tokens = tl.arange(0, PAGE)
    dims = tl.arange(0, DIM)
    heads = tl.arange(0, HEADS)
    key_offsets = tokens[:, None] * DIM + dims[None, :]

    for item in range(pid, item_count, programs):
        if UNITS > 0:
            done = ends <= item
            unit = tl.sum(done.to(tl.int32))
            part = item - tl.sum(tl.where(done, items, 0))
            unit_pages = _unit_pages(lengths_ptr, unit, units, rows_per_request, width, skip_length, ROWS, PAGE)
            parts = tl.cdiv(unit_pages, share)
        else:
            unit = item // SPLITS
            part = item % SPLITS
            unit_pages = _unit_pages(lengths_ptr, unit, units, rows_per_request, width, skip_length, ROWS, PAGE)
            parts = SPLITS
        begin = part * unit_pages // parts
        end = (part + 1) * unit_pages // parts

        request = unit // units_per_request
        first = (unit % units_per_request) * ROWS
        row = (request * rows_per_request + first).to(tl.int64)
        rows_here = tl.minimum(rows_per_request - first, ROWS)
        table = table_ptr + request.to(tl.int64) * table_stride

        queries = ()
        weights = ()
        lengths = ()
        for r in tl.static_range(ROWS):
            inside = r < rows_here
            row_heads = (row + r) * HEADS + heads
            queries = queries + (tl.load(q_ptr + row_heads[:, None] * DIM + dims[None, :], mask=inside, other=0.0),)
            weights = weights + (tl.load(weights_ptr + row_heads, mask=inside, other=0.0),)
            length = tl.load(lengths_ptr + row + r, mask=inside, other=0)
            lengths = lengths + (tl.minimum(tl.where(length > skip_length, length, 0), width),)

        for i in tl.range(begin, end, num_stages=STAGES):
            page = tl.load(table + i).to(tl.int64)
            keys = tl.load(keys_ptr + page * (PAGE * (DIM + 4)) + key_offsets)
            scales = tl.load(scales_ptr + page * (PAGE * (DIM + 4) // 4) + PAGE * DIM // 4 + tokens)
            positions = i * PAGE + tokens
            for r in tl.static_range(ROWS):
                scores = tl.dot(keys, tl.trans(queries[r]))
                scores = tl.maximum(scores, 0.0) * weights[r][None, :]
                logits = tl.sum(scores, axis=1) * scales
                tl.store(out_ptr + (row + r) * out_stride + positions, logits, mask=positions < lengths[r])


@dataclasses.dataclass(frozen=True)
class Plan:
    """Launch parameters of one call; nothing in them depends on the lengths.

    Attributes:
        rows: query rows that share one read of K (a unit).
        units: units in the call.
        balanced_units: power of two >= units when the programs share out all pages evenly; 0 when each unit is cut
            into `splits` equal parts instead (so many units that they balance by themselves).
        splits: parts of a unit in the second case.
        programs: programs of the grid.
        registers: most registers a thread, None for the compiler's choice.
    """

    rows: int
    units: int
    balanced_units: int
    splits: int
    programs: int
    registers: int | None


def plan(requests: int, rows_per_request: int, max_pages: int, sms: int, capability: tuple[int, int]) -> Plan:
    """Choose launch parameters.

    Args:
        requests: requests in the call.
        rows_per_request: query rows of each.
        max_pages: pages that fit the page table and the output's width.
        sms: streaming multiprocessors of the GPU.
        capability: its compute capability.
    """
    rows = min(rows_per_request, MAX_ROWS)
    units = requests * triton.cdiv(rows_per_request, rows)
    resident = sms * PROGRAMS_PER_SM.get(capability, {}).get(rows, 2)
    registers = REGISTERS.get(capability, {}).get(rows)
    if units <= MAX_BALANCED_UNITS:
        return Plan(rows, units, triton.next_power_of_2(units), 1, min(resident, units * (max_pages + 1)), registers)
    splits = max(1, min(max_pages, 4 * resident // units))
    return Plan(rows, units, 0, splits, units * splits, registers)


def indexer_logits(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor,
    width: int,
    *,
    out: torch.Tensor | None = None,
    skip_length: int = 0,
    check: bool = False,
) -> torch.Tensor:
    """Score each compressed token t of a request for each of its query rows.

    logits[row, t] = scale[t] * sum over heads h of weights[row, h] * max(0, q[row, h] . k[t])

    One launch. The programs share out the pages of all rows evenly by the lengths found on the GPU, so the call can
    be captured in a CUDA graph and replayed with other lengths. Two rows of a request share each page they
    load, and the units of a request run side by side, so that the others find it in the L2 cache: pass the draft tokens
    of a request, or the rows of a prefill chunk, as rows_per_request.

    Args:
        q: [requests, rows_per_request, 64, 128] float8_e4m3fn, contiguous.
        cache: indexer K, uint8 or float8_e4m3fn, contiguous, 8448 bytes a page in its first dimension: 64 tokens x 128
            e4m3, then 64 float32 scales.
        weights: [requests * rows_per_request, 64] float32, contiguous: head weights with every other factor folded in.
        lengths: [requests * rows_per_request] int32: tokens each row sees. Longer than width or the page table counts
            as that limit.
        page_table: [requests, pages] int32, last dimension contiguous: page ids; read up to each request's length only.
        width: columns of the result, tokens.
        out: float32 [requests * rows_per_request, width], last dimension contiguous; allocated when None. Columns at
            or past a row's length are not written.
        skip_length: rows of at most so many tokens are not scored at all (top-k takes all their tokens anyway).
        check: also verify lengths and page ids against their ranges. For debugging: it waits for the GPU and copies
            lengths and page table to the CPU, so it cannot be used under graph capture.

    Returns:
        The logits, float32 [requests * rows_per_request, width].

    Raises:
        ValueError: a wrong dtype, shape, stride, head count, page size or device; with check, an index out of range.

    The layout is SGLang 0.5.23's (`get_index_k_with_scale_buffer`), the formula its fp8_paged_mqa_logits.
    """
    if q.ndim != 4 or q.shape[2:] != (HEADS, HEAD_DIM):
        raise ValueError(f"q must be [requests, rows, {HEADS}, {HEAD_DIM}], got {list(q.shape)}")
    requests, rows_per_request = q.shape[:2]
    rows = requests * rows_per_request
    require(q, "q", torch.float8_e4m3fn, tuple(q.shape))
    require(weights, "weights", torch.float32, (rows, HEADS))
    require(lengths, "lengths", torch.int32, (rows,))
    if cache.dtype not in (torch.uint8, torch.float8_e4m3fn):
        raise ValueError(f"cache must be uint8 or float8_e4m3fn, got {cache.dtype}")
    if cache.ndim < 2 or not cache.is_contiguous() or cache.shape[1:].numel() != PAGE_BYTES:
        raise ValueError(
            f"cache must be contiguous with {PAGE_BYTES} bytes ({PAGE_TOKENS} tokens) a page in its first dimension, "
            f"got shape {list(cache.shape)}, strides {cache.stride()}"
        )
    require_rows(page_table, "page_table", torch.int32, requests)
    if width < 1 or skip_length < 0:
        raise ValueError(f"width must be positive and skip_length not negative, got {width} and {skip_length}")
    if out is None:
        out = torch.empty((rows, width), dtype=torch.float32, device=q.device)
    require_rows(out, "out", torch.float32, rows)
    if out.shape[1] != width:
        raise ValueError(f"out must have {width} columns, got {out.shape[1]}")
    require_device(q.device, cache=cache, weights=weights, lengths=lengths, page_table=page_table, out=out)
    max_pages = min(page_table.shape[1], triton.cdiv(width, PAGE_TOKENS))
    if rows == 0 or max_pages == 0:
        return out
    if check:
        check_page_table(lengths, page_table, width, PAGE_TOKENS, cache.shape[0])

    chosen = plan(requests, rows_per_request, max_pages, sm_count(q.device), capability(q.device))
    pages = cache.view(cache.shape[0], PAGE_BYTES)
    pdl = has_dependent_launch(q.device)
    _indexer_logits_kernel[(chosen.programs,)](
        q,
        pages.view(torch.float8_e4m3fn),
        pages.view(torch.float32),
        weights,
        lengths,
        page_table,
        out,
        chosen.units,
        rows_per_request,
        min(width, page_table.shape[1] * PAGE_TOKENS),
        skip_length,
        page_table.stride(0),
        out.stride(0),
        UNITS=chosen.balanced_units,
        SPLITS=chosen.splits,
        ROWS=chosen.rows,
        STAGES=STAGES,
        HEADS=HEADS,
        DIM=HEAD_DIM,
        PAGE=PAGE_TOKENS,
        PDL=pdl,
        num_warps=WARPS,
        maxnreg=chosen.registers,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def serving_calls() -> Iterator[Callable[[], object]]:
    """One query row a request over the longest context, with and without skipping rows that top-k takes whole."""
    width = serving.CONTEXT // 4
    for requests in serving.BATCHES:
        arguments = (
            torch.zeros(requests, 1, HEADS, HEAD_DIM, dtype=torch.float8_e4m3fn),
            torch.zeros(2, PAGE_BYTES, dtype=torch.uint8),
            torch.zeros(requests, HEADS),
            torch.zeros(requests, dtype=torch.int32),
            torch.zeros(requests, width // PAGE_TOKENS, dtype=torch.int32),
            width,
        )
        for skip_length in (0, TOPK):
            yield functools.partial(indexer_logits, *arguments, skip_length=skip_length)


def compile_cases() -> Iterator[CompileCase]:
    """Launches for one and two rows a unit, few and many requests, and a prefill chunk of more than 512 units."""
    pointers = ("scales_ptr", "weights_ptr", "out_ptr")
    arguments = {
        "q_ptr": "*fp8e4nv:16",
        "keys_ptr": "*fp8e4nv:16",
        **dict.fromkeys(pointers, "*fp32:16"),
        **dict.fromkeys(("lengths_ptr", "table_ptr"), "*i32:16"),
        **dict.fromkeys(("units", "rows_per_request", "skip_length"), "i32"),
        **dict.fromkeys(("width", "table_stride", "out_stride"), "i32:16"),
    }
    for rows in (1, 2):
        for units in (1, 16, 64, 512, 0):
            yield CompileCase(
                op="indexer_logits",
                shape=f"{rows} rows a unit, " + (f"up to {units} units" if units else "over 512 units"),
                kernel=_indexer_logits_kernel,
                arguments=arguments,
                constexprs={
                    "UNITS": units,
                    "SPLITS": 1,
                    "ROWS": rows,
                    "STAGES": STAGES,
                    "HEADS": HEADS,
                    "DIM": HEAD_DIM,
                    "PAGE": PAGE_TOKENS,
                    "PDL": True,
                },
                num_warps=WARPS,
                uses_mma=True,
                options={"maxnreg": REGISTERS[12, 0].get(rows), "launch_pdl": True},
            )
