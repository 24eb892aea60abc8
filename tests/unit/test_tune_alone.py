"""What the benchmark of an op alone says, and what is made of it when it says nothing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.tune.alone import read


def row(ours: float | None, upstream: float | None, note: str = "") -> dict[str, object]:
    return {"shape": {"requests": 16, "keys": 2048}, "ours": ours, "upstream": upstream, "note": note}


def test_the_ratio_is_the_geometric_mean_over_shapes_that_both_ran_at() -> None:
    ratio, detail = read(json.dumps({"rows": [row(10, 20), row(10, 80), row(10, None, "upstream: ImportError: x")]}))
    assert ratio == pytest.approx(4)
    assert detail == [
        "requests=16 keys=2048: 10.0 us, upstream's 20.0 us",
        "requests=16 keys=2048: 10.0 us, upstream's 80.0 us",
        "requests=16 keys=2048: upstream: ImportError: x",
    ]


def test_nothing_to_compare_leaves_the_question_to_the_engine() -> None:
    assert read(json.dumps({"rows": []})) == (None, ["upstream's function does not run without an engine"])
    assert read(json.dumps({"rows": [row(1, None)]}))[0] is None


@given(st.one_of(st.text(), st.builds(json.dumps, st.recursive(st.none() | st.text(), st.lists))))
def test_whatever_it_prints_is_no_traceback(text: str) -> None:
    assert read(text)[0] is None
