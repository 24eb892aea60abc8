"""What is written is what is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.samples import Sample, Tick, from_line, read_file, to_line

TIMES = st.lists(st.integers(0, 10**9), max_size=30).map(lambda us: sorted(t / 1e6 for t in us))


@given(TIMES, st.booleans(), st.integers(0, 10**6))
def test_a_sample_survives_the_file(times: list[float], counted: bool, start: int) -> None:
    sample = Sample(3, "local", start / 1e3, 1.5, 64, 8)
    sample.times = times
    sample.counts = [2 * (k + 1) if counted else None for k in range(len(times))]
    assert from_line(to_line(sample)) == sample


def test_a_tick_survives_the_file() -> None:
    tick = Tick(1.25, "worker-1", 4, 4, 10, 5, 1, 0, 0.001, 0.002, 0.5, 3)
    assert from_line(to_line(tick)) == tick


def test_a_half_written_last_line_is_dropped(tmp_path: Path) -> None:
    line = to_line(Sample(0, "local", 1.0, 1.0, None, None))
    file = tmp_path / "samples.jsonl"
    file.write_text(f"{line}\n{line[:20]}")
    assert len(read_file(file)[0]) == 1


def test_a_foreign_file_is_named_in_the_error(tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text('{"kind":"sample","colour":1}\n')
    with pytest.raises(ValueError, match=r"other\.jsonl"):
        read_file(file)
