"""Command lines as options and their values, and what an engine reports for them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True)
class Contradiction:
    """An option for which an engine reports another value than it was locked with, both in words."""

    key: str
    expected: str
    found: str


def options(arguments: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Sort a command line into options and their values: `--a=1 --b 2 3 --c` is a: 1; b: 2, 3; c: nothing.

    What comes before the first option is kept under the empty name. Of an option that comes twice, the last counts.
    """
    found: dict[str, tuple[str, ...]] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            found[name] = (value,) if equals else ()
        else:
            found[name] = (*found.get(name, ()), argument)
    return found


def contradictions(arguments: Iterable[str], report: Mapping[str, Any]) -> list[Contradiction]:
    """Compare each option with the value that the engine itself reports for it (`/server_info` of SGLang)."""
    found: list[Contradiction] = []
    for option, values in options(arguments).items():
        key = option.removeprefix("--").replace("-", "_")
        if option and key not in report:
            found.append(Contradiction(key, words(values), "not reported"))
        elif option and not agrees(values, report[key]):
            found.append(Contradiction(key, words(values), str(report[key])))
    return found


def words(values: tuple[str, ...]) -> str:
    """An option's values for people."""
    return " ".join(values) if values else "set"


def agrees(values: tuple[str, ...], reported: Any) -> bool:
    """Is a reported value the one that an option's words stand for?

    Args:
        values: the words after the option; none for a switch.
        reported: as JSON has it.
    """
    if not values:
        return reported is True
    if isinstance(reported, list):
        items = cast("list[Any]", reported)
        return len(items) == len(values) and all(_equal(*pair) for pair in zip(values, items, strict=True))
    return len(values) == 1 and _equal(values[0], reported)


def _equal(word: str, reported: Any) -> bool:
    if isinstance(reported, bool):
        return word.lower() == str(reported).lower()
    if isinstance(reported, int | float):
        try:
            return float(word) == reported
        except ValueError:
            return False
    return word == reported
