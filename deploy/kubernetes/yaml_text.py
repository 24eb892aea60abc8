"""Writes YAML for people: keys in our order, and the reason for a value in a comment above it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import yaml

WIDTH = 110


@dataclass(frozen=True)
class Because:
    """A value with its reason, which becomes a comment above it."""

    value: Any
    reason: str


def documents(objects: Iterable[Any]) -> str:
    """Several documents in one file, each after `---` but the first."""
    return "---\n".join(document(item) for item in objects)


def document(value: Any) -> str:
    """One document. A reason at its very top heads it.

    Args:
        value: mappings, sequences, strings, numbers, booleans and None; anywhere among them `Because`.
    """
    reason, value = _apart(value)
    return "\n".join([*_comment(reason, ""), *_block(value, "")]) + "\n"


def plain(value: Any) -> Any:
    """The same value without the reasons."""
    _, value = _apart(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in cast("Mapping[Any, Any]", value).items()}
    if _is_list(value):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    return value


def _apart(value: Any) -> tuple[str, Any]:
    return (value.reason, value.value) if isinstance(value, Because) else ("", value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _block(value: Any, indent: str) -> list[str]:
    """The lines of a value that begins on a line of its own."""
    if isinstance(value, Mapping) and value:
        return [line for key, item in cast("Mapping[Any, Any]", value).items() for line in _entry(key, item, indent)]
    if _is_list(value) and value:
        return [line for item in cast("Sequence[Any]", value) for line in _item(item, indent)]
    return [indent + _scalar(value)]


def _entry(key: Any, item: Any, indent: str) -> list[str]:
    reason, value = _apart(item)
    head = f"{indent}{_scalar(key)}:"
    lines = _comment(reason, indent)
    if _nested(value):
        return [*lines, head, *_block(value, f"{indent}  ")]
    if _is_text(value):
        return [*lines, f"{head} {_header(value)}", *_literal(value, f"{indent}  ")]
    return [*lines, f"{head} {_scalar(value)}"]


def _item(item: Any, indent: str) -> list[str]:
    reason, value = _apart(item)
    lines = _comment(reason, indent)
    if _nested(value):
        inner = _block(value, f"{indent}  ")
        # A dash cannot stand before a comment, so the reason of a first key stands above the dash.
        first = next(place for place, line in enumerate(inner) if not line.lstrip().startswith("#"))
        lines += [line.removeprefix("  ") for line in inner[:first]]
        return [*lines, f"{indent}- {inner[first][len(indent) + 2 :]}", *inner[first + 1 :]]
    if _is_text(value):
        return [*lines, f"{indent}- {_header(value)}", *_literal(value, f"{indent}  ")]
    return [*lines, f"{indent}- {_scalar(value)}"]


def _nested(value: Any) -> bool:
    return (isinstance(value, Mapping) or _is_list(value)) and value not in ({}, [], ())


def _is_text(value: Any) -> bool:
    """Whether a string is a file rather than a word: it is then written as it stands."""
    return (
        isinstance(value, str)
        and value.endswith("\n")
        and not value.startswith((" ", "\n"))
        and all(character == "\n" or (character.isprintable() and character != "\ufeff") for character in value)
    )


def _header(text: str) -> str:
    return "|" if not text.endswith("\n\n") else "|+"


def _literal(text: str, indent: str) -> list[str]:
    return [f"{indent}{line}" if line else "" for line in text[:-1].split("\n")]


def _comment(reason: str, indent: str) -> list[str]:
    """A reason in lines that fit."""
    lines: list[str] = []
    for paragraph in reason.splitlines():
        line = f"{indent}#"
        for word in paragraph.split():
            if len(line) + 1 + len(word) > WIDTH and not line.endswith("#"):
                lines.append(line)
                line = f"{indent}#"
            line += f" {word}"
        lines.append(line)
    return lines


def _scalar(value: Any) -> str:
    """A scalar, or an empty collection, on one line, as PyYAML quotes it."""
    style = '"' if isinstance(value, str) and not value.isprintable() else None
    dump: Callable[..., str] = yaml.safe_dump  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    text = dump(value, default_flow_style=True, default_style=style, width=1_000_000, allow_unicode=True)
    return text.removesuffix("\n...\n").rstrip("\n")
