from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.lock.options import Contradiction, agrees, contradictions, options


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["prefill", "--a=1", "--b", "2", "3", "--c"], {"": ("prefill",), "--a": ("1",), "--b": ("2", "3"), "--c": ()}),
        (["--a=x=y"], {"--a": ("x=y",)}),
        (["--a="], {"--a": ("",)}),
        (["--a=1", "--a", "2"], {"--a": ("2",)}),
        ([], {}),
    ],
)
def test_a_command_line_is_options_and_values(arguments: list[str], expected: dict[str, tuple[str, ...]]) -> None:
    assert options(arguments) == expected


@given(
    st.booleans()
    | st.integers(-(2**31), 2**31)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="ascii"), max_size=5)
)
def test_a_value_agrees_with_how_a_command_line_would_write_it(value: Any) -> None:
    assert agrees((str(value),), value)
    assert agrees((str(value), str(value)), [value, value])
    assert not agrees((str(value),), [value, value])
    assert not agrees((f"{value}x",), value)


@pytest.mark.parametrize(
    ("values", "reported", "agree"),
    [
        ((), True, True),
        ((), False, False),
        ((), 1, False),
        (("0.85",), 0.85, True),
        (("8192",), 8192.0, True),
        (("x",), 1, False),
        (("None",), None, False),
        (("/health", "/metrics"), ["/health", "/metrics"], True),
        (("/health",), ["/health"], True),
        (("/health", "/metrics"), "/health /metrics", False),
    ],
)
def test_switches_numbers_and_lists_are_compared_as_what_they_are(
    values: tuple[str, ...], reported: Any, agree: bool
) -> None:
    assert agrees(values, reported) is agree


def test_an_option_that_is_reported_otherwise_or_not_at_all_is_a_contradiction() -> None:
    arguments = ["prefill", "--tp-size=4", "--enable-metrics", "--page-size=64"]
    assert contradictions(arguments, {"tp_size": 4, "enable_metrics": True, "page_size": 64, "other": 1}) == []
    assert contradictions(arguments, {"tp_size": 2, "enable_metrics": True}) == [
        Contradiction("tp_size", "4", "2"),
        Contradiction("page_size", "64", "not reported"),
    ]
