"""Reports, comparison, history, other tools' files."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deploy.command_line import printable
from loadtest import bench as benchmark
from loadtest import interop, render, report
from loadtest.cli import bench
from loadtest.compare import compare
from loadtest.errors import BenchError
from loadtest.metrics import Metrics, measure
from loadtest.result import Environment, LevelResult, Result, Target, Window
from loadtest.samples import Sample, to_line
from loadtest.validity import Finding

RUNNER = CliRunner()


def samples(users: int, gap: float) -> list[Sample]:
    """Each user sends 10 requests of 20 tokens, `gap` seconds between tokens."""
    made: list[Sample] = []
    for user in range(users):
        for turn in range(10):
            start = 1000 + user * 0.01 + turn * 21 * gap
            sample = Sample(len(made), "local", start, 20 * gap, 64, 20)
            sample.times = [gap * (k + 1) for k in range(20)]
            sample.counts = [k + 1 for k in range(20)]
            sample.first_token = sample.first_content = gap
            sample.prompt_tokens, sample.completion_tokens = 64, 20
            made.append(sample)
    return made


def level(folder: Path, users: int, gap: float, repetition: int = 1, verdict: str = "valid") -> LevelResult:
    name = f"c{users}-r{repetition}"
    begin, end = 1000.0, 1000.0 + 200 * gap
    made = samples(users, gap)
    (folder / name).mkdir(parents=True)
    (folder / name / "samples.jsonl").write_text("".join(to_line(sample) + "\n" for sample in made))
    server = [
        {"kind": "engine", "at": begin + k, "engine": "decode", "values": {"running": users, "queued": 0}}
        for k in range(5)
    ]
    server += [{"kind": "gpu", "at": begin + k, "gpu": "GPU-1", "power": 190.0, "utilisation": 100.0} for k in range(5)]
    (folder / name / "server.jsonl").write_text("".join(json.dumps(line) + "\n" for line in server))
    metrics = measure(made, begin, end)
    findings = [Finding(id="foreign-work", severity="reject", text="decode did more than our requests: +1 requests")]
    return LevelResult(
        name=f"c{users}",
        users=users,
        repetition=repetition,
        folder=name,
        verdict=verdict,  # type: ignore[arg-type]
        findings=findings if verdict == "rejected" else [],
        window=Window(started=begin - 5, begin=begin, end=end),
        metrics=metrics if verdict == "valid" else None,
        batches=[metrics.output_throughput * (1 + 0.01 * (k % 3)) for k in range(10)],
    )


def result(folder: Path, levels: list[LevelResult], **changes: Any) -> Result:
    given: dict[str, Any] = {
        "id": folder.name,
        "created": "2026-01-02T03:04:05+00:00",
        "command": ["deploy", "bench"],
        "workload": {"workload": {"kind": "synthetic", "input": {"low": 64, "high": 64}}, "seed": 1},
        "environment": Environment(url="http://x", model="<m>", lock={"uv.lock": "sha256:1"}),
        "levels": levels,
    }
    return Result(**(given | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    made = result(run, [level(run, 1, 0.01), level(run, 16, 0.02), level(run, 64, 0.03, verdict="rejected")])
    goal = Target(throughput=1000, users=16, measured=761.9, reached=False, step_budget=0.016, step=0.02, factor=1.3125)
    benchmark.save(made.model_copy(update={"target": goal}), run)
    return run


def test_a_result_survives_its_file(folder: Path) -> None:
    loaded = benchmark.load(folder)
    benchmark.save(loaded, folder)
    assert benchmark.load(folder / "result.json") == loaded
    assert loaded.verdict == "rejected"


def test_the_page_is_whole_and_loads_nothing(folder: Path) -> None:
    report.write(benchmark.load(folder), folder)
    page = (folder / "report.html").read_text()
    assert 'name="viewport"' in page and "<script" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!#)""", re.sub(r"<svg.*?</svg>", "", page, flags=re.DOTALL))
    images = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(images) == 3 + 2 * 3, "throughput, two distributions; load, batches and power of each valid level"
    for image in images:
        ElementTree.fromstring(image)
    assert "&lt;m&gt;" in page and "Target 1000 tok/s at C=16: missed" in page
    assert "a factor of 1.31 is missing" in page


def test_numbers_of_a_rejected_window_are_nowhere(folder: Path) -> None:
    loaded = benchmark.load(folder)
    hidden = measure(samples(64, 0.03), 1000.0, 1006.0)
    text = report.markdown(loaded) + report.html(loaded, report.figures(loaded, folder))
    assert f"{hidden.output_throughput:.1f}" not in text and ">c64<" not in re.sub(r"<td>c64</td>", "", text)
    row = next(line for line in report.markdown(loaded).splitlines() if line.startswith("| c64"))
    assert "0 of 1" in row and set(row.split("|")[3:-1]) == {" - "}
    assert "decode did more than our requests" in text


def test_several_repetitions_have_an_interval(tmp_path: Path) -> None:
    run = tmp_path / "r"
    made = result(run, [level(run, 4, gap, k) for k, gap in enumerate((0.0100, 0.0101, 0.0102), 1)])
    assert " ± " in report.markdown(made) and "3 of 3" in report.markdown(made)


def test_faster_is_better_only_when_the_interval_says_so(tmp_path: Path) -> None:
    slow = result(
        tmp_path / "a", [level(tmp_path / "a", 4, gap, k) for k, gap in enumerate((0.0200, 0.0202, 0.0201), 1)]
    )
    fast = result(
        tmp_path / "b", [level(tmp_path / "b", 4, gap, k) for k, gap in enumerate((0.0100, 0.0102, 0.0101), 1)]
    )
    noisy = result(
        tmp_path / "c", [level(tmp_path / "c", 4, gap, k) for k, gap in enumerate((0.0100, 0.0400, 0.0201), 1)]
    )
    faster = {row.figure: row for row in compare(slow, fast).ratios}
    assert faster["output throughput"].judgement == "better" and faster["output throughput"].over == "repetitions"
    assert faster["output throughput"].ratio == pytest.approx(2.0, rel=0.03)
    assert faster["TPOT mean"].judgement == "better" and faster["TPOT mean"].ratio == pytest.approx(0.5, rel=0.03)
    assert {row.judgement for row in compare(fast, slow).ratios} == {"worse"}
    assert {row.judgement for row in compare(slow, noisy).ratios} == {"no difference shown"}


def test_single_runs_are_compared_and_not_judged(folder: Path) -> None:
    rows = compare(benchmark.load(folder), benchmark.load(folder)).ratios
    assert {(row.figure, row.over, row.judgement) for row in rows if row.level == "c16"} == {
        ("output throughput", "batches", "too few runs"),
        ("TTFT p50", "single", "too few runs"),
        ("TPOT mean", "single", "too few runs"),
        ("E2E p50", "single", "too few runs"),
    }


def test_what_differs_is_named(tmp_path: Path) -> None:
    a = result(tmp_path / "a", [level(tmp_path / "a", 1, 0.01)])
    other = Environment(url="http://x", model="<m>", lock={"uv.lock": "sha256:2"})
    b = result(tmp_path / "b", [level(tmp_path / "b", 1, 0.01)], environment=other, workload={"seed": 2})
    found = compare(a, b)
    assert not found.same_workload
    assert ("lock.uv.lock", "sha256:1", "sha256:2") in found.differences
    assert ("seed", "1", "2") in found.differences


def test_the_verbs(folder: Path, tmp_path: Path) -> None:
    both = RUNNER.invoke(bench, ["compare", str(folder), str(folder), "--json"])
    assert both.exit_code == 0 and json.loads(both.stdout)["missing"] == ["c64"]
    shown = RUNNER.invoke(bench, ["compare", str(folder), str(folder)])
    assert "not valid in both: c64" in shown.stdout
    (tmp_path / "runs" / "broken").mkdir()
    (tmp_path / "runs" / "broken" / "result.json").write_text("{}")
    listed = RUNNER.invoke(bench, ["history", "--out", str(tmp_path / "runs"), "--json"])
    assert [entry["id"] for entry in json.loads(listed.stdout)] == ["a"]
    assert "broken" in listed.stderr
    again = RUNNER.invoke(bench, ["report", str(folder)])
    assert again.exit_code == 0 and (folder / "report.html").exists()


@pytest.mark.parametrize(
    "text", ["", "[]", '{"schema": "other/1"}', '{"schema": "dsv4-loadtest/1"}', "nope", "[" * 100_000, '"\\ud800"']
)
def test_a_file_that_is_no_result_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    done = RUNNER.invoke(bench, ["compare", str(tmp_path), str(tmp_path)])
    assert (done.exit_code, "error:" in done.stderr, "fix:" in done.stderr) == (2, True, True), done.stderr


@pytest.mark.parametrize("hostile", ["[red][/nope]", "[/]", "\x1b[31mred", "\x9b31m", ":skull:", "a\nb\rc"])
def test_what_a_result_says_is_neither_markup_nor_a_command_to_the_terminal(
    tmp_path: Path, folder: Path, hostile: str
) -> None:
    data = json.loads((folder / "result.json").read_text())
    data |= {"id": hostile, "label": None, "created": hostile}
    data["environment"]["model"] = hostile
    for one in data["levels"]:
        one |= {"name": one["name"] + hostile, "folder": one["folder"] + hostile}
    run = tmp_path / "runs" / "b"
    run.mkdir()
    (run / "result.json").write_text(json.dumps(data))
    (tmp_path / "runs" / "[red]broken[:skull:").mkdir()
    (tmp_path / "runs" / "[red]broken[:skull:" / "result.json").touch()
    said = RUNNER.invoke(bench, ["compare", str(run), str(folder)])
    assert said.exit_code == 3, said.exception
    both = RUNNER.invoke(bench, ["compare", str(run), str(run)])
    listed = RUNNER.invoke(bench, ["history", "--out", str(tmp_path / "runs")])
    assert both.exit_code == listed.exit_code == 0, (both.exception, listed.exception)
    shown = Console(file=io.StringIO(), width=1000)
    shown.print(render.summary(benchmark.load(run), str(run)))
    assert isinstance(shown.file, io.StringIO)
    for text in (said.stdout, both.stdout, listed.stdout, shown.file.getvalue()):
        assert printable(hostile) in text
        assert all(character.isprintable() or character == "\n" for character in text)
    data["engines"], data["environment"]["engines"] = None, {hostile: 1}
    (run / "result.json").write_text(json.dumps(data))
    refused = RUNNER.invoke(bench, ["compare", str(run), str(run)])
    assert (refused.exit_code, printable(hostile) in refused.stderr) == (2, True)
    assert all(character.isprintable() or character == "\n" for character in refused.stderr)


def test_what_cannot_be_read_is_skipped_in_the_history_and_no_folder_is_an_error(folder: Path, tmp_path: Path) -> None:
    for name, content in (("deep", "[" * 100_000), ("half", '"\\ud800"')):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "result.json").write_text(content)
    (tmp_path / "runs" / "pipe").mkdir()
    os.mkfifo(tmp_path / "runs" / "pipe" / "result.json")
    listed = RUNNER.invoke(bench, ["history", "--out", str(tmp_path / "runs"), "--json"])
    assert [entry["id"] for entry in json.loads(listed.stdout)] == ["a"]
    assert listed.stderr.count("not a result") == 3
    missing = RUNNER.invoke(bench, ["history", "--out", str(tmp_path / "nope")])
    assert (missing.exit_code, "fix:" in missing.stderr) == (2, True)


def test_a_run_without_throughput_is_compared_in_what_it_has(folder: Path, tmp_path: Path) -> None:
    data = json.loads((folder / "result.json").read_text())
    for one in data["levels"]:
        one["batches"] = []
        if one["metrics"]:
            one["metrics"]["output_throughput"] = 0.0
    (tmp_path / "result.json").write_text(json.dumps(data))
    done = RUNNER.invoke(bench, ["compare", str(folder), str(tmp_path), "--json"])
    assert done.exit_code == 0, done.exception
    assert {"TTFT p50"} <= {one["figure"] for one in json.loads(done.stdout)["ratios"]}


def test_each_field_that_a_result_lacks_is_named(folder: Path, tmp_path: Path) -> None:
    broken = json.loads((folder / "result.json").read_text())
    del broken["id"], broken["levels"][0]["window"], broken["levels"][1]["users"]
    (tmp_path / "result.json").write_text(json.dumps(broken))
    done = RUNNER.invoke(bench, ["compare", str(folder), str(tmp_path)])
    assert done.exit_code == 2
    for place in ("id", "levels.0.window", "levels.1.users"):
        assert re.search(rf"[ ;]{place}: Field required", " ".join(done.stderr.split())), done.stderr


@pytest.mark.parametrize("tool", interop.TOOLS)
def test_what_is_exported_can_be_imported(folder: Path, tmp_path: Path, tool: interop.Tool) -> None:
    done = RUNNER.invoke(bench, ["export", str(folder), "--format", tool])
    lines = done.stdout.splitlines()
    assert done.exit_code == 0 and len(lines) == 2, "the rejected level is not exported"
    file = tmp_path / "theirs.json"
    file.write_text(lines[1])
    back = interop.read(file)
    ours = next(entry.metrics for entry in benchmark.load(folder).levels if entry.users == 16)
    theirs = back.levels[0].metrics
    assert isinstance(ours, Metrics) and isinstance(theirs, Metrics)
    assert back.source == tool and back.levels[0].users == 16
    for name in ("output_throughput", "total_throughput", "request_rate", "duration", "requests"):
        assert getattr(theirs, name) == pytest.approx(getattr(ours, name)), name
    for name in ("ttft", "tpot", "e2e"):
        # None of them says how many requests a latency is over, and bench_serving has no minimum.
        unsaid = {"count", "minimum"} if tool == "sglang" else {"count"}
        pair = [getattr(side, name).model_dump(exclude=unsaid) for side in (theirs, ours)]
        assert pair[0] == pytest.approx(pair[1]), name
    assert [finding.id for finding in back.levels[0].findings] == ["imported"]


def test_a_report_that_cannot_be_written_leaves_the_one_before(folder: Path) -> None:
    RUNNER.invoke(bench, ["report", str(folder)])
    before = (folder / "report.md").read_text()
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    data = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(data | {"label": "another"}))
    assert RUNNER.invoke(bench, ["report", str(folder)]).exit_code == 1
    assert (folder / "report.md").read_text() == before


def test_an_import_does_not_overwrite(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "theirs.jsonl"
    file.write_text(interop.export(benchmark.load(folder), "sglang"))
    arguments = ["import", str(file), "--out", str(tmp_path / "runs")]
    first, second = RUNNER.invoke(bench, arguments), RUNNER.invoke(bench, arguments)
    assert first.exit_code == 0 and second.exit_code == 1 and "exists already" in second.stderr


@pytest.mark.parametrize("text", ["", "nope", '{"a": 1}', '{"output_throughput": 1, "median_ttft_ms": 2}', "[1]"])
def test_a_foreign_file_that_is_none_of_these_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(BenchError):
        interop.read(file)
