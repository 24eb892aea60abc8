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
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{place}: {mistake(first)}{more}".removeprefix(": ")
