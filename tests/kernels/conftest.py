"""Runs the kernels in Triton's interpreter on the CPU. The variable is read when a kernel is defined."""

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import triton.runtime.interpreter as interpreter


class Memory:
    """What the arguments of the running kernel occupy: first addresses and ends of their storages, both ascending."""

    def __init__(self) -> None:
        self.begins = self.ends = np.zeros(0, dtype=np.uint64)

    def hold(self, arguments: list[Any]) -> None:
        """Take over the storages of a launch's tensors."""
        storages = [one.untyped_storage() for one in arguments if hasattr(one, "untyped_storage")]
        ranges = sorted({(one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages})
        self.begins, self.ends = np.array(ranges, dtype=np.uint64).reshape(-1, 2).T

    def require(self, pointers: Any, mask: Any, verb: str) -> None:
        """Refuse an access outside of them; pointers and mask are the interpreter's, of one shape."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)].astype(np.uint64)
        if not addresses.size:
            return
        place = np.searchsorted(self.begins, addresses, side="right")
        inside = (place > 0) & (addresses + np.uint64(size) <= self.ends[np.maximum(place, 1) - 1])
        if not inside.all():
            raise IndexError(f"a kernel {verb} {(~inside).sum()} places outside its arguments")


@pytest.fixture(autouse=True)
def no_kernel_leaves_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU such an access goes unseen as long as something else lies there."""
    memory = Memory()
    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    take_arguments, load, store = executor._init_args_hst, builder.create_masked_load, builder.create_masked_store
    atomic = builder.create_atomic_rmw

    def held(self: Any, arguments: Any, named: Any) -> Any:
        found, found_named = take_arguments(self, arguments, named)
        memory.hold([*found, *found_named.values()])
        return found, found_named

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        memory.require(pointers, mask, "reads")
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.require(pointers, mask, "writes")
        return store(self, pointers, value, mask, *rest)

    def checked_atomic(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        memory.require(pointers, mask, "counts in")
        return atomic(self, operation, pointers, value, mask, *rest)

    monkeypatch.setattr(executor, "_init_args_hst", held)
    monkeypatch.setattr(builder, "create_masked_load", checked_load)
    monkeypatch.setattr(builder, "create_masked_store", checked_store)
    monkeypatch.setattr(builder, "create_atomic_rmw", checked_atomic)
