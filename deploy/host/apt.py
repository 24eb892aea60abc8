"""How to get a Docker engine from this machine's own package archive: pure decisions on captured text."""

import re
import shlex
from dataclasses import dataclass

from deploy.host.errors import HostError

MANUAL = "install Docker Engine 25 or newer by hand (https://docs.docker.com/engine/install), then run this again"
INDEX_FORMAT = "$(CODENAME) $(COMPONENT) $(REPO_URI)"
_KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


@dataclass(frozen=True)
class Installation:
    """What to install.

    Attributes:
        packages: for `apt-get install`, with `/release` where the archive's own release is too old.
        files: apt configuration to write first, by path; empty if the archive's own release will do.
    """

    packages: tuple[str, ...]
    files: dict[str, str]


def os_release(text: str) -> dict[str, str]:
    """Read the text of /etc/os-release."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Z_]+", name):
            try:
                found[name] = "".join(shlex.split(value))
            except ValueError:
                found[name] = value
    return found


def installation(release: dict[str, str], index_targets: str) -> Installation:
    """Choose the packages for this system.

    Args:
        release: what /etc/os-release says.
        index_targets: output of `apt-get indextargets --format INDEX_FORMAT`, which names the machine's own mirror.

    Raises:
        HostError: this system's archive has no engine that is new enough.
    """
    name, version = release.get("ID", ""), release.get("VERSION_ID", "")
    match name:
        case "debian" if version == "12":
            return _from_next_debian(index_targets)
        case "debian" if version.isdigit() and int(version) >= 13:
            return Installation(("docker.io", "docker-cli", "docker-compose", "docker-buildx"), {})
        case "ubuntu" if version >= "24.04":
            return Installation(("docker.io", "docker-compose-v2", "docker-buildx"), {})
        case _:
            raise HostError(
                f"cannot install Docker on {release.get('PRETTY_NAME', 'this system')}",
                "this is known only for Debian 12 and later and Ubuntu 24.04 and later",
                MANUAL,
            )


def _from_next_debian(index_targets: str) -> Installation:
    """Debian 12's engine is 20.10, without CDI. Debian 13's runs on it, if nothing else comes from there."""
    names = ("docker.io", "docker-cli", "containerd", "docker-compose", "docker-buildx")
    packages = tuple(f"{name}/trixie" for name in names)
    targets = [line.split() for line in index_targets.splitlines()]
    main = {codename: uri for codename, component, uri in (t for t in targets if len(t) == 3) if component == "main"}
    if "trixie" in main:
        return Installation(packages, {})
    if "bookworm" not in main:
        raise HostError("apt knows no Debian archive", "its sources name no bookworm main", MANUAL)
    source = f"Types: deb\nURIs: {main['bookworm']}\nSuites: trixie\nComponents: main\nSigned-By: {_KEYRING}\n"
    pin = "Package: *\nPin: release n=trixie\nPin-Priority: 100\n"
    return Installation(
        packages,
        {
            "/etc/apt/sources.list.d/docker-from-trixie.sources": source,
            "/etc/apt/preferences.d/docker-from-trixie": pin,
        },
    )
