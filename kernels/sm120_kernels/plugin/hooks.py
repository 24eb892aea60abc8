"""Installs the enabled hooks in SGLang and proves that they are in place.

SGLang only logs a plug-in that fails and serves on without it. Here everything that is not as expected ends the
process with SystemExit, which SGLang lets through.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import os
import pkgutil
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from sm120_kernels.plugin.table import Hook, enabled
from sm120_kernels.plugin.upstream import function_sha256

CHECK = "SGLANG_SM120_CHECK"
# What `deploy verify` reads: the targets that are replaced.
REPORT = Path("/tmp/sm120_kernels/hooks.json")

logger = logging.getLogger(__name__)


def activate() -> None:
    """Entry point `sglang.srt.plugins`; does nothing where no switch is on.

    Raises:
        SystemExit: a switch has no valid value, a target is missing or is not the function the hook was written
            against, or the replacement did not take effect.
    """
    try:
        hooks = enabled(os.environ)
        if hooks:
            install(hooks, os.environ)
    except (AttributeError, ImportError, KeyError, LookupError, OSError, ValueError) as error:
        raise SystemExit(f"sm120_kernels: {error}") from error


def install(hooks: tuple[Hook, ...], environment: Mapping[str, str]) -> None:
    """Replace each hook's target and check that SGLang now calls the replacement.

    Raises:
        ImportError, AttributeError: a target is not there.
        LookupError: a target is another function than the hook was written against, or was not replaced.
    """
    registry: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    checked = environment.get(CHECK, "") == "1"
    for hook in hooks:
        require_upstream(hook)
    for hook in hooks:
        registry.HookRegistry.register(hook.target, Replacement(hook, hooks, checked), registry.HookType.AROUND)
    # SGLang does this again once all plug-ins have run; by then it is too late to refuse to start.
    registry.HookRegistry.apply_hooks()
    for hook in hooks:
        if not is_replaced(hook):
            raise LookupError(f"{hook.target} was not replaced; SGLang's log above says why")
    _report([hook.target for hook in hooks])
    logger.info("sm120_kernels: %d hooks in place: %s", len(hooks), ", ".join(hook.function for hook in hooks))


def require_upstream(hook: Hook) -> None:
    """Refuse a target that is not the function the hook was written against, or another function that it counts on.

    Raises:
        ImportError, AttributeError: one is not there.
        LookupError: one is another.
    """
    original(hook.target)
    for path, sha256 in hook.sources:
        function = original(path)
        found = function_sha256(Path(inspect.getfile(function)).read_text(encoding="utf-8"), function.__qualname__)
        if found != sha256:
            raise LookupError(
                f"{path} is not the function that {hook.op} was written against (sha256 {found[:12]}, not "
                f"{sha256[:12]}); compare both and renew the hash in plugin/table.py, or set {hook.switch}=0"
            )


def original(path: str) -> Callable[..., Any]:
    """The function under a dotted path, without what hooks and decorators put around it.

    Raises:
        ImportError, AttributeError: it is not there.
    """
    owner, _, name = path.rpartition(".")
    function = getattr(pkgutil.resolve_name(owner), name)
    return inspect.unwrap(function.fget if isinstance(function, property) else function)


def is_replaced(hook: Hook) -> bool:
    """Whether a call of the target now reaches a replacement."""
    function = getattr(pkgutil.resolve_name(hook.owner), hook.function)
    while function is not None:
        if any(isinstance(cell.cell_contents, Replacement) for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


class Replacement:
    """Calls the op instead of SGLang's function, and SGLang's where the op does not take the arguments.

    Under a CUDA graph this runs at capture only, so calls are counted there and not at each replay.
    """

    def __init__(self, hook: Hook, active: tuple[Hook, ...], checked: bool) -> None:
        # Late: the ops load Triton, which an engine without hooks need not wait for.
        from sm120_kernels.plugin import adapters

        self.hook = hook
        self._name = f"{hook.op} ({hook.function})"
        self._adapter: adapters.Adapter = getattr(adapters, hook.adapter)(active)
        self._checked = checked
        self._refused: set[str] = set()

    def __call__(self, upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            result = self._adapter.run(*args, **kwargs)
        except ValueError as reason:
            self._count("upstream")
            if str(reason) not in self._refused:
                self._refused.add(str(reason))
                logger.warning("sm120_kernels: %s falls back to SGLang: %s", self._name, reason)
            return upstream(*args, **kwargs)
        self._count("ours")
        if self._checked and not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            error = self._adapter.error(upstream, result, *args, **kwargs)
            _metrics()[1].labels(self.hook.op, self.hook.function).set(error)
            logger.info("sm120_kernels: %s differs from SGLang by %.2e", self._name, error)
        return result

    def _count(self, path: str) -> None:
        _metrics()[0].labels(self.hook.op, self.hook.function, path).inc()


@cache
def _metrics() -> tuple[Any, Any]:
    # Late: SGLang chooses the folder of its multi-process metrics after the plug-ins have run.
    from prometheus_client import Counter, Gauge

    return (
        Counter("sm120_kernels_calls", "Calls of a replaced function by what served them.", ["op", "function", "path"]),
        Gauge("sm120_kernels_error", f"Last difference from SGLang's result ({CHECK}=1).", ["op", "function"]),
    )


def _report(targets: list[str]) -> None:
    """Every process of an engine writes the same file, so each puts it in place whole."""
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=REPORT.parent, delete=False) as file:
        json.dump(targets, file)
    Path(file.name).replace(REPORT)
