import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.image.apply_patches import apply
from deploy.patches.text import changed_lines, changes, fields, header

needs_patch = pytest.mark.skipif(not shutil.which("patch"), reason="needs the program `patch`")
# Few different lines, so that many repeat and a hunk needs context to have one place.
texts = st.lists(st.sampled_from(["a\n", "b\n", "    c\n", "\n"]), min_size=1, max_size=12).map("".join)


@needs_patch
@given(before=texts, after=texts)
def test_changes_applied_to_the_text_before_give_the_text_after(
    tmp_path_factory: pytest.TempPathFactory, before: str, after: str
) -> None:
    if before == after:
        assert changes({"sglang/x.py": before}, {"sglang/x.py": after}) == ""
        return
    folder = tmp_path_factory.mktemp("tree")
    (folder / "sglang").mkdir()
    (folder / "sglang/x.py").write_text(before)
    (folder / "x.patch").write_text("Subject: x\n\n" + changes({"sglang/x.py": before}, {"sglang/x.py": after}))
    apply(folder / "x.patch", folder)
    assert (folder / "sglang/x.py").read_text() == after


def hunks(patch: str) -> list[list[str]]:
    """The lines that each hunk expects."""
    found: list[list[str]] = []
    for line in patch.splitlines():
        if line.startswith("@@"):
            found.append([])
        elif found and not line.startswith("+"):
            found[-1].append(line[1:])
    return found


@given(before=texts, after=texts)
def test_each_hunk_has_one_place_or_takes_in_the_whole_text(before: str, after: str) -> None:
    lines = before.splitlines()
    for hunk in hunks(changes({"x.py": before}, {"x.py": after})):
        places = sum(lines[start : start + len(hunk)] == hunk for start in range(len(lines)))
        assert places == 1 or len(hunk) == len(lines)


def test_no_more_context_than_that_is_written() -> None:
    before = "def one():\n    x = 1\n    return x\n\n\ndef two():\n    x = 1\n    return x\n"
    unique = changes({"x.py": before}, {"x.py": before.replace("def two", "def three")})
    assert hunks(unique) == [["", "def two():", "    x = 1"]]
    end = "    return x\n"
    repeated = changes({"x.py": before}, {"x.py": before[: -len(end)] + "    return 2\n"})
    assert hunks(repeated) == [["def two():", "    x = 1", "    return x"]]


def test_a_new_and_a_removed_file_come_from_and_go_to_nothing() -> None:
    patch = changes(
        {"sglang/new.py": None, "sglang/old.py": "x = 1\n"}, {"sglang/new.py": "y = 1\n", "sglang/old.py": None}
    )
    assert "--- /dev/null\n+++ b/sglang/new.py\n" in patch
    assert "--- a/sglang/old.py\n+++ /dev/null\n" in patch


def test_a_text_without_a_last_line_feed_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"x\.py"):
        changes({"x.py": "a\n"}, {"x.py": "a"})


def test_a_header_ends_where_the_changes_begin() -> None:
    text = "Subject: Mend\n the queue\nSwitch: none\n\nWhy - because.\n\n--- a/sglang/x.py\n+++ b/sglang/x.py\n"
    assert header(text) == "Subject: Mend\n the queue\nSwitch: none\n\nWhy - because.\n\n"
    assert fields(text) == {"Subject": "Mend the queue", "Switch": "none"}


@given(before=texts, after=texts)
def test_lines_that_are_not_named_as_changed_are_common_to_both_texts(before: str, after: str) -> None:
    gone, come = changed_lines(before, after)
    old, new = before.splitlines(), after.splitlines()
    if before != after:
        assert gone or come
    kept_old = [line for number, line in enumerate(old, 1) if number not in gone]
    assert all(line in new for line in kept_old)
    assert all(line in old for number, line in enumerate(new, 1) if number not in come)


def test_the_repositorys_patches_say_what_they_are_for() -> None:
    for path in sorted((Path(__file__).parents[2] / "patches").glob("*.patch")):
        text = path.read_text(encoding="utf-8")
        about = fields(text)
        assert set(about) == {"Subject", "Upstream", "Switch", "Default"}, path
        assert all(about.values()), path
        assert len(header(text).split("\n\n", 1)[1].split()) > 20, f"{path} does not say why"
