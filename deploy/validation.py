"""What pydantic found wrong, in words for people."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError


def mistake(item: Mapping[str, Any]) -> str:
    """One of `ValidationError.errors()`; what a validator itself said comes without the kind of its exception."""
    if item["type"] in ("value_error", "assertion_error"):
        return str(item["ctx"]["error"])
    return str(item["msg"])


def first_mistake(error: ValidationError) -> str:
    """Where the first mistake stands, what it is, and how many more there are, on one line."""
    return mistakes(error, 1)


def mistakes(error: ValidationError, most: int = 10) -> str:
    """Where each of the first mistakes stands and what it is, and how many more there are, on one line."""
    found = error.errors()
    more = f" (and {len(found) - most} more)" if len(found) > most else ""
    return f"{'; '.join(map(_placed, found[:most]))}{more}"


def _placed(item: Mapping[str, Any]) -> str:
    text = f"{'.'.join(map(str, item['loc']))}: {mistake(item)}".removeprefix(": ")
    return " ".join(text.splitlines())
