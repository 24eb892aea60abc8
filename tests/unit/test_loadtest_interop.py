"""Results that the other tools wrote of `loadtest.testserver`: first token after 50 ms, then one in 25 ms."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loadtest.errors import BenchError, NoResult
from loadtest.interop import read

DATA = Path(__file__).with_name("data")


@pytest.mark.parametrize(
    ("name", "users", "requests"), [("aiperf-0.13.0.json", 4, 24), ("genai-bench-0.0.5.json", 2, 22)]
)
def test_a_file_that_another_tool_wrote_is_read_as_what_it_measured(name: str, users: int, requests: int) -> None:
    [level] = read(DATA / name).levels
    assert level.users == users and level.metrics and level.metrics.requests == requests
    assert level.metrics.ttft and level.metrics.ttft.p50 == pytest.approx(0.05, abs=0.01)
    assert level.metrics.tpot and level.metrics.tpot.p50 == pytest.approx(0.025, abs=0.001)
    assert level.metrics.e2e and level.metrics.e2e.p50 == pytest.approx(0.05 + 15 * 0.025, abs=0.02)
    assert level.metrics.output_throughput == pytest.approx(requests * 16 / level.metrics.duration, rel=0.01)


def test_aiperf_names_the_model(tmp_path: Path) -> None:
    assert read(DATA / "aiperf-0.13.0.json").environment.model == "plain"


def test_genai_bench_in_milliseconds_is_the_same(tmp_path: Path) -> None:
    document = json.loads((DATA / "genai-bench-0.0.5.json").read_text())
    stats = document["aggregated_metrics"]["stats"]
    for name in ("ttft", "tpot", "e2e_latency"):
        stats[name] = {key: None if value is None else value * 1000 for key, value in stats[name].items()}
    (tmp_path / "ms.json").write_text(json.dumps(document | {"_time_unit": "ms"}))
    [seconds], [milliseconds] = read(DATA / "genai-bench-0.0.5.json").levels, read(tmp_path / "ms.json").levels
    assert seconds.metrics and milliseconds.metrics
    assert milliseconds.metrics.ttft and seconds.metrics.ttft
    assert milliseconds.metrics.ttft.p99 == pytest.approx(seconds.metrics.ttft.p99)


def test_a_unit_that_is_not_known_is_refused(tmp_path: Path) -> None:
    document = json.loads((DATA / "genai-bench-0.0.5.json").read_text()) | {"_time_unit": "fortnights"}
    (tmp_path / "odd.json").write_text(json.dumps(document))
    with pytest.raises(BenchError, match="lacks a field"):
        read(tmp_path / "odd.json")


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("aiperf-0.13.0.json", ("benchmark_duration", "avg"), 0),
        ("aiperf-0.13.0.json", ("output_token_throughput", "avg"), float("nan")),
        ("aiperf-0.13.0.json", ("request_count", "avg"), float("inf")),
        ("aiperf-0.13.0.json", ("input_config", "endpoint"), {"model_names": ["\ud800"]}),
        ("genai-bench-0.0.5.json", ("aggregated_metrics", "num_completed_requests"), float("inf")),
    ],
)
def test_what_could_not_be_read_back_is_not_imported(
    tmp_path: Path, name: str, place: tuple[str, str], value: object
) -> None:
    document = json.loads((DATA / name).read_text())
    document[place[0]][place[1]] = value
    (tmp_path / "odd.json").write_text(json.dumps(document))
    with pytest.raises(NoResult):
        read(tmp_path / "odd.json")


def test_another_tools_output_may_come_through_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    text = (DATA / "aiperf-0.13.0.json").read_text()
    with ThreadPoolExecutor() as pool:
        pool.submit((tmp_path / "pipe").write_text, text)
        piped, held = (read(file).levels[0].metrics for file in (tmp_path / "pipe", DATA / "aiperf-0.13.0.json"))
    assert piped == held
