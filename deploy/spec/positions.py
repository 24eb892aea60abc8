"""Where each key and array element of a TOML text stands, so that an error can name line and column."""

import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

import tree_sitter_toml
from tree_sitter import Language, Node, Parser

Path = tuple[str | int, ...]
_TABLES = {"table", "table_array_element"}
_KEYS = {"bare_key", "quoted_key", "dotted_key"}
_SYNTAX = {"comment", "[", "]", "[[", "]]", "{", "}", ",", "="}


class Position(NamedTuple):
    """Line and column, both counted from 1; columns count characters."""

    line: int
    column: int


def positions(text: str) -> dict[Path, Position]:
    """Map the path of every table, key and array element in `text` to its position.

    Args:
        text: a TOML document that `tomllib` accepts.

    Returns:
        A path is the sequence of keys (and indices into arrays) that leads to a value.
        A table named in several places has the position of the first.
    """
    found: dict[Path, Position] = {}
    lines = text.encode().split(b"\n")
    arrays: dict[Path, int] = {}
    root = Parser(Language(tree_sitter_toml.language())).parse(text.encode()).root_node
    for path, node in _walk(root, (), arrays):
        row, byte = node.start_point
        found.setdefault(path, Position(row + 1, len(lines[row][:byte].decode()) + 1))
    return found


def _walk(node: Node, prefix: Path, arrays: dict[Path, int]) -> Iterator[tuple[Path, Node]]:
    for child in node.named_children:
        if child.type == "pair":
            yield from _pair(child, prefix, arrays)
        elif child.type in _TABLES:
            key = next(part for part in child.named_children if part.type in _KEYS)
            path = _resolve(_names(key), arrays)
            yield from _parents(path, key)
            if child.type == "table_array_element":
                index = arrays.get(path, -1) + 1
                arrays[path] = index
                path = (*path, index)
                yield path, key
            yield from _walk(child, path, arrays)


def _pair(pair: Node, prefix: Path, arrays: dict[Path, int]) -> Iterator[tuple[Path, Node]]:
    key, value = (part for part in pair.named_children if part.type != "comment")
    path = (*prefix, *_names(key))
    yield from ((path[:depth], key) for depth in range(len(prefix) + 1, len(path) + 1))
    yield from _value(value, path, arrays)


def _value(value: Node, path: Path, arrays: dict[Path, int]) -> Iterator[tuple[Path, Node]]:
    if value.type == "inline_table":
        yield from _walk(value, path, arrays)
    elif value.type == "array":
        elements = (element for element in value.named_children if element.type not in _SYNTAX)
        for index, element in enumerate(elements):
            yield (*path, index), element
            yield from _value(element, (*path, index), arrays)


def _parents(path: Path, key: Node) -> Iterator[tuple[Path, Node]]:
    return ((path[:depth], key) for depth in range(1, len(path) + 1))


def _resolve(names: Path, arrays: dict[Path, int]) -> Path:
    """`[fruit.size]` after `[[fruit]]` belongs to the array's last element."""
    path: Path = ()
    for depth, name in enumerate(names):
        path = (*path, name)
        if path in arrays and depth < len(names) - 1:
            path = (*path, arrays[path])
    return path


def _names(key: Node) -> Path:
    """The key's parts, with quotes and escapes undone by tomllib itself."""
    names: list[str] = []
    value: Any = tomllib.loads(f"{key.text.decode() if key.text else ''} = 0")
    while isinstance(value, dict):
        name, value = next(iter(value.items()))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        names.append(str(name))  # pyright: ignore[reportUnknownArgumentType]
    return tuple(names)
