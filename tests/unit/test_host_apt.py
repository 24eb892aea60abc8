import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.host.apt import installation, os_release
from deploy.host.errors import HostError

BOOKWORM = """\
PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"
VERSION_ID="12"
ID=debian
"""
TARGETS = """\
bookworm main http://archive.test/debian/
bookworm-updates main http://archive.test/debian/
bookworm contrib http://other.test/debian/
"""


def test_debian_12_takes_the_engine_alone_from_the_next_release_on_the_machines_own_mirror() -> None:
    chosen = installation(os_release(BOOKWORM), TARGETS)
    assert chosen.packages == (
        "docker.io/trixie",
        "docker-cli/trixie",
        "containerd/trixie",
        "docker-compose/trixie",
        "docker-buildx/trixie",
    )
    source, pin = chosen.files.values()
    assert "URIs: http://archive.test/debian/\nSuites: trixie\n" in source
    assert pin == "Package: *\nPin: release n=trixie\nPin-Priority: 100\n"


def test_debian_12_with_the_next_release_configured_needs_no_file() -> None:
    assert installation(os_release(BOOKWORM), TARGETS + "trixie main http://archive.test/debian/\n").files == {}


@pytest.mark.parametrize(
    ("release", "first"),
    [
        ({"ID": "debian", "VERSION_ID": "13"}, "docker.io"),
        ({"ID": "ubuntu", "VERSION_ID": "24.04"}, "docker.io"),
        ({"ID": "ubuntu", "VERSION_ID": "26.04"}, "docker.io"),
    ],
)
def test_later_releases_have_an_engine_of_their_own(release: dict[str, str], first: str) -> None:
    chosen = installation(release, "")
    assert chosen.packages[0] == first
    assert chosen.files == {}


@pytest.mark.parametrize(
    "release",
    [
        {},
        {"ID": "debian", "VERSION_ID": "11"},
        {"ID": "debian"},
        {"ID": "ubuntu", "VERSION_ID": "22.04"},
        {"ID": "fedora"},
    ],
)
def test_any_other_system_is_refused_with_the_way_by_hand(release: dict[str, str]) -> None:
    with pytest.raises(HostError, match="cannot install Docker") as caught:
        installation(release, TARGETS)
    assert "docs.docker.com" in caught.value.fix


def test_a_machine_without_any_archive_is_refused() -> None:
    with pytest.raises(HostError, match="apt knows no Debian archive"):
        installation(os_release(BOOKWORM), "")


@given(st.text(), st.text())
def test_no_text_gives_anything_but_a_choice_or_a_refusal(release: str, targets: str) -> None:
    try:
        installation(os_release(release) | {"ID": "debian", "VERSION_ID": "12"}, targets)
    except HostError as error:
        assert error.fix
