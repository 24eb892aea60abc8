"""JSON whose shape is not known."""

from __future__ import annotations

import json
from typing import Any, cast


def parse(text: str) -> Any:
    """A JSON document. Raises ValueError for what is none, or is one that cannot be written again."""
    try:
        data = json.loads(text)
        json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("brackets in brackets, thousands deep") from None
    return data


def mapping(value: object) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def sequence(value: object) -> list[Any]:
    """The value if it is a JSON array, else an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []
