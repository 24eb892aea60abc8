"""Reading a trace: what comes back, what is refused, how long it takes."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from traces import kernel, launch, operator, span, write

from deploy.profile.trace import UnreadableTrace, read

EVENTS = [
    kernel("b", 120.0, 5.0),
    kernel("a", 100.0, 10.0, grid=12),
    operator("aten::mm", 90.0, 30.0),
    span("step[DECODE bs=1]", 80.0, 60.0),
    span("step[DECODE bs=1]", 95.0, 40.0, gpu=True),
    launch(92.0),
    launch(93.0, "cudaLaunchKernel"),
    launch(94.0, "cudaStreamSynchronize"),
    {"ph": "i", "name": "mark", "ts": 1.0},
    {"ph": "X", "cat": "python_function", "name": "f", "ts": 1.0, "dur": 2.0},
    {"ph": "X", "cat": "kernel", "name": "without a time"},
    "not an event",
]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_what_was_recorded_comes_back_in_order(tmp_path: Path, name: str) -> None:
    found = read(write(tmp_path / name, EVENTS))
    assert found.gpu_name.startswith("NVIDIA RTX PRO 6000") and found.multiprocessors == 188
    assert [found.names[i] for i in found.kernels.name] == ["a", "b"]
    # Seconds since the first event that counts.
    assert found.kernels.begin.tolist() == pytest.approx([20e-6, 40e-6])
    assert (found.kernels.end - found.kernels.begin).tolist() == pytest.approx([10e-6, 5e-6])
    assert found.kernels.blocks.tolist() == [12, 300] and found.kernels.occupancy.tolist() == [40.0, 40.0]
    assert [(one.name, one.on_gpu) for one in found.spans] == [
        ("step[DECODE bs=1]", False),
        ("step[DECODE bs=1]", True),
    ]
    assert len(found.operators) == 1
    assert found.host_launches == 2 and len(found.graph_launches) == 1


def test_the_kernels_are_those_of_one_device(tmp_path: Path) -> None:
    events = [kernel("mine", i, 1.0) for i in range(5)] + [kernel("other", i + 0.5, 1.0, device=1) for i in range(2)]
    random.Random(1).shuffle(events)
    found = read(write(tmp_path / "t.json", events))
    assert {found.names[i] for i in found.kernels.name} == {"mine"}


def test_a_cut_file_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    whole = write(tmp_path / "t.json.gz", EVENTS).read_bytes()
    plain = gzip.decompress(whole)
    for number, data in enumerate(
        [whole[: len(whole) // 2], whole[:-4], plain[: len(plain) // 2], plain[:20], b"", b"x"]
    ):
        path = tmp_path / f"cut{number}.json"
        path.write_bytes(data)
        with pytest.raises(UnreadableTrace) as caught:
            read(path)
        assert caught.value.fix and caught.value.exit_code == 2


@pytest.mark.parametrize("text", ["[]", "{}", '{"traceEvents": []}', '{"traceEvents": 3}', "[1, 2]", "null"])
def test_json_that_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(UnreadableTrace):
        read(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UnreadableTrace):
            read(path)


def test_strange_values_do_not_stop_it(tmp_path: Path) -> None:
    odd: list[Any] = [
        {"ph": "X", "cat": "kernel", "name": "k", "ts": "3", "dur": 1, "args": {"grid": "x", "stream": None}},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 5, "dur": 1, "args": None},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": [], "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": 7, "ts": 1e300, "dur": 1, "tid": "main"},
    ]
    found = read(write(tmp_path / "t.json", odd))
    assert len(found.kernels) == 2 and len(found.operators) == 1


def test_progress_ends_at_the_files_size(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [kernel("k", i, 0.5) for i in range(25000)])
    seen: list[tuple[int, int]] = []
    read(path, lambda done, total: seen.append((done, total)))
    assert seen and all(0 < done <= total == path.stat().st_size for done, total in seen)


@pytest.mark.slow
def test_a_tenth_of_500_megabytes_takes_a_tenth_of_60_seconds_and_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "big.json"
    batch = ",\n".join(json.dumps(operator(f"aten::op{i % 50}", i * 3.0, 2.0), indent=1) for i in range(20000))
    with path.open("w") as file:
        file.write('{"traceEvents": [\n' + batch)
        while file.tell() < 50e6:
            file.write(",\n" + batch)
        file.write("\n]}")
    code = (
        "import resource, sys; from pathlib import Path; from deploy.profile.trace import read\n"
        "read(Path(sys.argv[1])); used = resource.getrusage(resource.RUSAGE_SELF)\n"
        # Not ru_maxrss: a child inherits its parent's.
        "peak = Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]\n"
        "print(used.ru_utime + used.ru_stime, peak)"
    )
    run = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    seconds, kilobytes = map(float, run.stdout.split())
    assert seconds < 6
    # It grows with the events, 60 bytes each, from what Python and its packages take: 2 GB are far.
    assert kilobytes < 250_000
