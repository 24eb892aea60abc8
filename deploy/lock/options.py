"""Command lines as options and their values."""

from collections.abc import Iterable


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
