"""Helpers every parser needs: clean lines, and numbers that are None when they are none."""

import re

_ESCAPE = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]|\x1b\([A-Z0-9]|[\x00-\x08\x0b-\x1f\x7f]")
_NUMBER = re.compile(r"[-+]?\d{1,18}(?:\.\d{1,18})?")
_PCI = re.compile(r"(?:([0-9a-fA-F]{4,8}):)?([0-9a-fA-F]{2}):([0-9a-fA-F]{2})\.([0-7])")
LINE_LIMIT = 4096
"""Characters of a line that are looked at: no tool writes longer ones, and patterns stay cheap."""


def lines(text: str) -> list[str]:
    """Lines of a tool's output without terminal escape codes and control characters."""
    return [_ESCAPE.sub("", line[:LINE_LIMIT]).rstrip() for line in text.split("\n")]


def number(text: str | None) -> float | None:
    """The number a text starts with ("85.20 W" is 85.2), or None ("[N/A]")."""
    found = _NUMBER.match(text.strip()) if text else None
    return float(found[0]) if found else None


def integer(text: str | None) -> int | None:
    """The whole number a text starts with, or None."""
    value = number(text)
    return None if value is None else int(value)


def pci_address(text: str | None) -> str | None:
    """The first PCI address in a text in the kernel's form (`0000:41:00.0`), or None.

    The driver writes eight digits for the domain and capitals; lspci may leave the domain out.
    """
    found = _PCI.search(text[:LINE_LIMIT]) if text else None
    if found is None:
        return None
    domain = int(found[1] or "0", 16)
    return f"{domain:04x}:{found[2]}:{found[3]}.{found[4]}".lower()
