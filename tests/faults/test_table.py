"""What tests/faults/table.py keeps of the runs before."""

from table import TABLE, merged

HEADER = "| fault | stack | what clients saw | seconds | lost | load | when (UTC) |\n|---|---|---|---|---|---|---|\n"
OLD = ("SIGKILL of decode", "stand-ins", "10 of 200", "36", "nothing", "1.0", "2026-11-29 10:00")
NEW = ("SIGKILL of decode", "stand-ins", "12 of 200", "31", "nothing", "1.0", "2026-11-30 10:00")


def test_a_fault_that_is_seen_again_replaces_its_row_and_the_others_stay() -> None:
    other = ("SIGKILL of router", *OLD[1:])
    table = HEADER + "".join(f"| {' | '.join(row)} |\n" for row in (OLD, other))
    assert merged(table, [NEW]) == [NEW, other]


def test_what_an_older_run_left_does_not_replace_a_newer_row() -> None:
    assert merged(HEADER + f"| {' | '.join(NEW)} |\n", [OLD]) == [NEW]


def test_the_committed_table_has_each_fault_once_and_in_order() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:]
    assert [f"| {' | '.join(row)} |" for row in merged(TABLE.read_text(), [])] == rows
