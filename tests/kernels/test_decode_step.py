"""What the decode-step benchmark works out from its measurements."""

import pytest
import torch
from benchmarks import decode_step
from benchmarks.decode_layer import RANK, Requests, Weights
from benchmarks.decode_step import CATEGORIES, TARGET, predict
from hypothesis import given
from hypothesis import strategies as st
from sm120_kernels import kv_layout, shapes
from torch._subclasses.fake_tensor import FakeTensorMode

COPY = 4e12
CATEGORY = st.floats(1.0, 1e5)


def row(times: list[float], gigabytes: list[float], overlap: float = 1.0) -> dict:
    return {
        "requests": 16,
        "context": 8192,
        "microseconds": sum(times) * overlap,
        "bytes": sum(gigabytes) * 1e9,
        "flops": 1.0,
        "by_category": dict(zip(CATEGORIES, times, strict=True)),
        "bytes_by_category": dict(zip(CATEGORIES, [g * 1e9 for g in gigabytes], strict=True)),
    }


@given(times=st.lists(CATEGORY, min_size=6, max_size=6), gigabytes=st.lists(st.floats(0, 20), min_size=6, max_size=6))
def test_a_prediction_is_never_under_its_roofline(times: list[float], gigabytes: list[float]) -> None:
    found = predict(row(times, gigabytes), COPY)
    assert found["microseconds"] >= found["roofline_microseconds"] * (1 - 1e-9)
    assert found["tokens_per_second"] == pytest.approx(16e6 / found["microseconds"])


def test_time_beyond_the_bytes_is_taken_over_and_bytes_are_scaled() -> None:
    gigabytes = [0.0, 0.0, 4.0, 0.0, 0.0, 0.0]
    times = [10.0, 20.0, 1000.0 + 300.0, 30.0, 40.0, 50.0]
    found = predict(row(times, gigabytes), COPY)
    bandwidth = TARGET.bandwidth
    assert found["by_category"]["linear"] == pytest.approx(4e9 / bandwidth * 1e6 + 300)
    assert found["by_category"]["glue"] == pytest.approx(50)


def test_parts_that_overlap_count_as_much_as_the_step_took() -> None:
    found = predict(row([10.0] * 6, [0.0] * 6, overlap=0.5), COPY)
    assert found["microseconds"] == pytest.approx(30)


def test_products_can_bound_a_step() -> None:
    big = row([1.0] * 6, [0.0] * 6) | {"flops": 1e12}
    assert predict(big, COPY)["microseconds"] == pytest.approx(1e12 / TARGET.bf16_flop_per_second * 1e6)


def test_the_table_says_what_is_a_prediction() -> None:
    one = row([10.0] * 6, [1.0] * 6) | {
        "way": "ours",
        "ratio": 2.0,
        "roofline_microseconds": 30.0,
        "tokens_per_second": 1.0,
        "launches": {"C4": 20},
    }
    report = {
        "machine": {
            "gpu": "GPU",
            "sms": 1,
            "torch": "1",
            "triton": "1",
            "date": "2026-01-01",
            "copy_bytes_per_second": COPY,
        },
        "layers": 43,
        "rows": [one],
        "errors": [],
        "assumptions": "Assumed: this.",
        "predictions": [predict(one, COPY)],
    }
    text = decode_step.table(report)
    assert "**Prediction**, nothing measured" in text and "Assumed: this." in text
    assert "| 20 / - / -" in text


def bytes_of(tensors: list[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("ratio", shapes.KINDS.values())
def test_the_arithmetic_of_a_layer_is_that_of_tensors_of_the_real_sizes(ratio: int) -> None:
    with FakeTensorMode():
        layer = Weights.random(ratio, torch.Generator())
    work = shapes.Work.decode([8192] * 16)
    cost = RANK.layer(ratio, work, hit=80)
    projection = [] if layer.projection is None else [layer.projection]
    dense = [t for pair in layer.dense.values() for t in pair]
    rest = [*layer.norm, layer.q_norm, layer.kv_norm, *layer.ape]
    assert cost["linear"].bytes == bytes_of([*dense, *projection, layer.gate, *rest])
    assert cost["mHC"].bytes == bytes_of(layer.fn)
    shared = [t for name, t in layer.experts.items() if name.startswith("shared")]
    routed = [t[0] for name, t in layer.experts.items() if not name.startswith("shared")]
    assert cost["experts"].bytes == bytes_of(shared) + 80 * bytes_of(routed)
    weights = sum(weight.numel() for weight, _ in layer.dense.values()) + sum(t.numel() for t in projection)
    assert cost["linear"].flops == 2 * 16 * (weights + layer.gate.numel())
    expert = 3 * shapes.HIDDEN * shapes.EXPERT_INNER // RANK.ranks
    assert cost["experts"].flops == 2 * 16 * (1 + shapes.TOP_EXPERTS) * expert


@pytest.mark.parametrize("context", [1, 127, 300, 2051, 8192])
def test_the_work_of_a_step_is_that_of_its_indices(context: int) -> None:
    count = min(context, 5)
    requests = Requests.staggered(count, context, torch.Generator())
    work = requests.work()
    window = int((requests.window_indices >= 0).sum())
    assert work.window == work.window_read == window
    assert work.compressed == {4: int(requests.selected.sum()), 128: int(requests.compressed[128].sum())}
    keys = requests.compressed[4][requests.compressed[4] > shapes.INDEX_TOP]
    assert work.scored == int(keys.sum())
    cost = RANK.layer(4, work, 0)
    assert cost["attention"].bytes == (window + work.compressed[4]) * kv_layout.TOKEN_BYTES
    assert cost["indexer"].bytes == work.scored * 132
