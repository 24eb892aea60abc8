"""What the benchmarks' reports say, without a GPU."""

from benchmarks.timing import INPUT_SETS, MAX_CALLS, Machine, Report, Row, Timing, calls_per_graph, markdown_table
from hypothesis import given
from hypothesis import strategies as st

MACHINE = Machine("GPU", 132, "2", "3", "2026-01-01", 4e12, {"bf16": 8e14})


@given(st.floats(1e-6, 1e9), st.integers(1, 5))
def test_a_graph_holds_whole_turns_over_the_input_sets_and_never_too_many_calls(microseconds: float, sets: int) -> None:
    calls = calls_per_graph(microseconds, sets)
    assert calls % sets == 0 and sets <= calls <= max(sets, MAX_CALLS)


def test_short_calls_fill_a_graph_and_long_ones_are_few() -> None:
    assert calls_per_graph(3.0, INPUT_SETS) == 99
    assert calls_per_graph(1e5, INPUT_SETS) == 6


def test_the_roofline_is_the_slower_of_bytes_and_flops() -> None:
    assert MACHINE.roofline_microseconds(4e6) == 1.0
    assert MACHINE.roofline_microseconds(4e6, 8e9, "bf16") == 10.0
    assert MACHINE.roofline_microseconds(4e6, 8e9, "fp8") == 1.0


def test_a_report_has_the_ratio_to_the_roofline_and_says_why_a_peer_did_not_run() -> None:
    rows = [
        Row("op", {"B": 1}, "ours", Timing(3.0, 2.9, 3.1, 99), 4e6, launches=1),
        Row("op", {"B": 1}, "peer", None, 4e6, note="ImportError: a|b"),
    ]
    report = Report(MACHINE, "command", rows)
    assert [row["ratio_to_roofline"] for row in report.as_json()["rows"]] == [3.0, None]
    ours, peer = report.table().splitlines()[-2:]
    assert "| 3.00 |" in ours.replace("  ", "") and "ImportError: a/b" in peer


def test_a_table_has_one_width_a_column() -> None:
    lines = markdown_table(["a", "long"], [["1", "2"], ["333", "4"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
