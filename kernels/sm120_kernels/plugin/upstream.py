"""Which function of SGLang a hook was written against: a hash of its source text, without importing anything."""

from __future__ import annotations

import ast
import hashlib


def function_sha256(source_text: str, qualified_name: str) -> str:
    """Hash of a function's own lines, decorators included, as they stand in the file.

    Args:
        source_text: of the module.
        qualified_name: inside the module, with dots: "function" or "Class.method".

    Raises:
        KeyError: the module defines no such function.
        SyntaxError: the text is not Python.
    """
    body = ast.parse(source_text).body
    *classes, name = qualified_name.split(".")
    for outer in classes:
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == outer), [])
    # A later definition of the same name is the one that counts.
    for node in reversed(body):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            lines = source_text.splitlines(keepends=True)[first - 1 : node.end_lineno]
            return hashlib.sha256("".join(lines).encode()).hexdigest()
    raise KeyError(qualified_name)
