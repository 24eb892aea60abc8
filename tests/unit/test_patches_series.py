import shutil
from pathlib import Path

import pytest

from deploy.errors import DeployError
from deploy.patches.release import folder_source
from deploy.patches.series import PatchResult, check, compare, edit, overlay, refresh

pytestmark = pytest.mark.skipif(not shutil.which("patch"), reason="needs the program `patch`")

CORE = """# core
def answer():
    value = 41
    step = 1
    return value + step


def other():
    return 0
"""
ONE = """Subject: The right number
Upstream: none known
Switch: ANSWER
Default: 42

Because it is.

--- a/sglang/core.py
+++ b/sglang/core.py
@@ -2,5 +2,5 @@
 def answer():
     value = 41
-    step = 1
+    step = 2
     return value + step
 
"""
TWO = """Subject: The other number
Switch: none

--- a/sglang/core.py
+++ b/sglang/core.py
@@ -8,2 +8,2 @@
 def other():
-    return 0
+    return 1
"""
HEADER = "Subject: A third one\nSwitch: none\n"


class Checkout:
    """A checkout with a patch series, beside the SGLang that it is for."""

    def __init__(self, folder: Path) -> None:
        self.root, self.tree = folder / "checkout", folder / "site-packages"
        self.patches = self.root / "patches"
        self.patches.mkdir(parents=True)
        self.series(one=ONE, two=TWO)
        self.write("sglang/core.py", CORE)
        self.write("sglang/bystander.py", "VALUE = 0\n")

    def write(self, path: str, text: str) -> None:
        (self.tree / path).parent.mkdir(parents=True, exist_ok=True)
        (self.tree / path).write_text(text)

    def series(self, **patches: str) -> None:
        (self.patches / "series").write_text("# in order\n" + "".join(f"{name}.patch\n" for name in patches))
        for name, text in patches.items():
            (self.patches / f"{name}.patch").write_text(text)

    def texts(self) -> dict[str, str]:
        return {path.name: path.read_text() for path in self.patches.iterdir()}

    def check(self) -> list[PatchResult]:
        return check(self.root, folder_source(self.tree))

    def refresh(self, name: str | None = None, folder: Path | None = None) -> list[str]:
        return refresh(self.root, folder_source(self.tree), name, folder)

    def edit(self, name: str, folder: Path, *more: str) -> list[str]:
        return edit(self.root, name, folder_source(self.tree), folder, more)


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_patches_that_apply_are_shown_with_their_switch_and_functions(checkout: Checkout) -> None:
    one, two = checkout.check()
    assert (one.name, one.title, one.state) == ("one.patch", "The right number", "applies")
    assert (one.switch, one.default) == ("ANSWER", "42")
    assert one.functions == {"sglang/core.py": ("answer",)}
    assert two.functions == {"sglang/core.py": ("other",)}
    assert (checkout.tree / "sglang/core.py").read_text() == CORE


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (CORE.replace("def answer", "def reply"), "FAILED"),  # would apply with fuzz
        (CORE.replace("step = 1", "step = 0"), "FAILED"),
        ("", "FAILED"),
    ],
)
def test_a_patch_that_needs_fuzz_or_more_fails_with_the_reason(checkout: Checkout, text: str, why: str) -> None:
    checkout.write("sglang/core.py", text)
    one = checkout.check()[0]
    assert one.state == "fails"
    assert why in one.why


def test_a_patch_that_leaves_no_python_fails_and_the_next_one_meets_the_file_without_it(checkout: Checkout) -> None:
    checkout.series(one=ONE.replace("+    step = 2", "+    step = (2"), two=TWO)
    one, two = checkout.check()
    assert one.state == "fails"
    assert "never closed" in one.why
    assert two.state == "applies"


def test_a_patch_that_touches_other_packages_or_nothing_fails(checkout: Checkout) -> None:
    checkout.series(one=ONE.replace("sglang/", "torch/"), two=HEADER)
    assert [(result.state, result.why) for result in checkout.check()] == [
        ("fails", "touches files outside sglang/: torch/core.py"),
        ("fails", "touches no file"),
    ]


def test_a_release_that_has_the_change_already_is_told_from_one_that_does_not_fit(checkout: Checkout) -> None:
    checkout.write("sglang/core.py", CORE.replace("step = 1", "step = 2"))
    assert [result.state for result in checkout.check()] == ["contained", "applies"]


def test_a_change_that_lands_in_another_function_is_marked(checkout: Checkout) -> None:
    checkout.refresh()
    here = checkout.check()
    checkout.write("sglang/core.py", "# a new line\n" + CORE)
    assert [result.state for result in compare(here, checkout.check())] == ["applies", "applies"]
    checkout.write("sglang/core.py", CORE.replace("def answer", "def reply"))
    one, two = compare(here, checkout.check())
    assert (one.state, two.state) == ("elsewhere", "applies")
    assert "answer" in one.why
    assert one.functions == {"sglang/core.py": ("reply",)}


def test_refreshing_writes_the_least_context_and_the_right_lines_and_keeps_the_header(checkout: Checkout) -> None:
    checkout.write("sglang/core.py", "import os\n\n\n" + CORE)
    assert checkout.refresh() == ["one.patch", "two.patch"]
    body = "@@ -6,3 +6,3 @@\n     value = 41\n-    step = 1\n+    step = 2\n     return value + step\n"
    names = "--- a/sglang/core.py\n+++ b/sglang/core.py\n"
    assert checkout.texts()["one.patch"] == ONE.split("--- a/")[0] + names + body
    assert checkout.refresh() == []
    assert [result.state for result in checkout.check()] == ["applies", "applies"]


def test_an_edited_patch_is_taken_over_and_those_after_it_follow(checkout: Checkout, tmp_path: Path) -> None:
    folder = tmp_path / "edited"
    assert checkout.edit("one.patch", folder, "sglang/bystander.py") == ["sglang/bystander.py", "sglang/core.py"]
    assert (folder / "sglang/core.py").read_text() == CORE.replace("step = 1", "step = 2")
    (folder / "sglang/core.py").write_text("import os\n\n\n" + CORE.replace("step = 1", "step = 3"))
    (folder / "sglang/bystander.py").write_text("VALUE = 1\n")
    (folder / "sglang/new.py").write_text("VALUE = 2\n")
    assert checkout.refresh("one.patch", folder) == ["one.patch", "two.patch"]
    one, two = checkout.check()
    assert (one.state, two.state) == ("applies", "applies")
    assert set(one.functions) == {"sglang/core.py", "sglang/bystander.py", "sglang/new.py"}
    assert "@@ -11,2 +11,2 @@" in checkout.texts()["two.patch"]
    overlay(checkout.root, folder_source(checkout.tree), checkout.tree)
    assert (checkout.tree / "sglang/core.py").read_text().count("step = 3") == 1
    assert (checkout.tree / "sglang/new.py").read_text() == "VALUE = 2\n"


def test_a_new_patch_begins_as_a_header(checkout: Checkout, tmp_path: Path) -> None:
    checkout.series(one=ONE, two=TWO, three=HEADER)
    assert checkout.edit("three.patch", tmp_path / "e", "sglang/bystander.py") == ["sglang/bystander.py"]
    (tmp_path / "e/sglang/bystander.py").write_text("VALUE = 3\n")
    assert checkout.refresh("three.patch", tmp_path / "e") == ["one.patch", "three.patch"]
    assert checkout.texts()["three.patch"].startswith(HEADER + "\n--- a/sglang/bystander.py\n")


def test_a_removed_file_becomes_a_patch_that_removes_it(checkout: Checkout, tmp_path: Path) -> None:
    checkout.edit("two.patch", tmp_path / "e", "sglang/bystander.py")
    (tmp_path / "e/sglang/core.py").unlink()
    checkout.refresh("two.patch", tmp_path / "e")
    assert "+++ /dev/null" in checkout.texts()["two.patch"]
    assert [result.state for result in checkout.check()] == ["applies", "applies"]


@pytest.mark.parametrize("edited", ["# core\n", CORE, "x = 1"])
def test_what_cannot_be_refreshed_changes_no_patch(checkout: Checkout, tmp_path: Path, edited: str) -> None:
    before = checkout.texts()
    checkout.edit("one.patch", tmp_path / "e")
    (tmp_path / "e/sglang/core.py").write_text(edited)
    with pytest.raises(DeployError) as failure:
        checkout.refresh("one.patch", tmp_path / "e")
    assert "patch" in failure.value.message
    assert failure.value.fix
    assert checkout.texts() == before


def test_what_editors_leave_does_not_become_part_of_the_patch(checkout: Checkout, tmp_path: Path) -> None:
    checkout.refresh()
    checkout.edit("one.patch", tmp_path / "e")
    for name in (".core.py.swp", "core.py~", "__pycache__/core.cpython-311.pyc"):
        (tmp_path / "e/sglang" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "e/sglang" / name).write_bytes(b"\xff")
    assert checkout.refresh("one.patch", tmp_path / "e") == []


@pytest.mark.parametrize(("name", "complaint"), [("notes.txt", "no file of SGLang"), ("sglang/image.py", "no text")])
def test_a_stray_or_binary_file_in_the_edited_folder_is_refused(
    checkout: Checkout, tmp_path: Path, name: str, complaint: str
) -> None:
    before = checkout.texts()
    checkout.edit("one.patch", tmp_path / "e")
    (tmp_path / "e" / name).write_bytes(b"\xff")
    with pytest.raises(DeployError, match=complaint):
        checkout.refresh("one.patch", tmp_path / "e")
    assert checkout.texts() == before


def test_a_folder_with_files_is_not_written_to(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "e").mkdir()
    (tmp_path / "e/precious").write_text("x")
    with pytest.raises(DeployError, match="not empty"):
        checkout.edit("one.patch", tmp_path / "e")
    assert [path.name for path in (tmp_path / "e").iterdir()] == ["precious"]


@pytest.mark.parametrize("verb", ["edit", "refresh"])
def test_a_patch_that_the_series_does_not_name_is_refused(checkout: Checkout, tmp_path: Path, verb: str) -> None:
    with pytest.raises(DeployError, match=r"does not name other\.patch"):
        checkout.edit("other.patch", tmp_path / "e") if verb == "edit" else checkout.refresh("other.patch", tmp_path)


def test_a_file_that_sglang_does_not_have_is_refused_by_name(checkout: Checkout, tmp_path: Path) -> None:
    with pytest.raises(DeployError, match=r"SGLang has no sglang/nothing\.py"):
        checkout.edit("one.patch", tmp_path / "e", "sglang/nothing.py")
    assert not (tmp_path / "e").exists()


def test_a_missing_series_or_patch_is_named(checkout: Checkout) -> None:
    (checkout.patches / "one.patch").unlink()
    with pytest.raises(DeployError, match=r"patches/one.patch is missing"):
        checkout.check()
    (checkout.patches / "series").unlink()
    with pytest.raises(DeployError, match="there is no patches/series"):
        checkout.check()
