import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import DeployError
from deploy.lock.document import FILE_NAME, parse, read_part, render, write_part

names = st.text("ab-", min_size=1, max_size=3)
leaves = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5)
values = leaves | st.lists(leaves, max_size=2) | st.lists(st.dictionaries(names, leaves, max_size=2), max_size=2)
parts = st.dictionaries(names, values, max_size=3)
documents = st.dictionaries(names, parts, max_size=3)


@given(documents)
def test_what_is_written_is_what_is_read(document: dict[str, Any]) -> None:
    assert parse(render(document)) == document


@given(documents)
def test_the_order_of_parts_does_not_change_the_text(document: dict[str, Any]) -> None:
    assert render(dict(reversed(document.items()))) == render(document)


@given(documents, names, parts)
def test_writing_a_part_leaves_the_others_alone(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any], part: str, content: dict[str, Any]
) -> None:
    repository = tmp_path_factory.mktemp("repository")
    (repository / FILE_NAME).write_text(render(document), encoding="utf-8")
    write_part(repository, part, content)
    assert tomllib.loads((repository / FILE_NAME).read_text(encoding="utf-8")) == {**document, part: content}
    assert [path.name for path in repository.iterdir()] == [FILE_NAME]


def test_a_missing_lock_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(DeployError, match="missing") as raised:
        read_part(tmp_path, "rootfs")
    assert "deploy lock" in raised.value.fix


def test_a_missing_part_names_the_parts_there_are(tmp_path: Path) -> None:
    write_part(tmp_path, "model", {"repo": "x"})
    with pytest.raises(DeployError, match="'rootfs'") as raised:
        read_part(tmp_path, "rootfs")
    assert "model" in raised.value.why
    assert "deploy lock" in raised.value.fix


def test_text_that_is_not_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("[rootfs]\nsuite = bookworm\n", encoding="utf-8")
    with pytest.raises(DeployError, match="does not parse") as raised:
        read_part(tmp_path, "rootfs")
    assert "line 2" in raised.value.why
