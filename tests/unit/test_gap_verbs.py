"""`deploy gap` on the command line."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy import cli
from deploy.errors import WrongInput

RUNNER = CliRunner()
REPLICAS = """
profile = "replicas"
[engine]
speculation = "eagle"
[[replica]]
gpus = [0, 1]
numa_node = 0
[[replica]]
gpus = [2, 3]
numa_node = 0
"""


def gap(*arguments: str) -> str:
    result = RUNNER.invoke(cli.app, ["gap", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_every_figure_is_called_a_prediction_and_says_what_it_assumes() -> None:
    text = gap()
    assert text.startswith("Prediction, nothing measured")
    assert "Assumed:" in text and "1.79 TB/s" in text
    assert "leaves 16.00 ms a step" in text


def test_the_campaigns_figures_give_the_campaigns_factor() -> None:
    text = gap("--measured", "11.5@1", "--measured", "22.99@16")
    assert "696.0 ms / 16.00 ms = 43.5" in text
    assert "came with the requests" in text


def test_json_has_the_parts_and_the_assumptions(tmp_path: Path) -> None:
    spec = tmp_path / "deploy.toml"
    spec.write_text(REPLICAS)
    found = json.loads(gap("--spec", str(spec), "--json", "-c", "3,32", "--accepted", "3"))
    assert found["prediction"] is True and found["assumptions"]
    assert [one["users"] for one in found["ceilings"]] == [3, 16, 32]
    assert found["setting"]["engines"] == 2 and found["setting"]["ranks"] == 2
    step = found["ceilings"][0]
    assert sum(part["seconds"] for part in step["parts"]) == pytest.approx(step["step_seconds"])
    assert "draft" in {part["name"] for part in step["parts"]}


def test_a_trace_says_where_the_excess_is(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    file.write_text(json.dumps({"step": {"by_category": {"glue": {"seconds": 0.5}, "experts": {"seconds": 0.01}}}}))
    rows = json.loads(gap("--trace", str(file), "--json"))["categories"]
    assert rows[0]["name"] == "glue" and rows[0]["share"] > 0.9
    assert "share of the excess" in gap("--trace", str(file))


def test_plots_are_written_and_marked_as_predictions(tmp_path: Path) -> None:
    gap("--plots", str(tmp_path / "plots"), "--measured", "26.6@16")
    files = {file.name: file.read_text() for file in (tmp_path / "plots").iterdir()}
    assert sorted(files) == ["context.svg", "step.svg", "throughput.svg"]
    assert all(text.startswith("<svg") and "predicted" in text for text in files.values())
    assert "measured: 601.50" in files["step.svg"]


def test_the_records_come_with_their_error() -> None:
    text = gap("--published")
    assert "+50%" in text and "183.5" in text
    assert len(json.loads(gap("--published", "--json"))["checks"]) == 7


@pytest.mark.parametrize(
    "arguments",
    [
        ["--profile", "cpu"],
        ["--accepted", "2"],
        ["--measured", "/nonexistent"],
        ["--trace", "/nonexistent"],
        ["--trace", __file__],
        ["--measured", __file__],
        ["--host-report", __file__],
    ],
)
def test_what_cannot_be_used_is_said_with_a_fix(arguments: list[str]) -> None:
    with pytest.raises(WrongInput) as caught:
        RUNNER.invoke(cli.app, ["gap", *arguments], catch_exceptions=False)
    assert caught.value.exit_code == 2 and caught.value.fix


@pytest.mark.parametrize(
    "arguments",
    [
        ["--target", "1000"],
        ["--target", "nan@16"],
        ["-c", "0"],
        ["-c", "a"],
        ["--context", "0"],
        ["--measured", "1@x"],
        ["--accepted", "0.5"],
    ],
)
def test_a_wrong_value_is_a_wrong_command_line(arguments: list[str]) -> None:
    assert RUNNER.invoke(cli.app, ["gap", *arguments]).exit_code == 2


def test_a_load_test_without_gpus_is_not_held_against_gpus(tmp_path: Path) -> None:
    from loadtest.result import Environment, Result

    ran = Environment(url="http://x", model="tiny", engines={"decode": {"device": "cpu"}})
    result = Result(id="1", created="", command=[], workload={}, environment=ran, levels=[])
    (tmp_path / "result.json").write_text(result.model_dump_json(by_alias=True))
    with pytest.raises(WrongInput, match="without GPUs"):
        RUNNER.invoke(cli.app, ["gap", "--measured", str(tmp_path)], catch_exceptions=False)


def test_a_host_report_names_the_gpu(tmp_path: Path) -> None:
    from deploy.host.report import Gpu, HostReport, System, save

    report = tmp_path / "host.json"
    for name, known in (("NVIDIA H200", True), ("NVIDIA GeForce GTX 1080", False)):
        save(
            HostReport(
                taken_at="",
                seconds=0,
                system=System(hostname="h", kernel="k", root=False),
                gpus=[Gpu(index=0, name=name)],
            ),
            report,
        )
        if known:
            assert "NVIDIA H200" in gap("--host-report", str(report)).splitlines()[0]
        else:
            with pytest.raises(WrongInput, match="GTX 1080"):
                RUNNER.invoke(cli.app, ["gap", "--host-report", str(report)], catch_exceptions=False)


def test_it_takes_less_than_a_second_of_processor_time() -> None:
    code = (
        "import resource, sys; sys.argv = ['deploy', 'gap']\n"
        "from deploy.entry import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "used = resource.getrusage(resource.RUSAGE_SELF); print(used.ru_utime + used.ru_stime)"
    )
    times: list[float] = []
    for _ in range(3):
        begun = time.monotonic()
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        times.append(float(run.stdout.split()[-1]))
        assert time.monotonic() - begun < 60
    # Processor time, because other work beside the tests makes the wall clock say anything.
    assert min(times) < 1.5
