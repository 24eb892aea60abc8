import hashlib
import subprocess
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from deploy.lock import tree
from deploy.lock.tree import content_hashes, tree_hash

names = st.text(st.characters(codec="utf-8", exclude_characters="\n\\\r/"), min_size=1, max_size=4)
hashes = st.sampled_from(["0" * 64, "1" * 64])
trees = st.dictionaries(names, hashes, max_size=4)


@given(trees, trees)
def test_two_trees_have_the_same_hash_exactly_if_they_are_equal(one: dict[str, str], two: dict[str, str]) -> None:
    assert (tree_hash(one) == tree_hash(two)) == (one == two)


@given(trees)
def test_the_order_of_the_files_does_not_matter(files: dict[str, str]) -> None:
    assert tree_hash(dict(reversed(files.items()))) == tree_hash(files)


def test_it_is_what_the_documented_command_prints(tmp_path: Path) -> None:
    contents = {"b.py": b"1", "a/ü.py": b"2", "a.py": b"", "a/__pycache__/x.pyc": b"left out", "Z": b"3"}
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    command = next(line for line in (tree.__doc__ or "").splitlines() if "sha256sum" in line)
    printed = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    found = content_hashes({f"root/{name}": content for name, content in contents.items()}, "root")
    assert printed.split()[0] == tree_hash(found)


def test_only_files_of_the_folder_count() -> None:
    files = {"root/a": b"x", "rootless/b": b"x", "c": b"x", "root/__pycache__/d.pyc": b"x"}
    assert content_hashes(files, "root") == {"a": hashlib.sha256(b"x").hexdigest()}
