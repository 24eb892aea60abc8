import pytest

from deploy.patches.functions import MODULE, touched_functions

BEFORE = """import os


def first():
    return 1


class Thing:
    size = 1

    @property
    def length(self):
        def inner():
            return 2

        return inner()
"""


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("return 1", "return 3", ("first",)),
        ("return 2", "return 3", ("Thing.length.inner",)),
        ("return inner()", "return 3", ("Thing.length",)),
        ("@property", "@cached", ("Thing.length",)),
        ("import os", "import sys", (MODULE,)),
        ("size = 1", "size = 2", (MODULE,)),
        ("def first", "def second", ("first", "second")),
        ("    return 1\n", "    return 1\n\n\ndef added():\n    pass\n", ("added",)),
        ("import os", "import os", ()),
    ],
)
def test_the_innermost_function_of_each_changed_line_is_named(old: str, new: str, names: tuple[str, ...]) -> None:
    assert touched_functions(BEFORE, BEFORE.replace(old, new)) == names


def test_a_text_that_is_not_python_is_refused() -> None:
    with pytest.raises(SyntaxError):
        touched_functions(BEFORE, BEFORE + "def\n")
