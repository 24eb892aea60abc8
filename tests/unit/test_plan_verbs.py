"""`deploy plan` on the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy import cli
from deploy.errors import WrongInput

RUNNER = CliRunner()
SMALL = ["--rps", "2", "--isl", "512", "--osl", "32"]


def test_both_profiles_are_planned_and_the_answer_says_what_it_rests_on() -> None:
    result = RUNNER.invoke(cli.app, ["plan", *SMALL, "--slo", "ttft=2,tpot=0.1"], catch_exceptions=False)
    assert result.exit_code == 0
    text = result.stdout
    assert text.startswith("Prediction") and "replicas" in text and "pd" in text
    assert "predicted by the roofline, 66%" in text and "Poisson" in text


def test_json_has_one_plan_for_the_named_profile() -> None:
    result = RUNNER.invoke(cli.app, ["plan", *SMALL, "--profile", "pd", "--json"], catch_exceptions=False)
    (plan,) = json.loads(result.stdout)["plans"]
    assert plan["prediction"] is True and plan["profile"] == "pd" and plan["hosts"] == 1
    assert plan["simulation"]["ttft"]["p50"] <= plan["simulation"]["ttft"]["p99"]
    assert plan["assumptions"] and len(plan["sources"]) == 2


def test_a_figure_of_a_load_test_counts_instead_of_the_prediction() -> None:
    def hosts(*more: str) -> dict[str, object]:
        arguments = ["plan", "--rps", "20", "--isl", "512", "--osl", "64", "--profile", "pd", "--json", *more]
        return json.loads(RUNNER.invoke(cli.app, arguments, catch_exceptions=False).stdout)["plans"][0]

    slow, predicted = hosts("--measured", "11.5@1", "--measured", "26.6@16"), hosts()
    assert int(str(slow["hosts"])) > int(str(predicted["hosts"]))
    assert "measured at C=1, 16" in str(slow["sources"])


def test_limits_that_nothing_meets_end_with_1() -> None:
    result = RUNNER.invoke(cli.app, ["plan", *SMALL, "--slo", "tpot=0.000001", "--profile", "pd"])
    assert result.exit_code == 1 and "no number of hosts" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        [*SMALL, "--slo", "ttft"],
        [*SMALL, "--slo", "e2e=1"],
        [*SMALL, "--slo", "ttft=-1"],
        ["--rps", "0"],
        ["--rps", "1"],
    ],
)
def test_a_wrong_value_is_a_wrong_command_line(arguments: list[str]) -> None:
    assert RUNNER.invoke(cli.app, ["plan", *arguments]).exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--measured", "1@1"],
        ["--profile", "cpu"],
        ["--profile", "pd", "--measured", "/nonexistent"],
        ["--isl", "200000"],
    ],
)
def test_what_cannot_be_planned_is_said_with_a_fix(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(WrongInput) as caught:
        RUNNER.invoke(cli.app, ["plan", *SMALL, *arguments], catch_exceptions=False)
    assert caught.value.fix
