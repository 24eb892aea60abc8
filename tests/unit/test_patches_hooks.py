import ast
import hashlib
from pathlib import Path

import pytest

from deploy.patches.hooks import HookResult, hook_results, plugin_pairs

SOURCE = "def attend(q):\n    return q\n\n\nclass Pool:\n    def store(self):\n        return 1\n"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def function_sha256(source: str, name: str) -> str:
    """The plug-in's function, as far as these tests need it."""
    body = ast.parse(source).body
    for part in name.split("."):
        node = next((node for node in body if getattr(node, "name", None) == part), None)
        if node is None:
            raise KeyError(name)
        body = getattr(node, "body", [])
    return digest(ast.get_source_segment(source, node) or "")  # pyright: ignore[reportPossiblyUnboundVariable]


ATTEND, STORE = digest("def attend(q):\n    return q"), digest("def store(self):\n        return 1")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "sglang/srt/layer.py": SOURCE,
        "sglang/ops/__init__.py": SOURCE,
        "sglang/bad.py": "def\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("target", "sha256", "state", "file"),
    [
        ("sglang.srt.layer.attend", ATTEND, "unchanged", "sglang/srt/layer.py"),
        ("sglang.srt.layer.attend", STORE, "changed", "sglang/srt/layer.py"),
        ("sglang.srt.layer.Pool.store", STORE, "unchanged", "sglang/srt/layer.py"),
        ("sglang.ops.attend", ATTEND, "unchanged", "sglang/ops/__init__.py"),
        ("sglang.srt.layer.gone", ATTEND, "missing", "sglang/srt/layer.py"),
        ("sglang.bad.attend", ATTEND, "missing", "sglang/bad.py"),
        ("sglang.nowhere.attend", ATTEND, "missing", ""),
    ],
)
def test_a_hooked_function_is_unchanged_changed_or_missing(
    tree: Path, target: str, sha256: str, state: str, file: str
) -> None:
    (result,) = hook_results([(target, sha256)], tree, function_sha256)
    assert (result.state, result.file) == (state, file)
    assert isinstance(result, HookResult)


def write_plugin(root: Path, table: str) -> None:
    folder = root / "kernels/sm120_kernels/plugin"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").touch()
    (folder / "table.py").write_text(table)
    (folder / "upstream.py").write_text("def function_sha256(source_text, qualified_name):\n    return '1'\n")


def test_a_checkout_without_a_plugin_has_no_hooks(tmp_path: Path) -> None:
    assert plugin_pairs(tmp_path) is None


def test_the_table_of_the_named_checkout_is_read(tmp_path: Path) -> None:
    table = "from types import SimpleNamespace\nHOOKS = [SimpleNamespace(sources=[('sglang.x.f', '1')])]\n"
    write_plugin(tmp_path, table)
    plugin = plugin_pairs(tmp_path)
    assert plugin is not None
    pairs, hashes = plugin
    assert pairs == [("sglang.x.f", "1")]
    assert hashes("text", "f") == "1"


def test_a_table_that_cannot_be_imported_says_so(tmp_path: Path) -> None:
    write_plugin(tmp_path, "import no_such_module\n")
    with pytest.raises(ImportError, match="no_such_module"):
        plugin_pairs(tmp_path)
