import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.image.progress import BuildEvent, BuildProgress, read_objects, step_of

RUN = "[engine 1/1] RUN --mount=type=tmpfs,target=/tmp sh /tmp/tools/install_wheels.sh"
STEP = ("engine", "installing SGLang and the other wheels")


def vertex(**fields: Any) -> dict[str, Any]:
    return {"vertexes": [{"digest": "d", "name": RUN, **fields}]}


def logs(*pieces: str) -> dict[str, Any]:
    return {"logs": [{"vertex": "d", "data": base64.b64encode(piece.encode()).decode()} for piece in pieces]}


def follow(*objects: dict[str, Any]) -> list[BuildEvent]:
    progress = BuildProgress()
    return [event for item in objects for event in progress.events(item)]


texts = st.text('{}[]"\\ a\n', max_size=5)
json_objects = st.dictionaries(texts, texts | st.dictionaries(texts, texts, max_size=2), max_size=2)


@given(
    st.lists(json_objects | st.builds("#{}".format, st.text("{} a", max_size=5)), max_size=4),
    st.sampled_from([None, 2]),
)
def test_objects_are_read_whether_on_one_line_or_indented(items: list[Any], indent: int | None) -> None:
    text = "".join((item if isinstance(item, str) else json.dumps(item, indent=indent)) + "\n" for item in items)
    lines = [f"{line}\n" for line in text.split("\n")[:-1]]
    assert list(read_objects(lines)) == items


def test_a_step_starts_logs_and_finishes_once() -> None:
    started = vertex(started="2026-01-01T00:00:00.123456789Z")
    finished = vertex(started="2026-01-01T00:00:00.5Z", completed="2026-01-01T00:01:30.5Z")
    assert follow(vertex(), started, started, logs("hello\n"), finished, finished) == [
        BuildEvent(*STEP, "started"),
        BuildEvent(*STEP, "log", "hello"),
        BuildEvent(*STEP, "finished", seconds=90),
    ]


def test_a_cached_step_says_so() -> None:
    cached = vertex(cached=True, started="2026-01-01T00:00:00Z", completed="2026-01-01T00:00:00Z")
    assert follow(cached) == [BuildEvent(*STEP, "cached")]


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\n\r"), min_size=1)), st.data())
def test_log_lines_are_whole_wherever_the_pieces_end(lines: list[str], data: st.DataObject) -> None:
    text = "".join(f"{line}\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    events = follow(vertex(started="2026-01-01T00:00:00Z"), *(logs(piece) for piece in pieces))
    assert [event.message for event in events[1:]] == [line.rstrip() for line in lines if line.strip()]


def test_transfers_report_bytes() -> None:
    transfer = {"statuses": [{"vertex": "d", "name": "transferring", "current": 5, "total": 10}]}
    assert follow(vertex(), transfer) == [BuildEvent(*STEP, "progress", "transferring", 5, 10)]


def test_a_failed_step_is_remembered() -> None:
    progress = BuildProgress()
    events = list(progress.events(vertex(error="exit code: 1", started="2026-01-01T00:00:00Z")))
    assert events == [BuildEvent(*STEP, "failed", "exit code: 1")]
    assert progress.failure == events[0]


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("[rootfs-build 1/1] RUN sh", "rootfs"),
        ("[torch 1/1] RUN sh", "engine"),
        ("[patched 1/1] RUN x", "patches"),
        ("[runtime 2/2] WORKDIR /", "kernels"),
        ("exporting to image", "export"),
        ("[internal] load build definition from Dockerfile", None),
        ("[context debs] load from client", None),
    ],
)
def test_each_stage_has_a_phase(name: str, phase: str | None) -> None:
    step = step_of(name)
    assert (step and step[0]) == phase
