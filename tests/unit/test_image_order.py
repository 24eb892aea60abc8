"""The order of a layer's entries, from which Docker's two ways to write one can be told."""

import io
import tarfile

from hypothesis import given
from hypothesis import strategies as st

from deploy.image.order import disorder, disordered_layer

NAMES = st.text("ab-./", min_size=1, max_size=6).filter(lambda name: all(part for part in name.split("/")))


def archive(entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@given(st.sets(NAMES))
def test_a_walk_folder_by_folder_is_in_order(names: set[str]) -> None:
    assert disorder(sorted(names, key=lambda name: name.split("/"))) is None


def test_sorted_whole_paths_are_told_apart_where_they_differ() -> None:
    names = ["pkg", "pkg/a.py", "pkg-1.0", "pkg-1.0/RECORD"]
    assert disorder(names) is None
    assert disorder(sorted(names)) == "pkg/a.py"
    assert disorder(["a", "b", "b/c"]) is None


def test_the_layer_out_of_order_is_found_among_the_others() -> None:
    good, bad = archive({"pkg/a": b"", "pkg-1/b": b""}), archive({"pkg-1/b": b"", "pkg/a": b""})
    saved = {"blobs/1": b"{}", "blobs/2": good, "manifest.json": b"[]"}
    assert disordered_layer(io.BytesIO(archive(saved))) is None
    assert disordered_layer(io.BytesIO(archive({**saved, "blobs/3": bad}))) == "pkg/a"
