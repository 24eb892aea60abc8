"""The root file system's part of deploy.lock: which Debian packages, by hash, and how they are chosen.

apt itself chooses, in a directory of its own: the host contributes the program, the way to reach the network
(its `Acquire::` settings) and nothing else. apt also verifies the signatures of the release files.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deploy.errors import DeployError
from deploy.lock.document import read_part
from deploy.validation import first_mistake

if TYPE_CHECKING:  # only choosing packages needs it, reading what was chosen does not
    from debian.deb822 import Deb822

PART = "rootfs"
REQUEST_FILE = Path("deploy/image/rootfs.toml")
DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
# What dpkg needs around it. apt counts itself as essential, but nothing in the image installs packages; usr-is-merged
# stands in for usrmerge (and all of Perl), which converts systems that do not start out merged.
BASE = ("?and(?essential, ?not(?exact-name(apt)))", "usr-is-merged")

Archive = Literal["debian", "debian-security"]


class RootfsRequest(BaseModel):
    """What deploy/image/rootfs.toml asks for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    suite: str = Field(pattern=r"^[a-z]+$")
    packages: tuple[str, ...] = Field(min_length=1)


class LockedPackage(BaseModel):
    """One .deb, by hash.

    Attributes:
        archive: which of the two mirrors' trees has it.
        path: below the mirror's address.
        essential: in the set that must be in place before dpkg can install anything.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    version: str
    architecture: str
    archive: Archive
    path: str = Field(pattern=r"^pool/[^\s]+\.deb$")
    size: int = Field(gt=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    essential: bool = False

    @property
    def identity(self) -> str:
        """Name, version and architecture as a person would write them."""
        return f"{self.name} {self.version} ({self.architecture})"


class LockedRelease(BaseModel):
    """A signed release file that the packages were chosen from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    suite: str
    date: datetime
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class RootfsLock(BaseModel):
    """The part `rootfs` of deploy.lock."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    suite: str
    requested: tuple[str, ...]
    release: tuple[LockedRelease, ...]
    package: tuple[LockedPackage, ...]


class Mirrors(BaseModel):
    """Where the two archives are reached, without a trailing slash."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    debian: str
    debian_security: str

    def address(self, package: LockedPackage) -> str:
        """The address of a locked package."""
        base = self.debian if package.archive == "debian" else self.debian_security
        return f"{base}/{package.path}"


def parse_request(text: str) -> RootfsRequest:
    """Read the text of rootfs.toml.

    Raises:
        DeployError: it is not TOML, or has wrong or unknown keys.
    """
    try:
        return RootfsRequest.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, ValidationError) as error:
        why = first_mistake(error) if isinstance(error, ValidationError) else str(error)
        raise DeployError(f"{REQUEST_FILE} is not valid", why, f"correct {REQUEST_FILE}") from error


def read_request(repository: Path) -> RootfsRequest:
    """Read what the repository's image is asked to contain.

    Raises:
        DeployError: rootfs.toml is missing or not valid.
    """
    path = repository / REQUEST_FILE
    try:
        return parse_request(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DeployError(f"{REQUEST_FILE} is missing", f"no file {path}", f"git checkout {REQUEST_FILE}") from error


def read_rootfs_lock(repository: Path) -> RootfsLock:
    """Read the part `rootfs` of the repository's deploy.lock.

    Raises:
        DeployError: it is missing or not valid.
    """
    try:
        return RootfsLock.model_validate(read_part(repository, PART))
    except ValidationError as error:
        raise DeployError(
            "deploy.lock has a damaged part 'rootfs'",
            first_mistake(error),
            "restore it with `git checkout deploy.lock`, or make it again with `deploy lock`",
        ) from error


def disagreements(request: RootfsRequest, lock: RootfsLock) -> list[str]:
    """What the lock says otherwise than the request that it was made from, one line each."""
    found: list[str] = []
    if lock.suite != request.suite:
        found.append(f"the suite is {request.suite} in {REQUEST_FILE}, {lock.suite} in deploy.lock")
    found += [f"{name} is asked for, not locked" for name in request.packages if name not in lock.requested]
    found += [f"{name} is locked, not asked for" for name in lock.requested if name not in request.packages]
    return found


def find_mirrors(suite: str, mirror: str | None = None, security_mirror: str | None = None) -> Mirrors:
    """Settle where packages come from: what was asked for, else this machine's apt configuration.

    Raises:
        DeployError: nothing was asked for and this machine's apt knows no Debian mirror.
    """
    if mirror is None:
        targets = _apt_targets() if shutil.which("apt-get") else ""
        found = parse_apt_targets(targets, suite)
        mirror = found.get("debian")
        security_mirror = security_mirror or found.get("debian-security")
    if mirror is None:
        raise DeployError(
            "no Debian mirror is known",
            "none was given and this machine's apt configuration has no Debian archive",
            "name one: --mirror http://HOST/debian, or DEBIAN_MIRROR=http://HOST/debian in the environment "
            "(and --security-mirror, if it is not at http://HOST/debian-security)",
        )
    mirror = mirror.rstrip("/")
    return Mirrors(debian=mirror, debian_security=(security_mirror or f"{mirror}-security").rstrip("/"))


def parse_apt_targets(text: str, suite: str) -> dict[Archive, str]:
    """Pick the Debian archives out of what apt is configured for.

    Args:
        text: lines `<address> <suite>`, as `_apt_targets` asks apt for.
        suite: the wanted suite. An address that serves it comes first; else any that is named like a Debian archive,
            since a mirror carries all suites.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    targets = [(address.rstrip("/"), name) for address, name in lines if address.startswith(("http://", "https://"))]
    found: dict[Archive, str] = {}
    wanted: tuple[tuple[Archive, str], ...] = (("debian", suite), ("debian-security", f"{suite}-security"))
    for archive, exact in wanted:
        candidates = [address for address, name in targets if name == exact]
        candidates += [address for address, _ in targets if address.endswith(f"/{archive}")]
        if candidates:
            found[archive] = candidates[0]
    return found


def resolve(request: RootfsRequest, mirrors: Mirrors, keyring: Path = DEBIAN_KEYRING) -> RootfsLock:
    """Let apt choose the packages for a request.

    Raises:
        DeployError: no apt, no keyring, a bad signature, or a package that the suite does not have.
    """
    if not shutil.which("apt-get"):
        raise DeployError(
            "packages cannot be chosen on this machine",
            "there is no apt-get; building from an existing lock needs none, making a lock does",
            "run `deploy lock` on a Debian or Ubuntu machine",
        )
    if not keyring.is_file():
        raise DeployError(
            "the release files' signatures cannot be verified",
            f"there is no keyring {keyring}",
            "apt-get install debian-archive-keyring",
        )
    suites = {
        mirrors.debian: (request.suite, f"{request.suite}-updates"),
        mirrors.debian_security: (f"{request.suite}-security",),
    }
    with tempfile.TemporaryDirectory(prefix="deploy-lock-") as directory:
        apt = _Apt(Path(directory), suites, keyring)
        apt.run("apt-get", "update", "--error-on=any")
        releases = apt.releases()
        chosen = apt.choose((*BASE, *request.packages))
        essential = {(name, version) for name, version, _ in apt.choose(BASE)}
        stanzas = apt.stanzas(chosen)
    packages = [
        LockedPackage(
            name=name,
            version=version,
            architecture=stanzas[name, version]["Architecture"],
            archive="debian-security" if address.startswith(f"{mirrors.debian_security}/") else "debian",
            path=stanzas[name, version]["Filename"],
            size=int(stanzas[name, version]["Size"]),
            sha256=stanzas[name, version]["SHA256"],
            essential=(name, version) in essential,
        )
        for name, version, address in chosen
    ]
    return RootfsLock(
        suite=request.suite,
        requested=request.packages,
        release=tuple(sorted(releases, key=lambda release: release.suite)),
        package=tuple(sorted(packages, key=lambda package: package.name)),
    )


def parse_chosen(text: str) -> list[tuple[str, str, str]]:
    """Read name, version and address of each package from `apt-get install --print-uris`."""
    found = re.findall(r"^'([^']+)' ([^\s_]+)_([^\s_]+)_[^\s_]+\.deb ", text, flags=re.MULTILINE)
    # In file names apt writes the colon of an epoch as %3a.
    return [(name, version.replace("%3a", ":"), address) for address, name, version in found]


class _Apt:
    """apt in a directory of its own, as if nothing were installed."""

    def __init__(self, root: Path, suites: Mapping[str, Sequence[str]], keyring: Path) -> None:
        for directory in (
            "etc/apt/apt.conf.d",
            "etc/apt/preferences.d",
            "etc/apt/sources.list.d",
            "etc/apt/trusted.gpg.d",
            "var/cache/apt/archives/partial",
            "var/lib/apt/lists/partial",
            "var/lib/dpkg",
        ):
            (root / directory).mkdir(parents=True)
        (root / "var/lib/dpkg/status").touch()
        (root / "etc/apt/sources.list.d/debian.sources").write_text(
            "\n".join(
                f"Types: deb\nURIs: {address}\nSuites: {' '.join(names)}\nComponents: main\nSigned-By: {keyring}\n"
                for address, names in suites.items()
            ),
            encoding="utf-8",
        )
        configuration = root / "apt.conf"
        configuration.write_text(
            f'Dir "{root}";\n{_acquire_settings()}'
            'APT::Architecture "amd64";\nAPT::Architectures { "amd64"; };\n'
            'APT::Install-Recommends "false";\nAPT::Sandbox::User "root";\nAcquire::Languages "none";\n',
            encoding="utf-8",
        )
        self._lists = root / "var/lib/apt/lists"
        self._environment = {**os.environ, "APT_CONFIG": str(configuration), "LC_ALL": "C.UTF-8"}

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            errors = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith(("E:", "W:"))]
            raise DeployError(
                "apt could not choose the packages",
                "; ".join(errors) or f"`{' '.join(command[:2])}` failed with exit code {done.returncode}",
                f"check the mirror and the package names in {REQUEST_FILE}, then run `deploy lock` again",
            )
        return done.stdout

    def choose(self, wanted: Iterable[str]) -> list[tuple[str, str, str]]:
        return parse_chosen(self.run("apt-get", "install", "--yes", "--print-uris", *wanted))

    def stanzas(self, chosen: Iterable[tuple[str, str, str]]) -> "dict[tuple[str, str], Deb822]":
        from debian.deb822 import Deb822

        text = self.run("apt-cache", "show", *(f"{name}={version}" for name, version, _ in chosen))
        stanzas = Deb822.iter_paragraphs(text, use_apt_pkg=False)
        return {(stanza["Package"], stanza["Version"]): stanza for stanza in stanzas}

    def releases(self) -> list[LockedRelease]:
        from debian.deb822 import Deb822

        found: list[LockedRelease] = []
        for path in self._lists.glob("*_InRelease"):
            content = path.read_bytes()
            fields = Deb822(content)
            found.append(
                LockedRelease(
                    suite=fields["Codename"],
                    date=parsedate_to_datetime(fields["Date"]),
                    sha256=hashlib.sha256(content).hexdigest(),
                )
            )
        return found


def _apt_targets() -> str:
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)", "Created-By: Packages"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _acquire_settings() -> str:
    """How this machine reaches the network: proxy, certificates, whether dates can be trusted."""
    dump = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=False).stdout
    wanted = re.compile(r"^Acquire::(http|https|ftp|Retries|Check-Valid-Until|Check-Date|ForceIPv)\S* \".+\";$")
    return "".join(f"{line}\n" for line in dump.splitlines() if wanted.match(line))
