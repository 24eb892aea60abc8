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
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{_placed(error.errors()[0])}{more}"


def all_mistakes(error: ValidationError) -> str:
    """Where each mistake stands and what it is, on one line."""
    return "; ".join(map(_placed, error.errors()))


def _placed(item: Mapping[str, Any]) -> str:
    return f"{'.'.join(map(str, item['loc']))}: {mistake(item)}".removeprefix(": ")
