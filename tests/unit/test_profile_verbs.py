"""`deploy profile` on a trace of the CPU stack that we recorded, and on written ones."""

import json
from pathlib import Path

import pytest
from traces import kernel, launch, span, write
from typer.testing import CliRunner

from deploy import cli
from deploy.profile.summary import Summary, summarise
from deploy.profile.trace import UnreadableTrace, read

RUNNER = CliRunner()
# Recorded on the CPU stack: `deploy profile decode --steps 3`, four requests in flight sent to decode alone (SGLang
# fakes the transfer of their KV cache then); two shared x86-64 cores, 2026-11-30.
CPU_STACK = Path(__file__).parent / "data" / "traces" / "cpu-stack-decode.trace.json.gz"
CPU_LAYERS = 2
# `python -m benchmarks.decode_step --requests 16 --context 8192 --ways ours --no-error --trace traces`, 2026-11-30;
# the kernel of the experts was an attempt that is not in the tree, with the same names as the tree's.
H200 = Path(__file__).parent / "data" / "traces" / "h200-decode-step.trace.json.gz"


def profile(*arguments: str) -> str:
    result = RUNNER.invoke(cli.app, ["profile", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_cpu_stacks_steps_are_found_and_every_operator_has_a_category() -> None:
    found = summarise(read(CPU_STACK), CPU_LAYERS)
    assert found.stage == "decode" and found.device == "CPU" and found.steps >= 3
    parts = found.step.by_category
    assert "other" not in parts
    assert {"linear", "attention", "glue", "idle"} <= set(parts)
    assert sum(share.seconds for share in parts.values()) == pytest.approx(found.step.seconds)
    # Qwen3's layer: query, key and value together, output, gate and up together, down; and the head.
    linear = next(kernel for kernel in found.kernels if kernel.category == "linear")
    assert linear.launches >= 4 * CPU_LAYERS


def test_our_decode_step_on_a_gpu_is_known_kernel_by_kernel() -> None:
    found = summarise(read(H200), 43)
    assert (found.stage, found.steps) == ("decode", 5)
    assert set(found.step.by_category) == {
        "attention", "indexer", "top-k", "linear", "experts", "mHC", "glue", "idle",
    }  # fmt: skip
    assert found.step.by_category["experts"].launches == 4 * 43
    assert all(kernel.ours for kernel in found.kernels)


def test_the_text_has_categories_kernels_and_what_was_counted() -> None:
    text = profile(str(CPU_STACK), "--layers", "2", "--top", "5")
    assert "decode steps of" in text and "launches a step" in text and "no kernels in the trace" in text
    assert "\x1b" not in text


def test_json_is_a_summary_that_gap_takes(tmp_path: Path) -> None:
    text = profile(str(CPU_STACK), "--json")
    assert Summary.model_validate_json(text).step.seconds > 0
    (tmp_path / "s.json").write_text(text)
    result = RUNNER.invoke(cli.app, ["gap", "--trace", str(tmp_path / "s.json"), "--json"], catch_exceptions=False)
    assert {row["name"] for row in json.loads(result.stdout)["categories"]} >= {"linear", "glue", "experts"}


def test_two_traces_are_compared_in_text_json_and_html(tmp_path: Path) -> None:
    def steps(name: str, attention: float) -> str:
        events = [span("step[DECODE bs=16]", i * 1000.0, 900.0, gpu=True) for i in range(3)]
        for i in range(3):
            events += [launch(i * 1000.0), kernel("_sparse_mla_decode_kernel", i * 1000.0 + 10, attention)]
            events += [kernel("nvjet_linear<a & b>", i * 1000.0 + 600, 200.0)]
        return str(write(tmp_path / name, events))

    before, after = steps("before.json.gz", 500.0), steps("after.json", 100.0)
    page = tmp_path / "pages" / "page.html"
    text = profile(before, after, "--html", str(page))
    assert "-0.400" in text and "0.20" in text
    data = json.loads(profile(before, after, "--json"))
    changed = {row["name"]: row["after"] - row["before"] for row in data["categories"]}
    assert changed["attention"] == pytest.approx(-400e-6) and changed["linear"] == 0
    html = page.read_text()
    assert html.count("<svg") == 3 and "<script" not in html
    assert "nvjet_linear&lt;a &amp; b&gt;" in html and "nvjet_linear<a" not in html


@pytest.mark.parametrize("arguments", [["/nonexistent"], [__file__], ["T", "--stage", "prefill"]])
def test_what_is_no_trace_is_said_with_a_fix(arguments: list[str], tmp_path: Path) -> None:
    if arguments[0] == "T":
        arguments = [str(CPU_STACK), *arguments[1:]]
    with pytest.raises(UnreadableTrace) as caught:
        RUNNER.invoke(cli.app, ["profile", *arguments], catch_exceptions=False)
    assert caught.value.fix and caught.value.exit_code == 2


@pytest.mark.parametrize("arguments", [[], ["decode", "other.json"], [str(CPU_STACK), "--stage", "x"]])
def test_a_wrong_command_line_is_refused(arguments: list[str]) -> None:
    assert RUNNER.invoke(cli.app, ["profile", *arguments]).exit_code == 2
