"""What pydantic refuses is said in our words: the name of the exception behind it never reaches a person."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program import PROGRAM, VERBS
from pydantic import BaseModel, ValidationError, field_validator, model_validator

from deploy.errors import DeployError
from deploy.lock.model import load as load_lock
from deploy.spec.load import SpecError
from deploy.spec.load import parse as parse_spec
from deploy.stack import generations
from deploy.stack.state import State, write
from deploy.validation import first_mistake, mistake, mistakes
from loadtest import bench
from loadtest.errors import BenchError

PREFIXES = ("Value error", "Assertion failed", "validation error")
WRONG = "wrong for every option"


class Table(BaseModel):
    """A table whose validators raise what they are given."""

    number: int = 0
    said: str = ""

    @field_validator("said")
    @classmethod
    def _value(cls, said: str) -> str:
        if said:
            raise ValueError(said)
        return said

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.number > 9:
            raise AssertionError("too large")
        return self


def refused(**values: object) -> ValidationError:
    with pytest.raises(ValidationError) as found:
        Table.model_validate(values)
    return found.value


@given(st.text(min_size=1).filter(lambda text: "\x00" not in text))
def test_a_validators_own_words_are_all_that_is_said(words: str) -> None:
    error = refused(said=words)
    assert mistake(error.errors()[0]) == words
    assert first_mistake(error) == " ".join(f"said: {words}".splitlines())


def test_a_mistake_of_the_whole_has_no_place_and_others_are_counted() -> None:
    assert first_mistake(refused(number=10)) == "too large"
    assert first_mistake(refused(number="x", said="no")).endswith("(and 1 more)")
    assert first_mistake(refused(number="x")).startswith("number: Input should be a valid integer")


def test_of_many_mistakes_the_first_ten_are_said_and_the_others_counted() -> None:
    class Numbers(BaseModel):
        numbers: list[int]

    def said(count: int) -> str:
        with pytest.raises(ValidationError) as found:
            Numbers.model_validate({"numbers": ["x"] * count})
        return mistakes(found.value)

    assert said(10).count("valid integer") == 10 and "more" not in said(10)
    assert said(10_000).count("valid integer") == 10
    assert "numbers.9:" in said(10_000) and said(10_000).endswith("(and 9990 more)")


def options_with_values() -> Iterator[tuple[str, ...]]:
    for path, command in VERBS:
        for parameter in command.params:
            described = getattr(parameter, "type_descriptor", None)
            if parameter.param_type_name == "option" and described and described.is_choice:
                yield (*path, f"{parameter.opts[0]}={WRONG}")
            elif parameter.param_type_name == "argument" and described and (described.is_choice or described.is_file):
                yield (*path, WRONG)


@pytest.mark.parametrize("arguments", list(options_with_values()), ids=lambda words: " ".join(words[:-1]))
def test_the_command_line_says_what_may_stand_there(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        PROGRAM.main([*arguments], prog_name="deploy")
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert WRONG in said and "Error: Invalid value" in said
    assert not any(prefix in said for prefix in PREFIXES)


def spec(_: Path) -> None:
    parse_spec(
        'profile = "cpu"\n[router]\nbind = "nowhere"\nport = 70000\n[prefill]\ngpus = [1, 1]', Path("deploy.toml")
    )


def lock_path(_: Path) -> None:
    known = "".join(f'{name} = "{"0" * 64}"\n' for name in ("wheel", "tree", "patched_tree"))
    load_lock(f'version = 1\n[engine]\n{known}[engine.patched]\n"../outside" = "{"0" * 64}"', "deploy.lock")


def lock_image(_: Path) -> None:
    text = f'version = 1\n[image]\ninputs = "{"0" * 64}"\nenvironment = "{"0" * 64}"\nid = "sha256:{"0" * 64}"'
    load_lock(text, "deploy.lock")


def generation(folder: Path) -> None:
    write(folder / "generations/1/generation.json", "{}")
    generations.read(State(folder), 1)


def result(folder: Path) -> None:
    write(folder / "result.json", json.dumps({"schema": "dsv4-loadtest/1"}))
    try:
        bench.load(folder)
    except BenchError as error:
        raise DeployError(error.message, error.why, error.fix) from None


@pytest.mark.parametrize("read", [spec, lock_path, lock_image, generation, result])
def test_no_reader_shows_the_name_of_an_exception(read: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(DeployError) as found:
        read(tmp_path)
    problems: list[Any] = found.value.problems if isinstance(found.value, SpecError) else [found.value]
    said = "\n".join(f"{problem.message} {problem.why} {problem.fix}" for problem in problems)
    assert not any(prefix in said for prefix in PREFIXES), said
    assert "\n" not in problems[0].why
