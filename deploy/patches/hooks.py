"""Whether the functions that hooks replace are still those that the hooks were written against."""

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

State = Literal["unchanged", "changed", "missing"]
TABLE = "sm120_kernels.plugin.table"
UPSTREAM = "sm120_kernels.plugin.upstream"


@dataclass(frozen=True)
class HookResult:
    """What became of a function that a hook replaces.

    Attributes:
        target: its dotted path.
        file: where it is looked for, below site-packages; empty if there is no such module.
    """

    target: str
    state: State
    file: str


def hook_results(
    pairs: Iterable[tuple[str, str]], tree: Path, function_sha256: Callable[[str, str], str]
) -> list[HookResult]:
    """Compare functions with the hashes that hooks were written against; nothing is imported.

    Args:
        pairs: dotted path of a function, and the hash of its source text.
        tree: folder that holds `sglang/`.
        function_sha256: hashes a function, given the module's text and the name inside it; KeyError if it is missing.
    """
    return [_look(target, sha256, tree, function_sha256) for target, sha256 in pairs]


def _look(target: str, sha256: str, tree: Path, function_sha256: Callable[[str, str], str]) -> HookResult:
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = Path(*parts[:length])
        for file in (module.with_suffix(".py"), module / "__init__.py"):
            if (tree / file).is_file():
                state: State = "missing"
                with suppress(KeyError, SyntaxError):
                    found = function_sha256((tree / file).read_text(encoding="utf-8"), ".".join(parts[length:]))
                    state = "unchanged" if found == sha256 else "changed"
                return HookResult(target, state, str(file))
    return HookResult(target, "missing", "")


def plugin_pairs(root: Path) -> tuple[list[tuple[str, str]], Callable[[str, str], str]] | None:
    """What the plug-in replaces, and how it hashes; None if this checkout has no plug-in.

    Args:
        root: the checkout.
    """
    kernels = root / "kernels"
    if not (kernels / TABLE.replace(".", "/")).with_suffix(".py").is_file():
        return None
    with _importing_from(kernels):
        hooks = import_module(TABLE).HOOKS
        pairs = [pair for hook in hooks for pair in hook.sources]
        return list(dict.fromkeys(pairs)), import_module(UPSTREAM).function_sha256


@contextmanager
def _importing_from(folder: Path) -> Generator[None]:
    """Import the plug-in's package from this folder, whatever else of this name is or will be imported."""
    package = TABLE.split(".")[0]
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == package}
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        sys.modules.update(before)
