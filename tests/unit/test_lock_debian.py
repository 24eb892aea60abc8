import shutil
from pathlib import Path

import pytest

from deploy.errors import DeployError
from deploy.lock.debian import (
    Mirrors,
    RootfsLock,
    RootfsRequest,
    disagreements,
    find_mirrors,
    parse_apt_targets,
    parse_chosen,
    parse_request,
    read_request,
    read_rootfs_lock,
    resolve,
)
from tests.unit.web import serve

ARCHIVE = Path(__file__).parent / "data/archive"
REPOSITORY = Path(__file__).parents[2]

needs_apt = pytest.mark.skipif(not shutil.which("apt-get"), reason="choosing packages needs apt on the host")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A copy of a small signed archive, to be spoilt."""
    return shutil.copytree(ARCHIVE, tmp_path / "archive")


def request_tool() -> RootfsRequest:
    return RootfsRequest(suite="tiny", packages=("tool",))


def choose(archive: Path, request: RootfsRequest | None = None):
    with serve(archive) as server:
        mirrors = Mirrors(debian=f"{server.address}/debian", debian_security=f"{server.address}/debian-security")
        return resolve(request or request_tool(), mirrors, archive / "keyring.gpg")


@needs_apt
def test_the_lock_holds_what_was_asked_for_what_it_needs_and_the_essential_set(archive: Path) -> None:
    lock = choose(archive)
    found = [(package.name, package.version, package.archive, package.essential) for package in lock.package]
    assert found == [
        ("base", "1.0", "debian", True),
        ("library", "1:1.0-1+deb1", "debian-security", True),
        ("tool", "2.0+b1", "debian", False),
        ("usr-is-merged", "1.0", "debian", True),
    ]
    assert lock.package[1].path == "pool/updates/main/library_1.0-1+deb1_amd64.deb"
    assert [release.suite for release in lock.release] == ["tiny", "tiny-security", "tiny-updates"]


@needs_apt
def test_an_altered_index_is_refused(archive: Path) -> None:
    index = archive / "debian/dists/tiny/main/binary-amd64/Packages"
    index.write_text(index.read_text(encoding="utf-8").replace("2.0+b1", "6.6+b1"), encoding="utf-8")
    with pytest.raises(DeployError, match="apt could not choose"):
        choose(archive)


@needs_apt
def test_an_altered_release_file_is_refused_for_its_signature(archive: Path) -> None:
    release = archive / "debian-security/dists/tiny-security/InRelease"
    release.write_text(release.read_text(encoding="utf-8").replace("Origin: Test", "Origin: Fake"), encoding="utf-8")
    with pytest.raises(DeployError) as raised:
        choose(archive)
    assert "not signed" in raised.value.why or "signature" in raised.value.why.lower()


@needs_apt
def test_a_package_that_the_suite_lacks_is_named(archive: Path) -> None:
    with pytest.raises(DeployError) as raised:
        choose(archive, RootfsRequest(suite="tiny", packages=("tool", "no-such-package")))
    assert "no-such-package" in raised.value.why


@needs_apt
def test_a_missing_keyring_names_the_package_that_has_it(tmp_path: Path) -> None:
    with pytest.raises(DeployError) as raised:
        resolve(request_tool(), Mirrors(debian="http://x", debian_security="http://y"), tmp_path / "none.gpg")
    assert "debian-archive-keyring" in raised.value.fix


def test_the_repository_has_a_lock_for_what_it_asks_for() -> None:
    request, lock = read_request(REPOSITORY), read_rootfs_lock(REPOSITORY)
    assert disagreements(request, lock) == []
    names = [package.name for package in lock.package]
    assert set(request.packages) <= set(names)
    assert names == sorted(set(names))
    assert {package.name for package in lock.package if package.essential} >= {"base-files", "dpkg", "libc6", "tar"}


def test_each_disagreement_of_lock_and_request_is_a_line() -> None:
    lock = RootfsLock(suite="bookworm", requested=("a", "b"), release=(), package=())
    assert disagreements(RootfsRequest(suite="bookworm", packages=("b", "a")), lock) == []
    found = disagreements(RootfsRequest(suite="trixie", packages=("b", "c")), lock)
    assert found == [
        "the suite is trixie in deploy/image/rootfs.toml, bookworm in deploy.lock",
        "c is asked for, not locked",
        "a is locked, not asked for",
    ]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('suite = "bookworm"\npackages = []\n', "packages"),
        ('suite = "bookworm"\npackages = ["tini"]\nmirror = "x"\n', "mirror"),
        ("suite = bookworm\n", "line 1"),
    ],
)
def test_a_wrong_request_is_refused_by_key_or_line(text: str, complaint: str) -> None:
    with pytest.raises(DeployError) as raised:
        parse_request(text)
    assert complaint in raised.value.why


def test_a_damaged_lock_is_refused_with_the_field(tmp_path: Path) -> None:
    text = (REPOSITORY / "deploy.lock").read_text(encoding="utf-8")
    (tmp_path / "deploy.lock").write_text(text.replace('sha256 = "', 'sha256 = "x'), encoding="utf-8")
    with pytest.raises(DeployError, match="damaged") as raised:
        read_rootfs_lock(tmp_path)
    assert "sha256" in raised.value.why


def test_the_mirror_is_the_one_that_apt_uses_for_the_suite() -> None:
    targets = """
http://other.example/packages nodistro
cdrom://disc/ bookworm
http://deb.example/debian/ trixie
http://fast.example/mirror/debian/ bookworm
http://fast.example/mirror/debian/ bookworm-updates
http://deb.example/debian-security/ bookworm-security
"""
    assert parse_apt_targets(targets, "bookworm") == {
        "debian": "http://fast.example/mirror/debian",
        "debian-security": "http://deb.example/debian-security",
    }


def test_a_host_on_another_debian_release_still_has_a_mirror() -> None:
    targets = "http://deb.example/debian/ trixie\nhttp://deb.example/debian-security/ trixie-security\n"
    assert parse_apt_targets(targets, "bookworm") == {
        "debian": "http://deb.example/debian",
        "debian-security": "http://deb.example/debian-security",
    }


def test_a_host_without_debian_archives_is_told_how_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def ubuntu() -> str:
        return "http://archive.example/ubuntu/ noble\n"

    monkeypatch.setattr("deploy.lock.debian._apt_targets", ubuntu)
    # Only the command line reads the environment.
    monkeypatch.setenv("DEBIAN_MIRROR", "http://deb.example/debian")
    with pytest.raises(DeployError) as raised:
        find_mirrors("bookworm")
    assert "--mirror" in raised.value.fix


def test_a_named_mirror_implies_the_security_archive_beside_it() -> None:
    mirrors = find_mirrors("bookworm", "http://a.example/debian/")
    assert mirrors == Mirrors(debian="http://a.example/debian", debian_security="http://a.example/debian-security")


def test_a_security_archive_elsewhere_is_taken_as_named() -> None:
    mirrors = find_mirrors("bookworm", "http://a.example/debian", "http://b.example/security/")
    assert mirrors.debian_security == "http://b.example/security"


def test_apts_choice_is_read_with_epochs_and_build_numbers() -> None:
    text = """Reading package lists...
'http://m/debian/pool/main/g/gcc-defaults/g%2b%2b_12.2.0-3_amd64.deb' g++_4%3a12.2.0-3_amd64.deb 1356 MD5Sum:ab
'http://m/debian/pool/main/t/tini/tini_0.19.0-1%2bb3_amd64.deb' tini_0.19.0-1+b3_amd64.deb 267204 SHA256:cd
"""
    assert [(name, version) for name, version, _ in parse_chosen(text)] == [
        ("g++", "4:12.2.0-3"),
        ("tini", "0.19.0-1+b3"),
    ]
