from hypothesis import given
from hypothesis import strategies as st

from deploy.stack.phases import PHASES, later, phase, relevant

# In the shape of SGLang's log lines; times and sizes are made up.
START = """\
[2026-01-01 10:00:00] server_args=ServerArgs(model_path='/model', tp_size=4)
[2026-01-01 10:00:09 TP0] Init torch distributed begin.
[2026-01-01 10:00:10 TP0] Load weight begin. avail mem=94.00 GB
[2026-01-01 10:00:40 TP0] Load weight end. type=Qwen3ForCausalLM, mem usage=20.00 GB.
[2026-01-01 10:00:41 TP0] Capture decode CUDA graph begin. This can take up to several minutes.
[2026-01-01 10:01:41 TP0] max_total_num_tokens=8192, chunked_prefill_size=2048
[2026-01-01 10:01:42] Start of pd disaggregation warmup ...
[2026-01-01 10:01:43] The server is fired up and ready to roll!
"""


def test_a_start_passes_through_the_phases_in_their_order() -> None:
    lines = START.splitlines(keepends=True)
    seen = [phase("".join(lines[:count])) for count in range(len(lines) + 1)]
    assert list(dict.fromkeys(seen)) == [name for name, _ in PHASES]


def test_the_later_of_two_phases_wins() -> None:
    assert later("loading weights", "ready") == later("ready", "loading weights") == "ready"


def test_the_last_traceback_is_what_matters() -> None:
    log = (
        "Traceback (most recent call last):\n  File a\nOldError: gone\nretrying\n"
        "\x1b[31m[TP1] Traceback (most recent call last):\x1b[0m\n  File b, line 3\n    run()\n"
        "RuntimeError: CUDA out of memory\nshutting down\n"
    )
    assert relevant(log) == [
        "[TP1] Traceback (most recent call last):",
        "  File b, line 3",
        "    run()",
        "RuntimeError: CUDA out of memory",
    ]


def test_without_a_traceback_the_error_lines_are_shown() -> None:
    assert relevant("loading\nengine: error: unrecognized arguments: --nope\nbye\n") == [
        "engine: error: unrecognized arguments: --nope"
    ]


def test_without_any_error_the_last_lines_are_shown() -> None:
    assert relevant("\n".join(map(str, range(50))), most=3) == ["47", "48", "49"]


@given(st.text(), st.integers(1, 20))
def test_any_log_gives_a_phase_and_at_most_so_many_lines(log: str, most: int) -> None:
    assert phase(log) in [name for name, _ in PHASES]
    assert len(relevant(log, most)) <= most
