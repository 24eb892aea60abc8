import pytest

from deploy.lock.options import options


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["prefill", "--a=1", "--b", "2", "3", "--c"], {"": ("prefill",), "--a": ("1",), "--b": ("2", "3"), "--c": ()}),
        (["--a=x=y"], {"--a": ("x=y",)}),
        (["--a="], {"--a": ("",)}),
        (["--a=1", "--a", "2"], {"--a": ("2",)}),
        ([], {}),
    ],
)
def test_a_command_line_is_options_and_values(arguments: list[str], expected: dict[str, tuple[str, ...]]) -> None:
    assert options(arguments) == expected
