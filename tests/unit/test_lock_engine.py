import hashlib
import zipfile
from pathlib import Path

import pytest

from deploy.errors import DeployError
from deploy.lock.engine import lock_engine, locked_patches, title
from deploy.lock.model import EngineLock
from deploy.lock.tree import tree_hash

HASH = "0" * 64
CHANGE = b"""Subject: [PATCH 1/2] Mend the
 queue

--- a/sglang/queue.py
+++ b/sglang/queue.py
@@ -1 +1 @@
-broken
+mended
"""
REMOVE_AND_ADD = b"""# Put the cache elsewhere
--- a/sglang/cache.py
+++ /dev/null
@@ -1 +0,0 @@
-cache
--- /dev/null
+++ b/sglang/new/cache.py
@@ -0,0 +1 @@
+cache
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "sglang.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {
            "sglang/": "",
            "sglang/queue.py": "broken\n",
            "sglang/cache.py": "cache\n",
            "sglang/.hidden": "",
            "sglang/__pycache__/queue.cpython-311.pyc": "bytecode",
            "sglang-1.dist-info/METADATA": "Name: sglang",
        }.items():
            archive.writestr(name, text)
    return path


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def files(*patches: bytes) -> dict[str, bytes]:
    names = [f"{number}.patch" for number in range(len(patches))]
    series = "# the series\n" + "".join(f"{name}\n" for name in names)
    contents = {f"patches/{name}": patch for name, patch in zip(names, patches, strict=True)}
    return {"patches/series": series.encode(), **contents}


BEFORE = {"queue.py": sha256("broken\n"), "cache.py": sha256("cache\n"), ".hidden": sha256("")}


def test_without_patches_the_tree_stays_the_wheels_own(wheel: Path) -> None:
    expected = tree_hash(BEFORE)
    assert lock_engine(wheel, HASH, files()) == EngineLock(wheel=HASH, tree=expected, patched_tree=expected)


def test_the_series_changes_removes_and_adds_files(wheel: Path) -> None:
    found = lock_engine(wheel, HASH, files(CHANGE, REMOVE_AND_ADD))
    after = {"queue.py": sha256("mended\n"), "new/cache.py": sha256("cache\n"), ".hidden": sha256("")}
    assert (found.tree, found.patched_tree) == (tree_hash(BEFORE), tree_hash(after))
    assert found.patched == {"sglang/queue.py": sha256("mended\n"), "sglang/new/cache.py": sha256("cache\n")}
    assert [(patch.title, patch.files) for patch in found.patch] == [
        ("Mend the queue", ("sglang/queue.py",)),
        ("Put the cache elsewhere", ("sglang/cache.py", "sglang/new/cache.py")),
    ]
    assert found.patch[0].sha256 == hashlib.sha256(CHANGE).hexdigest()


def test_a_patch_that_does_not_apply_is_named(wheel: Path) -> None:
    with pytest.raises(DeployError, match=r"0\.patch does not apply"):
        lock_engine(wheel, HASH, files(CHANGE.replace(b"-broken", b"-otherwise")))


@pytest.mark.parametrize(
    ("patches", "complaint"),
    [
        ({"patches/series": b"gone.patch\n"}, "no such file"),
        ({"patches/series": b"x.patch\n", "patches/x.patch": b"nothing"}, "touches no file"),
        ({"patches/series": b"x.patch\n", "patches/x.patch": b"--- a/torch/x\n+++ b/torch/x\n"}, "outside sglang"),
        ({"patches/series": b"x.patch\n", "patches/x.patch": b"\xff"}, "utf-8"),
    ],
)
def test_a_series_that_cannot_be_used_is_refused(patches: dict[str, bytes], complaint: str) -> None:
    with pytest.raises(DeployError) as raised:
        locked_patches(patches)
    assert complaint in raised.value.why


def test_a_machine_without_patch_is_told_so(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DeployError) as raised:
        lock_engine(wheel, HASH, files(CHANGE))
    assert "patch" in raised.value.fix


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"From {'a' * 40} Mon Sep 17 00:00:00 2001\nFrom: A <a@b>\nSubject: [PATCH] Mend it\n\nWhy.\n---\n",
            "Mend it",
        ),
        ("Mend it\n\nbecause\n\ndiff --git a/x b/x\n", "Mend it"),
        ("--- a/sglang/x\n+++ b/sglang/x\n", "name.patch"),
        ("# Mend it\n--- a/sglang/x\n", "Mend it"),
    ],
)
def test_a_patch_is_called_by_its_subject_or_first_line(text: str, expected: str) -> None:
    assert title(text, "name.patch") == expected
