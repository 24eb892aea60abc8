"""Functions of SGLang, taken out of its source files so that they run where SGLang itself is not installed."""

from __future__ import annotations

import ast
import importlib.util
import os
from pathlib import Path
from typing import Any

ENVIRONMENT = "SGLANG_SOURCE"


def source_root() -> Path | None:
    """Folder `sglang` of the unpacked wheel that SGLANG_SOURCE names, or of the installed package, or None."""
    if named := os.environ.get(ENVIRONMENT):
        return Path(named) / "sglang"
    found = importlib.util.find_spec("sglang")
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None


def load(path: str, *names: str, **given: Any) -> tuple[Any, ...]:
    """Functions and constants of one source file, executed without the file's other imports.

    Args:
        path: the file, relative to the folder `sglang`.
        names: the functions to return.
        given: names that the file imports and the functions use.

    Raises:
        FileNotFoundError: there is no SGLang source, or not this file.
        KeyError: the file does not define a name.
    """
    root = source_root()
    if root is None:
        raise FileNotFoundError(f"SGLang is not installed; set {ENVIRONMENT} to the folder of an unpacked wheel")
    file = root / path
    tree = ast.parse(file.read_text(), str(file))
    wanted = [node for node in tree.body if _is_constant(node) or _is_simple_import(node) or _is_function(node)]
    scope: dict[str, Any] = {"__name__": f"upstream:{path}", **given}
    # Triton reads a kernel's source through its file, so each definition keeps its place in it.
    for node in wanted:
        try:
            exec(compile(ast.Module([node], []), str(file), "exec"), scope)
        except NameError:
            # Decorated or annotated with something that was not given; asked for by name, it fails below.
            continue
    return tuple(scope[name] for name in names)


def _is_function(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef)


def _is_constant(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)


def _is_simple_import(node: ast.stmt) -> bool:
    """An import of the standard library, torch or Triton."""
    allowed = ("logging", "math", "typing", "functools", "enum", "torch", "triton", "__future__")
    if isinstance(node, ast.Import):
        return all(alias.name.split(".")[0] in allowed for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in allowed
