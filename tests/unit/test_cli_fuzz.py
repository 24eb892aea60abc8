"""Every verb, walked by the program's own description: what is wrong is refused before anything is done."""

from collections.abc import Iterator

import pytest
from program import PROGRAM, VERBS

WORDS = ("", "nan", "x", "1e3x", "1" * 5000, "\udcff", "--json")
NUMBERS: tuple[type, ...] = (int, float)


def refused(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        PROGRAM.main([*arguments], prog_name="deploy")
    assert ended.value.code == 2, arguments


def number_options() -> Iterator[tuple[str, ...]]:
    for path, command in VERBS:
        for parameter in command.params:
            described = getattr(parameter, "type_descriptor", None)
            if parameter.param_type_name == "option" and described and described.annotation in NUMBERS:
                yield (*path, parameter.opts[0])


def test_the_walk_finds_the_verbs_and_their_numbers() -> None:
    assert {("up",), ("bench", "compare"), ("export", "kubernetes"), ("model", "fetch")} <= {path for path, _ in VERBS}
    assert ("plan", "--rps") in set(number_options())


@pytest.mark.parametrize("path", [path for path, _ in VERBS if path != ("docker", "run")], ids=" ".join)
def test_an_option_that_no_verb_has_is_refused(path: tuple[str, ...]) -> None:
    refused(*path, "--no-such-option")


@pytest.mark.parametrize("option", list(number_options()), ids=" ".join)
def test_what_is_no_number_is_refused(option: tuple[str, ...]) -> None:
    *path, name = option
    for word in WORDS:
        refused(*path, f"{name}={word}" if name.startswith("--") else f"{name}{word}")
