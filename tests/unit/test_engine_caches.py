import io
import os
import tarfile
from pathlib import Path

import pytest
from engine_runtime import caches
from hypothesis import given
from hypothesis import strategies as st

NAMES = st.text(alphabet="abcdef.-_0", min_size=1, max_size=6).filter(lambda name: name.strip("."))
TREES = st.dictionaries(st.lists(NAMES, min_size=1, max_size=3).map("/".join), st.binary(max_size=20), max_size=8)


def write(root: Path, tree: dict[str, bytes]) -> dict[str, bytes]:
    """Write what of a tree can be written: a name cannot be a file and a folder."""
    written: dict[str, bytes] = {}
    for name, content in tree.items():
        path = root / name
        if path.exists() or any(parent.is_file() for parent in path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        written[name] = content
    return written


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def packed(root: Path) -> bytes:
    target = io.BytesIO()
    caches.pack(root, target)
    return target.getvalue()


def kept(name: str) -> bool:
    return not any(caches.is_transient(part) for part in name.split("/"))


@given(TREES, TREES)
def test_what_was_packed_comes_out_and_what_was_there_stays(
    tmp_path_factory: pytest.TempPathFactory, first: dict[str, bytes], second: dict[str, bytes]
) -> None:
    folder = tmp_path_factory.mktemp("caches")
    one, other = folder / "one", folder / "other"
    for root in (one, other):
        root.mkdir()
    given_tree, there = write(one, first), write(other, {n: b"mine" for n in second if n in first or not first})
    before = files(other)
    archive = packed(one)
    came = caches.unpack(other, io.BytesIO(archive))
    after = files(other)
    assert before.items() <= after.items()
    # A file where the other has a folder, or below a file of its own, has no place.
    blocked = {
        name for name in given_tree for own in before if f"{own}/".startswith(f"{name}/") or name.startswith(f"{own}/")
    }
    wanted = {name: content for name, content in given_tree.items() if kept(name) and name not in blocked}
    assert after == wanted | before
    assert came == len(after) - len(before)
    assert there.keys() <= after.keys()
    assert not list(other.glob(".restoring-*"))


def test_times_stay_and_are_never_later(tmp_path: Path) -> None:
    write(tmp_path / "one", {"a/kernel.so": b"x"})
    os.utime(tmp_path / "one/a/kernel.so", ns=(0, 1_700_000_000_123_456_789))
    caches.unpack(tmp_path / "other", io.BytesIO(packed(tmp_path / "one")))
    assert (tmp_path / "other/a/kernel.so").stat().st_mtime_ns == 1_700_000_000_000_000_000


def test_links_into_the_image_and_locks_stay_out(tmp_path: Path) -> None:
    write(tmp_path, {"sglang-jit/kept.so": b"x", "sglang-jit/.lock": b"", "triton/tmp.pid_1_2/half.cubin": b"y"})
    (tmp_path / "sglang-jit/deps-1").symlink_to("/opt/baked")
    assert [path.name for path in caches.members(tmp_path)] == ["kept.so"]
    assert caches.count(tmp_path) == {"files": 1, "bytes": 1}


def test_the_order_of_writing_does_not_matter(tmp_path: Path) -> None:
    tree = {"b/2": b"2", "a/1": b"1", "c": b"3"}
    for name, names in (("one", list(tree)), ("other", sorted(tree))):
        write(tmp_path / name, {key: tree[key] for key in names})
        for path in (tmp_path / name).rglob("*"):
            os.utime(path, (0, 0))
    assert packed(tmp_path / "one") == packed(tmp_path / "other")


@pytest.mark.parametrize("name", ["../outside", "/etc/outside"])
def test_a_member_that_would_leave_the_cache_is_refused_and_nothing_comes(tmp_path: Path, name: str) -> None:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for member in ("fine", name):
            archive.addfile(tarfile.TarInfo(member), io.BytesIO())
    cache = tmp_path / "cache"
    with pytest.raises(tarfile.TarError):
        caches.unpack(cache, io.BytesIO(target.getvalue()))
    assert list(cache.iterdir()) == []
    assert not (tmp_path / "outside").exists()


def test_a_link_is_refused(tmp_path: Path) -> None:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(tarfile.TarError):
        caches.unpack(tmp_path / "cache", io.BytesIO(target.getvalue()))


def test_a_cut_archive_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "one", {"a": os.urandom(30_000), "b": os.urandom(30_000)})
    with pytest.raises(tarfile.TarError):
        caches.unpack(tmp_path / "other", io.BytesIO(packed(tmp_path / "one")[:40_000]))
    assert list((tmp_path / "other").iterdir()) == []


def test_an_unknown_verb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["caches", "eat"])
    with pytest.raises(SystemExit, match="usage"):
        caches.main()
