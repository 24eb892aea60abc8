import importlib.util
import py_compile
import shutil
from pathlib import Path

import pytest

from deploy.image import apply_patches

pytestmark = pytest.mark.skipif(not shutil.which("patch"), reason="needs the program `patch`")

BEFORE = "def answer():\n    return 41\n\n\ndef other():\n    return 0\n"
PATCH = """Say the right number.

--- a/sglang/core.py
+++ b/sglang/core.py
@@ -1,3 +1,3 @@
 def answer():
-    return 41
+    return 42
 
"""
NEW_FILE = """--- /dev/null
+++ b/sglang/extra.py
@@ -0,0 +1 @@
+VALUE = 1
"""
REMOVED_FILE = """--- a/sglang/old.py
+++ /dev/null
@@ -1 +0,0 @@
-VALUE = 0
"""


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    package = tmp_path / "site-packages/sglang"
    package.mkdir(parents=True)
    (package / "core.py").write_text(BEFORE)
    (package / "old.py").write_text("VALUE = 0\n")
    (package / "bystander.py").write_text("VALUE = 0\n")
    for file in package.glob("*.py"):
        py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    return package.parent


def write_series(folder: Path, patches: dict[str, str]) -> Path:
    folder.mkdir()
    (folder / "series").write_text("# in order\n\n" + "".join(f"{name}  # why\n" for name in patches))
    for name, text in patches.items():
        (folder / name).write_text(text)
    return folder


def bytecode_of(file: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(file)))


def test_the_repositorys_series_names_exactly_its_patches() -> None:
    patches = Path(__file__).parents[2] / "patches"
    named = apply_patches.series((patches / "series").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(path.name for path in patches.glob("*.patch"))


def test_a_series_changes_files_and_their_bytecode_and_nothing_else(tmp_path: Path, site_packages: Path) -> None:
    bystander = bytecode_of(site_packages / "sglang/bystander.py")
    before = bystander.stat().st_mtime_ns
    patches = write_series(tmp_path / "p", {"1.patch": PATCH, "2.patch": NEW_FILE, "3.patch": REMOVED_FILE})
    assert apply_patches.main(patches, site_packages) == 0
    core = site_packages / "sglang/core.py"
    assert core.read_text() == BEFORE.replace("41", "42")
    # Unchecked bytecode is what runs, whatever the source says.
    core.write_text("")
    spec = importlib.util.spec_from_file_location("core", core)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.answer() == 42
    assert bytecode_of(site_packages / "sglang/extra.py").exists()
    assert not (site_packages / "sglang/old.py").exists()
    assert not bytecode_of(site_packages / "sglang/old.py").exists()
    assert bystander.stat().st_mtime_ns == before
    assert not list(site_packages.rglob("*.orig")) + list(site_packages.rglob("*.rej"))


def test_an_empty_series_changes_nothing(tmp_path: Path, site_packages: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in site_packages.rglob("*")}
    assert apply_patches.main(write_series(tmp_path / "p", {}), site_packages) == 0
    assert {path: path.stat().st_mtime_ns for path in site_packages.rglob("*")} == before


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (PATCH.replace(" def answer():", " def answers():"), "does not apply"),  # would apply with fuzz
        (PATCH.replace("return 41", "return 40"), "does not apply"),
        (PATCH.replace("sglang/core.py", "torch/core.py"), "outside sglang/"),
        (PATCH.replace("sglang/core.py", "sglang/../torch.py"), "outside sglang/"),
        ("nothing\n", "touches no file"),
    ],
)
def test_a_patch_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, site_packages: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    patches = write_series(tmp_path / "p", {"wrong.patch": text})
    assert apply_patches.main(patches, site_packages) == 1
    error = capsys.readouterr().err
    assert "wrong.patch" in error
    assert complaint in error


def test_a_patch_that_is_applied_already_is_refused(tmp_path: Path, site_packages: Path) -> None:
    patches = write_series(tmp_path / "p", {"1.patch": PATCH, "2.patch": PATCH.replace("Say", "Repeat")})
    assert apply_patches.main(patches, site_packages) == 1


def test_a_named_patch_that_is_missing_is_refused(
    tmp_path: Path, site_packages: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    patches = write_series(tmp_path / "p", {"1.patch": PATCH})
    (patches / "1.patch").unlink()
    assert apply_patches.main(patches, site_packages) == 1
    assert "1.patch" in capsys.readouterr().err
