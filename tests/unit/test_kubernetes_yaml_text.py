from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from deploy.kubernetes.yaml_text import WIDTH, Because, document, documents, plain

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["yes", "0.10", "null", "a: b", "# no", "$(X)", "- x", "two\nlines\n", "an end\n\n", " begin\n", "1_000", "~", ""]
)
scalars = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | texts


def reasoned(value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return value | st.builds(Because, value, st.text("ab \n", min_size=1, max_size=200))


values = st.recursive(
    reasoned(scalars),
    lambda inner: reasoned(st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)),
    max_leaves=12,
)


@given(values)
def test_what_is_written_reads_back_as_the_same_value(value: Any) -> None:
    assert yaml.safe_load(document(value)) == plain(value)


@given(st.lists(st.dictionaries(texts, values, min_size=1, max_size=3), min_size=1, max_size=3))
def test_several_documents_read_back_each_by_itself(found: list[Any]) -> None:
    assert list(yaml.safe_load_all(documents(found))) == plain(found)


def test_a_reason_stands_above_its_value_and_is_wrapped() -> None:
    lines = document({"a": [Because(1, "word " * 60)], "b": Because({"c": 2}, "why")}).splitlines()
    assert lines[0] == "a:"
    assert lines[1].startswith("  # word")
    assert max(map(len, lines)) <= WIDTH
    assert lines[-3:] == ["# why", "b:", "  c: 2"]
