"""What the adapters share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from sm120_kernels.plugin.table import Hook

# More rows than this are a prefill chunk, which fills the GPU with a program a row and head group: SGLang's own kernel.
DECODE_ROWS = 256
# The ops that cut a product's depth into shares are made for this many rows (benchmarks/README.md).
SMALL_BATCH = 64


class Adapter(Protocol):
    """What a replaced function needs; made once for each hook."""

    def __init__(self, active: tuple[Hook, ...]) -> None: ...

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the op with SGLang's arguments."""
        ...

    def error(self, upstream: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> float:
        """Distance between the op's result and SGLang's for the same arguments; 0 when equal."""
        ...


class Converted:
    """Another form of a weight, made at its first use and kept as long as the weight.

    Online updates that write into the weight's memory are not seen: an engine with such a hook must be restarted for
    new weights.
    """

    def __init__(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._convert = convert
        self._kept = WeakTensorKeyDictionary()

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        """The other form of `weight`.

        Raises:
            ValueError: its first use is under graph capture, which would keep memory that only a replay fills.
        """
        if weight not in self._kept:
            if capturing():
                raise ValueError("a weight is converted at its first use, which must come before graph capture")
            with torch.inference_mode(False), torch.no_grad():
                self._kept[weight] = self._convert(weight)
        return self._kept[weight]


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def require_rows_at_most(rows: int, limit: int) -> None:
    """Refuse more rows than an op is made for.

    Raises:
        ValueError: says the limit, not the number: it differs from call to call.
    """
    if rows > limit:
        raise ValueError(f"at most {limit} rows")


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """‖ours - theirs‖ / ‖theirs‖ over the elements that are finite in both (SGLang pads heads with anything)."""
    finite = ours.isfinite() & theirs.isfinite()
    ours, theirs = (torch.where(finite, side.double(), 0.0) for side in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def rope_table(freqs_cis: torch.Tensor) -> torch.Tensor:
    """SGLang's complex64 [positions, 32] table as the ops take it: float32 [positions, 64], the same memory."""
    return torch.view_as_real(freqs_cis).flatten(-2)
