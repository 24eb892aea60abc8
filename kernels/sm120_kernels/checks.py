"""Argument checks the launchers share."""

from __future__ import annotations

import functools

import torch


def require(tensor: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is not contiguous, of `dtype` and of `shape`.

    Raises:
        ValueError: says which of the three it is, and both values.
    """
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()} for shape {list(shape)}")


def require_index(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    """Refuse a tensor that is not contiguous, of `shape` and int32 or int64, which is what SGLang keeps positions in.

    Raises:
        ValueError: says which of the three it is, and both values.
    """
    if tensor.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be torch.int32 or torch.int64, got {tensor.dtype}")
    require(tensor, name, tensor.dtype, shape)


def require_rows(tensor: torch.Tensor, name: str, dtype: torch.dtype, rows: int) -> None:
    """Refuse a tensor that is not a `dtype` matrix of `rows` rows, each contiguous; rows may lie apart.

    Raises:
        ValueError: says which of them it is, and both values.
    """
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
    if tensor.ndim != 2 or tensor.shape[0] != rows:
        raise ValueError(f"{name} must have {rows} rows and two dimensions, got shape {list(tensor.shape)}")
    if tensor.shape[1] > 1 and tensor.stride(1) != 1:
        raise ValueError(f"{name}'s rows must be contiguous, got strides {tensor.stride()}")


def require_block_scale(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> None:
    """Refuse scales that are not contiguous, of `shape` and float32 or UE8M0 (float8_e8m0fnu, or its bytes as uint8).

    Raises:
        ValueError: says which of the three it is, and both values.
    """
    if tensor.dtype not in (torch.float32, torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(f"{name} must be float32, float8_e8m0fnu or uint8, got {tensor.dtype}")
    require(tensor, name, tensor.dtype, shape)


def require_device(device: torch.device, **tensors: torch.Tensor | None) -> None:
    """Refuse tensors on another device.

    Raises:
        ValueError: names the first such tensor.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, the first argument on {device}")


def check_page_table(lengths: torch.Tensor, page_table: torch.Tensor, limit: int, page_size: int, pages: int) -> None:
    """Read lengths and the page ids they use back from the GPU and compare them with their ranges.

    Args:
        lengths: [rows] tokens of each row; the rows of one page-table row follow each other.
        page_table: [requests, columns] page ids.
        limit: most tokens a row may have.
        page_size: tokens a page.
        pages: pages of the cache, or 0 when unknown: then only negative ids are refused.

    Raises:
        ValueError: names the first row that is out of range, its value and the range.
    """
    per_row = lengths.cpu()
    limit = min(limit, page_table.shape[1] * page_size)
    bad = torch.nonzero((per_row < 0) | (per_row > limit)).flatten()
    if len(bad):
        row = int(bad[0])
        raise ValueError(f"length of row {row} is {int(per_row[row])}, must be 0 to {limit}")
    requests = page_table.shape[0]
    used = (per_row.view(requests, -1).amax(dim=1) + page_size - 1) // page_size
    ids = page_table.cpu()
    inside = torch.arange(ids.shape[1])[None, :] < used[:, None]
    wrong = torch.nonzero(inside & ((ids < 0) | (ids >= pages if pages else torch.zeros_like(inside))))
    if len(wrong):
        request, column = (int(x) for x in wrong[0])
        bound = f"0 to {pages - 1}" if pages else "0 or more"
        raise ValueError(f"page id {int(ids[request, column])} of request {request}, page {column}, must be {bound}")


@functools.cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 for the CPU, where Triton's interpreter runs one program at a time."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU; (0, 0) for the CPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start while the one before it runs (programmatic dependent launch).

    A kernel launched so executes `gdc_wait` before it reads or writes anything that another kernel of the step touches,
    also where it needs nothing from the one right before: then every later one may rely on all earlier ones. Before it
    waits it may read weights, tables and what is set before a step (positions); and, where the one before it is an
    ordinary launch, what was complete when that one began.

    A caller that knows the kernel right before may say of an input that it is `settled`: not written by that kernel,
    which lets this one start only after its own wait (the linears do, and `store_attention_inputs`). Then this one
    works beside it, and waits only before it writes; after that it lets the next one start.

    With queries, `store_attention_inputs` is beside the query projection in this way; only its programs for the queries
    wait for it before they read.

    One kernel goes further: the second of `moe_fp4_small_batch` reads what single programs of the first have counted as
    done, and waits at its end.
    """
    return capability(device) >= (9, 0)
