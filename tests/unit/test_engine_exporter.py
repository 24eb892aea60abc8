from pathlib import Path

import pytest
from engine_runtime.exporter import merge, page, parse_targets, render
from engine_runtime.secret_files import UsageError
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

ENGINE = """# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="a,b} c=\\"d\\"",tp_rank="0"} 3.0
# HELP sglang:e2e Latency
# TYPE sglang:e2e histogram
sglang:e2e_bucket{le="0.1"} 1.0
sglang:e2e_bucket{le="+Inf"} 2.0
sglang:e2e_count 2.0
sglang:e2e_sum 0.5
plain 1 1700000000000
"""


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def registry(value: float, label: str) -> str:
    made = CollectorRegistry()
    Gauge("a_gauge", "with \\ and \n", ["name"], registry=made).labels(label).set(value)
    Counter("a_counter", "c", registry=made).inc(abs(value))
    Histogram("a_histogram", "h", registry=made).observe(value)
    return generate_latest(made).decode()


def test_each_sample_says_its_role_and_each_family_is_announced_once() -> None:
    text = render(merge([("prefill", ENGINE), ("decode", ENGINE)]))
    assert text.count("# TYPE sglang:e2e histogram") == 1
    found = samples(text)
    for role in ("prefill", "decode"):
        assert found[("sglang:num_running_reqs", (("model_name", 'a,b} c="d"'), ("role", role), ("tp_rank", "0")))] == 3
        assert found[("sglang:e2e_bucket", (("le", "+Inf"), ("role", role)))] == 2
        assert found[("plain", (("role", role),))] == 1
    lines = [line for line in text.splitlines() if line.startswith("sglang:e2e")]
    assert text.splitlines().index(lines[-1]) - text.splitlines().index(lines[0]) == len(lines) - 1


@given(st.floats(-1e9, 1e9), st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=20))
def test_what_a_client_library_writes_comes_through_unchanged_but_for_the_role(value: float, label: str) -> None:
    text = registry(value, label)
    after = samples(render(merge([("decode", text)])))
    before = samples(text)
    assert after == {
        (name, tuple(sorted((*labels, ("role", "decode"))))): got for (name, labels), got in before.items()
    }


def test_a_pages_own_role_is_kept_under_another_name() -> None:
    found = samples(render(merge([("front", 'x{a="1",role="y"} 1\nx{exported_role="z"} 2\n')])))
    assert found[("x", (("a", "1"), ("exported_role", "y"), ("role", "front")))] == 1


@given(st.text())
def test_what_is_no_metric_is_left_out(noise: str) -> None:
    text = render(merge([("a", noise), ("b", "good 1\n")]))
    assert 'good{role="b"} 1' in text


def test_a_role_that_does_not_answer_costs_its_own_samples_alone(tmp_path: Path) -> None:
    (tmp_path / "roles.prom").write_text("# TYPE deploy_x gauge\ndeploy_x 7\n")
    (tmp_path / "bad.prom").write_bytes(b"\xff")
    (tmp_path / "other.txt").write_text("other 1\n")

    def get(address: str) -> str:
        if "dead" in address:
            raise TimeoutError
        return ENGINE

    targets = [("prefill", "http://p"), ("decode", "http://d"), ("decode", "http://dead"), ("router", "http://dead")]
    found = samples(page(targets, tmp_path, get))
    ups = {labels[0][1]: value for (name, labels), value in found.items() if name == "role_up"}
    assert ups == {"prefill": 1, "decode": 0, "router": 0}
    assert found[("deploy_x", ())] == 7
    assert ("plain", (("role", "prefill"),)) in found
    assert not [name for name, _ in found if name == "other"]


@pytest.mark.parametrize("word", ["decode", "=http://x", "a b=http://x", "decode=ftp://x", 'd"=http://x'])
def test_a_target_that_is_not_one_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="METRICS_TARGETS"):
        parse_targets(word)
