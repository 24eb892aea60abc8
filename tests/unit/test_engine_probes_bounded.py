"""The frame that every probe runs in: hang, wrong data and crash are told apart, and nothing outlives its limit."""

import os
import sys
import time

import pytest
from engine_runtime.probes import bounded
from engine_runtime.probes.bounded import Ended, Process, run_together
from hypothesis import given
from hypothesis import strategies as st

LIMITS = {"start": 5.0, "work": 0.6}


def script(code: str, **environment: str) -> Process:
    return Process([sys.executable, "-uc", f"import json, os, sys, time\n{code}"], environment)


WORK = "print(json.dumps({'stage': 'work'}))\n"


def test_processes_that_end_well_are_ok_and_what_they_said_is_kept() -> None:
    processes = [script(f"{WORK}print(json.dumps({{'n': {number}}})); print('words')") for number in range(2)]
    assert run_together(processes, LIMITS) == Ended("ok")
    assert [process.messages[-1] for process in processes] == [{"n": 0}, {"n": 1}]
    assert processes[0].log == ["words"]


def test_a_hang_names_its_stage_and_leaves_no_process() -> None:
    processes = [script(WORK), script(f"{WORK}print(json.dumps({{'pid': os.getpid()}})); time.sleep(60)")]
    started = time.monotonic()
    assert run_together(processes, LIMITS) == Ended("hang", "work: not done after 1 s")
    assert time.monotonic() - started < 4
    pid = next(message["pid"] for message in processes[1].messages if "pid" in message)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_stage_begins_when_the_slowest_is_there() -> None:
    """One waits 1 s at work for a partner that is still starting: longer than a stage may last, and no hang."""
    processes = [script(f"{WORK}time.sleep(1.2)"), script(f"time.sleep(1)\n{WORK}time.sleep(0.3)")]
    assert run_together(processes, LIMITS) == Ended("ok")


def test_wrong_values_beat_the_failure_of_the_partner() -> None:
    processes = [
        script("sys.exit('lost my peer')"),
        script(f"print(json.dumps({{'said': '3 wrong'}})); sys.exit({bounded.WRONG_VALUES})"),
    ]
    assert run_together(processes, LIMITS) == Ended("wrong_values", "3 wrong")


def test_the_first_to_fail_is_the_cause() -> None:
    processes = [script("time.sleep(0.5); sys.exit('lost my peer')"), script("raise RuntimeError('the cause')")]
    assert run_together(processes, LIMITS) == Ended("failed", "RuntimeError: the cause")


def test_a_partner_that_waits_for_the_dead_is_ended() -> None:
    started = time.monotonic()
    ended = run_together([script("sys.exit('gone')"), script("time.sleep(60)")], LIMITS)
    assert ended == Ended("failed", "gone") and time.monotonic() - started < 6


def test_a_segmentation_fault_is_a_failure() -> None:
    ended = run_together([script("os.kill(os.getpid(), 11)")], LIMITS)
    assert ended == Ended("failed", "exit status -11")


def test_a_child_that_keeps_the_pipe_open_does_not_keep_us() -> None:
    code = f"{WORK}import subprocess; subprocess.Popen(['sleep', '20'])"
    started = time.monotonic()
    assert run_together([script(code)], LIMITS).outcome == "hang"
    assert time.monotonic() - started < 4


@given(
    st.lists(st.text() | st.sampled_from(['{"stage": "work"}', '{"stage": 5}', '{"stage": "elsewhere"}', "{" * 9999]))
)
def test_any_lines_are_taken(lines: list[str]) -> None:
    process = Process([])
    for line in lines:
        process.take(line)
    assert process.place(["start", "work"]) == ('{"stage": "work"}' in lines)


def test_statuses_are_different_for_different_ends() -> None:
    assert len(set(bounded.EXIT_STATUS.values())) == len(bounded.EXIT_STATUS)
    assert os.WEXITSTATUS(0) == bounded.OK
