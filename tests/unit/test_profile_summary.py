"""What a step's time is made of: it adds up, whatever overlaps."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import kernel, launch, operator, span, write

from deploy.profile.summary import Summary, compare, summarise
from deploy.profile.trace import read

NAMES = ["_sparse_mla_decode_kernel", "nvjet_a", "moe_b", "rms_norm", "ncclDevKernel", "zzz"]
KERNELS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.floats(0, 500), st.floats(0.1, 60), st.sampled_from([7, 9])),
    min_size=1,
    max_size=40,
)


def summary(tmp_path: Path, events: list[Any], **options: Any) -> Summary:
    return summarise(read(write(tmp_path / "t.json", events)), layers=43, **options)


def union(rows: list[tuple[float, float]]) -> float:
    """Length of the union of (begin, duration)."""
    total, end = 0.0, float("-inf")
    for begin, duration in sorted(rows):
        total += max(0.0, begin + duration - max(begin, end))
        end = max(end, begin + duration)
    return total


@given(rows=KERNELS)
def test_categories_and_idle_add_up_to_the_step(tmp_path_factory: pytest.TempPathFactory, rows: Any) -> None:
    events = [kernel(name, begin, duration, stream=stream) for name, begin, duration, stream in rows]
    found = summary(tmp_path_factory.mktemp("t"), events)
    parts = {name: share.seconds for name, share in found.step.by_category.items()}
    assert sum(parts.values()) == pytest.approx(found.step.seconds)
    busy = union([(begin, duration) for _, begin, duration, _ in rows]) * 1e-6
    assert found.step.seconds - parts.get("idle", 0.0) == pytest.approx(busy, abs=1e-9)
    assert found.step.launches == len(rows) == sum(k.launches for k in found.kernels)
    assert 0 <= found.ours <= 1 and 0 <= found.busy <= 1 + 1e-9 and found.launch_bound >= 1 - found.busy - 1e-9
    assert found.notes  # nothing marks its steps


def test_a_step_lasts_until_the_next_begins(tmp_path: Path) -> None:
    events = [span("step[DECODE bs=2]", begin, 60.0, gpu=True) for begin in (0.0, 100.0, 200.0)]
    events += [kernel("rms_norm", begin + 10, 20.0) for begin in (0.0, 100.0, 200.0)]
    events += [kernel("rms_norm", 900.0, 50.0)]
    found = summary(tmp_path, events)
    assert found.steps == 3 and found.stage == "decode"
    # 100 + 100 + 60 microseconds; what ran after the last step does not count.
    assert found.step.seconds == pytest.approx(260e-6 / 3)
    assert found.step.by_category["glue"].seconds == pytest.approx(20e-6)
    assert found.step.by_category["idle"].seconds == pytest.approx(200e-6 / 3)
    assert found.layer_seconds == pytest.approx(found.step.seconds / 43)
    assert found.notes == []


def test_other_work_between_two_steps_is_not_theirs(tmp_path: Path) -> None:
    events = [
        span("step[DECODE bs=2]", 0.0, 50.0, gpu=True),
        span("step[EXTEND bs=1 toks=9]", 60.0, 1000.0, gpu=True),
        span("step[DECODE bs=2]", 1100.0, 50.0, gpu=True),
        kernel("rms_norm", 5.0, 40.0),
        kernel("moe_b", 100.0, 900.0),
        kernel("rms_norm", 1105.0, 40.0),
    ]
    decode = summary(tmp_path, events, stage="decode")
    assert decode.step.seconds == pytest.approx(50e-6) and "experts" not in decode.step.by_category
    prefill = summary(tmp_path, events)
    assert prefill.stage == "prefill" and prefill.step.by_category["experts"].seconds == pytest.approx(900e-6)


def test_graph_launches_count_the_steps_where_no_span_is_on_the_gpu(tmp_path: Path) -> None:
    events = [launch(i * 100.0) for i in range(4)] + [kernel("moe_b", i * 100.0 + 10, 80.0) for i in range(4)]
    found = summary(tmp_path, events)
    assert found.steps == 4
    assert found.step.by_category["experts"].seconds == pytest.approx(80e-6)


def test_small_grids_short_kernels_and_our_kernels_show(tmp_path: Path) -> None:
    events = [kernel("_sparse_mla_decode_kernel", 0.0, 30.0, grid=64), kernel("rms_norm", 30.0, 2.0, grid=188)]
    events += [kernel("nvjet_a", 36.0, 64.0, grid=400)]
    found = summary(tmp_path, events)
    assert found.few_blocks == pytest.approx(30 / 96)
    assert found.ours == pytest.approx(30 / 96)
    assert found.launch_bound == pytest.approx((4 + 2) / 100)
    assert found.occupancy == pytest.approx(40)
    assert [k.name for k in found.kernels] == ["nvjet_a", "_sparse_mla_decode_kernel", "rms_norm"]


@given(st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=3), max_leaves=12))
def test_operators_count_without_those_inside_them(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    events: list[Any] = []

    def place(node: Any, begin: float) -> float:
        at = begin + 1.0
        for child in node:
            at = place(child, at) + 1.0
        events.append(operator("aten::mm", begin, at - begin))
        return at

    end = place(tree, 10.0)
    events.append(span("step[DECODE bs=1]", 0.0, end + 5))
    events.append(operator("aten::mm", 20.0, 3.0, thread=2))
    found = summary(tmp_path_factory.mktemp("t"), events[::-1])
    assert found.device == "CPU"
    assert found.step.by_category["linear"].seconds == pytest.approx((end - 10) * 1e-6)
    assert found.step.by_category["idle"].seconds == pytest.approx(15e-6)


def test_what_cannot_be_summed_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither kernels nor operators"):
        summary(tmp_path, [span("step[DECODE bs=1]", 0, 1)])
    with pytest.raises(ValueError, match="no prefill step"):
        summary(tmp_path, [span("step[DECODE bs=1]", 0, 9), operator("aten::mm", 1, 2)], stage="prefill")
    with pytest.raises(ValueError, match="nothing ran"):
        summary(tmp_path, [span("step[DECODE bs=1]", 0, 9), operator("aten::mm", 20, 2)])


@given(KERNELS, KERNELS)
def test_a_comparison_turned_round_has_the_opposite_signs(
    tmp_path_factory: pytest.TempPathFactory, one: Any, other: Any
) -> None:
    folder = tmp_path_factory.mktemp("t")
    a, b = (summary(folder, [kernel(n, t, d, stream=s) for n, t, d, s in rows]) for rows in (one, other))
    there, back = compare(a, b), compare(b, a)
    assert {c.name: c.difference for c in there.kernels} == {c.name: -c.difference for c in back.kernels}
    assert sum(c.difference for c in there.categories) == pytest.approx(there.step.difference, abs=1e-12)
    sizes = [abs(c.difference) for c in there.kernels]
    assert sizes == sorted(sizes, reverse=True)
    assert all(c.difference == 0 for c in compare(a, a).kernels)
