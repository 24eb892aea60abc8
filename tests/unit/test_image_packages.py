import hashlib
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import DeployError
from deploy.image.packages import fetch_packages, merged_name, write_bootstrap
from deploy.lock.debian import LockedPackage, Mirrors
from tests.unit.web import Server, serve


def no_mirror() -> Mirrors:
    raise AssertionError("a full cache needs no mirror")


def mirrors(server: Server) -> Mirrors:
    return Mirrors(debian=f"{server.address}/debian", debian_security=f"{server.address}/security")


def publish(web: Path, name: str, content: bytes, archive: Any = "debian") -> LockedPackage:
    """Put a package on the mirror and lock it."""
    path = f"pool/main/{name}_1+b1.deb"
    file = web / ("debian" if archive == "debian" else "security") / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return LockedPackage(
        name=name, version="1+b1", architecture="amd64", archive=archive, path=path, size=len(content), sha256=digest
    )


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_packages_come_from_their_archive_into_a_cache_by_hash(tmp_path: Path) -> None:
    web, cache = tmp_path / "web", tmp_path / "cache"
    packages = [publish(web, "a", b"first"), publish(web, "b", b"second", "debian-security")]
    seen: list[tuple[int, int]] = []
    with serve(web) as server:
        files = fetch_packages(packages, lambda: mirrors(server), cache, lambda done, total: seen.append((done, total)))
    assert [files[package].read_bytes() for package in packages] == [b"first", b"second"]
    assert files_in(cache) == {f"{package.sha256}.deb" for package in packages}
    assert seen[0] == (0, 11)
    assert seen[-1] == (11, 11)


def test_a_full_cache_needs_no_mirror(tmp_path: Path) -> None:
    package = publish(tmp_path / "web", "a", b"first")
    with serve(tmp_path / "web") as server:
        fetch_packages([package], lambda: mirrors(server), tmp_path / "cache")
    assert fetch_packages([package], no_mirror, tmp_path / "cache")[package].read_bytes() == b"first"


def test_a_spoilt_cache_is_fetched_again(tmp_path: Path) -> None:
    package = publish(tmp_path / "web", "a", b"first")
    cached = tmp_path / "cache" / f"{package.sha256}.deb"
    cached.parent.mkdir()
    cached.write_bytes(b"fir")
    with serve(tmp_path / "web") as server:
        fetch_packages([package], lambda: mirrors(server), tmp_path / "cache")
    assert cached.read_bytes() == b"first"


def test_a_vanished_package_is_refused_by_name_and_the_rest_stays_cached(tmp_path: Path) -> None:
    web, cache = tmp_path / "web", tmp_path / "cache"
    kept, gone = publish(web, "kept", b"here"), publish(web, "gone", b"gone")
    (web / "debian" / gone.path).unlink()
    with serve(web) as server, pytest.raises(DeployError, match=r"gone 1\+b1 \(amd64\) is not there") as raised:
        fetch_packages([kept], lambda: mirrors(server), cache)
        fetch_packages([kept, gone], lambda: mirrors(server), cache)
    assert "404" in raised.value.why
    assert "deploy lock" in raised.value.fix
    assert files_in(cache) == {f"{kept.sha256}.deb"}


def test_a_tampered_package_is_refused_by_name_with_both_hashes(tmp_path: Path) -> None:
    web, cache = tmp_path / "web", tmp_path / "cache"
    package = publish(web, "a", b"good")
    (web / "debian" / package.path).write_bytes(b"evil")
    with serve(web) as server, pytest.raises(DeployError, match="a 1") as raised:
        fetch_packages([package], lambda: mirrors(server), cache)
    assert hashlib.sha256(b"evil").hexdigest() in raised.value.why
    assert package.sha256 in raised.value.why
    assert files_in(cache) == set()


def test_a_mirror_that_does_not_answer_is_named(tmp_path: Path) -> None:
    package = publish(tmp_path / "web", "a", b"first")
    with serve(tmp_path / "web") as server:
        dead = mirrors(server)
    with pytest.raises(DeployError, match="could not be fetched") as raised:
        fetch_packages([package], lambda: dead, tmp_path / "cache")
    assert dead.debian in raised.value.why


def make_deb(path: Path, members: list[tarfile.TarInfo], contents: dict[str, bytes]) -> Path:
    """A .deb is an `ar` archive; the unpacker reads only its data."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        for member in members:
            content = contents.get(member.name)
            if content is not None:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content) if content is not None else None)
    parts = {"debian-binary": b"2.0\n", "data.tar.xz": data.getvalue()}
    blob = b"!<arch>\n"
    for name, content in parts.items():
        blob += f"{name:<16}{0:<12}{0:<6}{0:<6}{0o100644:<8o}{len(content):<10}`\n".encode() + content
        blob += b"\n" * (len(content) % 2)
    path.write_bytes(blob)
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    info.mode = 0o755
    return info


def test_unpacked_packages_are_one_merged_tree(tmp_path: Path) -> None:
    directories = [member("./", tarfile.DIRTYPE), member("./bin/", tarfile.DIRTYPE), member("./usr/", tarfile.DIRTYPE)]
    one = make_deb(
        tmp_path / "one.deb",
        [*directories, member("./bin/dash"), member("./bin/sh", tarfile.SYMTYPE, "dash")],
        {"./bin/dash": b"shell"},
    )
    two = make_deb(
        tmp_path / "two.deb",
        [*directories, member("./bin/tool"), member("./bin/alias", tarfile.LNKTYPE, "./bin/tool")],
        {"./bin/tool": b"tool"},
    )
    target = tmp_path / "bootstrap.tar"
    write_bootstrap([one, two], target)
    with tarfile.open(target) as tar:
        names = [info.name for info in tar]
        assert len(names) == len(set(names))
        assert tar.getmember("bin").linkname == "usr/bin"
        assert tar.getmember("usr/bin/sh").linkname == "dash"
        assert tar.getmember("usr/bin/alias").linkname == "usr/bin/tool"
        shell = tar.extractfile("usr/bin/dash")
        assert shell is not None
        assert shell.read() == b"shell"


@pytest.mark.parametrize(
    ("packed", "merged"),
    [
        ("./bin/sh", "usr/bin/sh"),
        ("./lib64/ld.so", "usr/lib64/ld.so"),
        ("./usr/bin/env", "usr/bin/env"),
        ("./library/x", "library/x"),
        ("./bin/", "bin"),
        ("./", ""),
        ("./.hidden", ".hidden"),
    ],
)
def test_old_names_move_below_usr(packed: str, merged: str) -> None:
    assert merged_name(packed) == merged
