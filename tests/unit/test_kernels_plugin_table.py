"""The table of hooks as the controller reads it: no torch, no SGLang."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sm120_kernels.plugin.table import HOOKS, OFF, ON, enabled
from sm120_kernels.plugin.upstream import function_sha256

MODULE = """
def first(x):
    return x


class Outer:
    @staticmethod
    def method():
        return 1


def last():
    return 2
"""


def test_the_table_needs_neither_torch_nor_sglang() -> None:
    code = "import sys, sm120_kernels.plugin.table; sys.exit(bool({'torch', 'sglang', 'triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_every_switch_is_a_variable_of_the_compose_file_and_off() -> None:
    compose = yaml.safe_load((Path(__file__).parents[2] / "compose.yaml").read_text(encoding="utf-8"))
    for hook in HOOKS:
        variable = hook.switch.removeprefix("SGLANG_")
        assert compose["x-engine-environment"][hook.switch] == f"${{{variable}:-0}}"


def test_a_function_is_replaced_once() -> None:
    assert len({hook.target for hook in HOOKS}) == len(HOOKS)


@given(st.sampled_from(HOOKS), st.sampled_from([*ON, *OFF]))
def test_a_switch_turns_all_hooks_of_its_op_and_no_other(hook: object, value: str) -> None:
    assert isinstance(hook, type(HOOKS[0]))
    expected = [other for other in HOOKS if other.op == hook.op and value in ON]
    assert list(enabled({hook.switch: value})) == expected


def test_a_value_that_is_neither_on_nor_off_is_refused_with_the_switchs_name() -> None:
    with pytest.raises(ValueError, match=HOOKS[0].switch):
        enabled({HOOKS[0].switch: "2"})


def test_a_functions_hash_changes_with_its_own_lines_only() -> None:
    first = function_sha256(MODULE, "first")
    assert function_sha256(MODULE.replace("return 2", "return 3"), "first") == first
    assert function_sha256("# moved\n" * 5 + MODULE, "first") == first
    assert function_sha256(MODULE.replace("return x", "return x  # so"), "first") != first
    method = function_sha256(MODULE, "Outer.method")
    assert function_sha256(MODULE.replace("@staticmethod", "@classmethod"), "Outer.method") != method


def test_a_function_that_is_not_there_is_a_key_error() -> None:
    for name in ("second", "Outer.first", "Inner.method"):
        with pytest.raises(KeyError):
            function_sha256(MODULE, name)
