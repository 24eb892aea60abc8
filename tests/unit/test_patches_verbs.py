"""The verbs about patches as a person meets them: output and exit code, on a small SGLang of our own."""

import json
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deploy import patches_verbs
from deploy.cli import app
from deploy.errors import DeployError
from deploy.patches.release import folder_source

pytestmark = pytest.mark.skipif(not shutil.which("patch"), reason="needs the program `patch`")

CORE = "def answer():\n    return 41\n"
PATCH = """Subject: The right number
Upstream: none known
Switch: ANSWER
Default: 42

--- a/sglang/core.py
+++ b/sglang/core.py
@@ -1,2 +1,2 @@
 def answer():
-    return 41
+    return 42
"""
TABLE = """from types import SimpleNamespace
HOOKS = [SimpleNamespace(sources=[("sglang.core.answer", "42")])]
"""
UPSTREAM = """def function_sha256(source_text, qualified_name):
    return "42" if "42" in source_text else "other"
"""


class Place:
    """A checkout, the SGLang that it locks, and a later one."""

    def __init__(self, folder: Path) -> None:
        self.root, self.locked, self.later = folder / "checkout", folder / "locked", folder / "later"
        self.write(self.root, "patches/series", "one.patch\n")
        self.write(self.root, "patches/one.patch", PATCH)
        for tree in (self.locked, self.later):
            self.write(tree, "sglang/core.py", CORE)

    def write(self, folder: Path, name: str, text: str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    def plugin(self, table: str = TABLE) -> None:
        for name, text in {
            "__init__": "",
            "plugin/__init__": "",
            "plugin/table": table,
            "plugin/upstream": UPSTREAM,
        }.items():
            self.write(self.root, f"kernels/sm120_kernels/{name}.py", text)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place(tmp_path)

    @contextmanager
    def locked_release(root: Path, progress: Any) -> Generator[Any]:
        yield folder_source(made.locked)

    def install_release(uv: Path, version: str, tree: Path) -> None:
        shutil.copytree(made.later, tree, dirs_exist_ok=True)

    monkeypatch.setattr(patches_verbs, "ROOT", made.root)
    monkeypatch.setattr(patches_verbs, "locked_release", locked_release)
    monkeypatch.setattr(patches_verbs, "install_release", install_release)
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["patches", *arguments])


def test_check_lists_patch_state_switch_and_functions(place: Place) -> None:
    done = run("check")
    assert done.exit_code == 0
    assert done.stdout == "one.patch\tapplies\tANSWER=42\tsglang/core.py: answer\n"
    assert "1 of 1 patches apply" in done.stderr


def test_check_fails_with_the_reason_when_a_patch_does_not_apply(place: Place) -> None:
    place.write(place.locked, "sglang/core.py", "def answer():\n    return 40\n")
    done = run("check")
    assert done.exit_code == 1
    assert done.stdout.startswith("one.patch\tfails\t")
    assert "Hunk #1 FAILED" in done.stderr


def test_check_as_json(place: Place) -> None:
    (patch,) = json.loads(run("check", "--json").stdout)["patches"]
    assert (patch["name"], patch["state"], patch["switch"], patch["default"]) == (
        "one.patch",
        "applies",
        "ANSWER",
        "42",
    )
    assert patch["functions"] == {"sglang/core.py": ["answer"]}


def test_edit_then_refresh_rewrites_the_patch(place: Place, tmp_path: Path) -> None:
    folder = tmp_path / "edited"
    done = run("edit", "one.patch", str(folder))
    assert done.exit_code == 0
    assert done.stdout.split() == [str(folder / "sglang/core.py")]
    (folder / "sglang/core.py").write_text(CORE.replace("41", "43"))
    done = run("refresh", "one.patch", str(folder), "--json")
    assert json.loads(done.stdout) == {"rewritten": ["one.patch"]}
    assert "+    return 43" in (place.root / "patches/one.patch").read_text()
    assert run("refresh").stdout == ""


@pytest.mark.parametrize(
    "arguments", [("refresh", "one.patch"), ("refresh", "one.patch", "/nowhere"), ("edit",), ("try",)]
)
def test_a_wrong_command_line_is_code_2(place: Place, arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_try_says_that_a_release_leaves_everything_whole(place: Place) -> None:
    place.plugin()
    place.write(place.later, "sglang/core.py", "import os\n\n\n" + CORE)
    done = run("try", "9.9")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "one.patch\tapplies\tANSWER=42\tsglang/core.py: answer",
        "sglang.core.answer\tunchanged\tsglang/core.py",
    ]
    assert "1 of 1 patches apply to SGLang 9.9" in done.stderr


def test_try_finds_a_changed_hook_although_the_patch_applies(place: Place) -> None:
    place.plugin(TABLE.replace('"42"', '"something else"'))
    done = run("try", "9.9", "--json")
    assert done.exit_code == 1
    shown = json.loads(done.stdout)
    assert shown["sglang"] == "9.9"
    assert shown["patches"][0]["state"] == "applies"
    assert shown["hooks"] == [{"target": "sglang.core.answer", "state": "changed", "file": "sglang/core.py"}]


@pytest.mark.parametrize(
    ("text", "state"), [(CORE.replace("41", "42"), "contained"), ("def answer():\n    return 7\n", "fails")]
)
def test_try_without_a_plugin_speaks_of_patches_alone(place: Place, text: str, state: str) -> None:
    place.write(place.later, "sglang/core.py", text)
    done = run("try", "9.9", "--json")
    assert done.exit_code == 1
    shown = json.loads(done.stdout)
    assert shown["patches"][0]["state"] == state
    assert "hooks" not in shown


def test_a_damaged_plugin_is_an_error_with_its_cure_and_no_traceback(place: Place) -> None:
    place.plugin("import no_such_module\n")
    done = run("try", "9.9")
    assert isinstance(done.exception, DeployError)
    assert "no_such_module" in done.exception.why


@pytest.mark.parametrize("verb", ["check", "edit", "refresh", "try"])
def test_each_verb_has_examples_in_its_help(verb: str) -> None:
    done = run(verb, "--help")
    assert done.exit_code == 0
    assert f"deploy patches {verb}" in done.stdout
