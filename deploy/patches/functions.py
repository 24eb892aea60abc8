"""Functions in the text of a Python module, without importing it. Pure functions."""

import ast
from collections.abc import Iterator

from deploy.patches.text import changed_lines

MODULE = "(module)"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def touched_functions(before: str, after: str) -> tuple[str, ...]:
    """Qualified names of the functions in which two texts of a module differ; `(module)` for a line in none.

    Empty lines do not count.

    Raises:
        SyntaxError: one of them is not Python.
    """
    if before == after:
        return ()
    gone, come = changed_lines(before, after)
    return tuple(sorted(_owners(before, gone) | _owners(after, come)))


def _owners(text: str, lines: set[int]) -> set[str]:
    spans = [(_first_line(node), node.end_lineno or node.lineno, name) for name, node in functions(ast.parse(text))]
    owners: set[str] = set()
    for line in {number for number, content in enumerate(text.splitlines(), 1) if content.strip()} & lines:
        inside = [(first, name) for first, last, name in spans if first <= line <= last]
        # The innermost starts last.
        owners.add(max(inside)[1] if inside else MODULE)
    return owners


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its qualified name, nested ones too."""
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, Function | ast.ClassDef):
            inner = f"{prefix}{child.name}."
            if isinstance(child, Function):
                yield inner[:-1], child
        yield from functions(child, inner)


def _first_line(node: Function) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
