"""Reads deploy.toml and says, for each mistake, where it stands and what would be right."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from deploy.errors import WrongInput
from deploy.spec.model import Profile, Spec
from deploy.spec.positions import Path, Position, positions
from deploy.validation import mistake


@dataclass(frozen=True)
class Problem:
    """One mistake in a spec. `key` is dotted; empty for a syntax error."""

    position: Position
    key: str
    message: str
    why: str
    fix: str


LARGEST_BYTES = 1 << 20
EXPLAINED = "the deploy.toml that came with this repository explains each key: git log -p deploy.toml"


class NoSpec(WrongInput):
    """What the command line names is not there, or is no text."""


class SpecError(WrongInput):
    """deploy.toml cannot be used; `problems` lists every mistake in the order of the file."""

    def __init__(self, file: FilePath, problems: list[Problem]) -> None:
        first = problems[0]
        super().__init__(f"{file}:{first.position.line}: {first.message}", first.why, first.fix)
        self.file = file
        self.problems = problems


@dataclass(frozen=True)
class SpecFile:
    """A valid spec and where its keys stand.

    Attributes:
        file: the file it came from, for messages.
        overridden: dotted keys set on the command line, with the option's name.
    """

    spec: Spec
    file: FilePath
    positions: Mapping[Path, Position]
    overridden: Mapping[str, str] = field(default_factory=dict[str, str])

    def origin(self, *key: str | int) -> str | None:
        """`deploy.toml:LINE` of a key, `--option` if the command line set it, None if it has its default."""
        if option := self.overridden.get(".".join(map(str, key))):
            return option
        position = self.positions.get(key)
        return f"{self.file.name}:{position.line}" if position else None


def load(file: FilePath, profile: Profile | None = None) -> SpecFile:
    """Read and validate a spec.

    Args:
        file: path of the TOML file.
        profile: replaces the file's profile (the `--profile` option).

    Raises:
        SpecError: the file is not TOML, or some of its keys or values cannot be used.
        NoSpec: the file cannot be read.
    """
    try:
        if (size := file.stat().st_size) > LARGEST_BYTES:
            raise NoSpec(f"{file} is no deploy.toml", f"it has {size:,} bytes", "name another: --spec FILE")
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NoSpec(
            f"{file} does not exist",
            "deploy reads what to run from it",
            "name another: --spec FILE; deploy init makes one",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise NoSpec(f"{file} cannot be read", str(error), "make it a readable UTF-8 text file") from error
    return parse(text, file, profile)


def parse(text: str, file: FilePath, profile: Profile | None = None) -> SpecFile:
    """Validate a spec's text; the same as `load` without the disk."""
    # Some editors begin a file with a mark that says UTF-8.
    text = text.removeprefix("\ufeff")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SpecError(file, [_syntax_problem(text, error)]) from error
    except RecursionError as error:
        problem = Problem(
            Position(1, 1), "", "brackets in brackets, thousands deep", "no key wants that", "remove them"
        )
        raise SpecError(file, [problem]) from error
    places = positions(text)
    overridden: dict[str, str] = {}
    if profile is not None:
        data["profile"] = profile
        overridden["profile"] = "--profile"
    try:
        spec = Spec.model_validate(data)
    except ValidationError as error:
        problems = [_problem(dict(item), places, data) for item in error.errors()]
        unique = {(problem.key, problem.message): problem for problem in problems}
        raise SpecError(file, sorted(unique.values(), key=lambda problem: problem.position)) from error
    return SpecFile(spec, file, places, overridden)


def _syntax_problem(text: str, error: tomllib.TOMLDecodeError) -> Problem:
    message = str(error)
    match = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)", message)
    line, column = (match.group(1), match.group(2)) if match else (None, None)
    position = Position(int(line), int(column)) if line and column else Position(text.count("\n") + 1, 1)
    what = message[: match.start()] if match else message
    return Problem(
        position, "", f"not valid TOML: {what[:1].lower()}{what[1:]}", "TOML has a strict syntax", "https://toml.io"
    )


def _problem(item: dict[str, Any], places: Mapping[Path, Position], data: dict[str, Any]) -> Problem:
    context: dict[str, Any] = item.get("ctx", {})
    path = _existing((*item["loc"], *context.get("key", ())), places)
    position = places.get(path) or Position(1, 1)
    key = _dotted(path)
    match item["type"]:
        case "refused":
            return Problem(position, key, f"{key}: {context['what']}", context["why"], context["fix"])
        case "extra_forbidden":
            return _unknown_key(path, position)
        case "literal_error":
            allowed = context["expected"]
            guess = _close(str(item["input"]), re.findall(r"'([^']*)'", allowed))
            fix = f'did you mean "{guess}"?' if guess else f"use one of {allowed}"
            return Problem(position, key, f"{key}: {item['input']!r} is not allowed", f"allowed: {allowed}", fix)
        case "missing":
            return Problem(
                position, key, f"{key}: the key {item['loc'][-1]!r} is missing", "it has no default", "add it"
            )
        case _:
            rule = mistake(item).replace("Input should ", "it should ").replace("String should ", "it should ")
            shown = _at(data, path)
            return Problem(position, key, f"{key}: {shown!r} is not allowed", rule, _hint(path))


def _unknown_key(path: Path, position: Position) -> Problem:
    table, name = path[:-1], str(path[-1])
    allowed = list(_section(table).model_fields)
    where = f"[{_dotted(table)}]" if table else "the top level"
    guess = _close(name, allowed)
    elsewhere = [f"{section}.{name}" for section in Spec.model_fields if name in _fields(section)]
    fix = (
        f"did you mean {guess}?"
        if guess
        else f"did you mean {' or '.join(elsewhere)}?"
        if elsewhere
        else "remove it; a variable of compose.yaml that has no key here belongs into [variables]"
    )
    return Problem(position, _dotted(path), f"{_dotted(path)}: unknown key", f"{where} knows {', '.join(allowed)}", fix)


def _section(table: Path) -> type[BaseModel]:
    section: type[BaseModel] = Spec
    for part in table:
        if isinstance(part, str):
            section = _table(section.model_fields[part].annotation) or section
    return section


def _fields(name: str) -> list[str]:
    section = _table(Spec.model_fields[name].annotation)
    return list(section.model_fields) if section else []


def _table(annotation: Any) -> type[BaseModel] | None:
    """The model of a table or of the elements of an array of tables."""
    element = next(iter(get_args(annotation)), None) if get_origin(annotation) is tuple else annotation
    return element if isinstance(element, type) and issubclass(element, BaseModel) else None


def _hint(path: Path) -> str:
    """An example of the key's value: its default."""
    section: Any = Spec()
    for part in path:
        if isinstance(part, str):
            section = getattr(section, part, None)
    if section is None or section == () or isinstance(section, BaseModel):
        return EXPLAINED
    return f"for example {_toml(section)}"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, cast(tuple[Any, ...], value)))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _existing(path: Path, places: Mapping[Path, Position]) -> Path:
    """The longest start of `path` that the file has: pydantic appends names of types it tried."""
    while path and path not in places:
        path = path[:-1]
    return path


def _at(data: Any, path: Path) -> Any:
    for part in path:
        data = data[part]
    return data


def _close(word: str, words: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(word, words, n=1)), None)


def _dotted(path: Path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
