"""Which wheels of uv.lock the image installs. Pure functions on its text."""

import tomllib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from packaging.markers import Marker
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from deploy.errors import DeployError
from deploy.image.inputs import ENGINE_GROUP
from deploy.lock.model import LockedWheel

ARCHITECTURE = "x86_64"
# Names that manylinux had before they carried glibc's version (PEP 600).
LEGACY_PLATFORMS = {(2, 17): "manylinux2014", (2, 12): "manylinux2010", (2, 5): "manylinux1"}
OLDEST_GLIBC = 5
Package = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """What wheels are installed into.

    Attributes:
        python: full version, for example `3.11.2`.
        glibc: minor version of glibc 2.
    """

    python: str
    glibc: int

    @property
    def environment(self) -> dict[str, str]:
        """The variables of dependency markers (packaging.python.org, dependency specifiers)."""
        return {
            "implementation_name": "cpython",
            "implementation_version": self.python,
            "os_name": "posix",
            "platform_machine": ARCHITECTURE,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": self.python,
            "python_version": ".".join(self.python.split(".")[:2]),
            "sys_platform": "linux",
        }

    @property
    def tags(self) -> list[Tag]:
        """The tags of wheels that can be installed, the best first."""
        platforms: list[str] = []
        for minor in range(self.glibc, OLDEST_GLIBC - 1, -1):
            platforms.append(f"manylinux_2_{minor}_{ARCHITECTURE}")
            if legacy := LEGACY_PLATFORMS.get((2, minor)):
                platforms.append(f"{legacy}_{ARCHITECTURE}")
        platforms.append(f"linux_{ARCHITECTURE}")
        major, minor = map(int, self.python.split(".")[:2])
        interpreter = f"cp{major}{minor}"
        return [
            *cpython_tags((major, minor), platforms=platforms),
            *compatible_tags((major, minor), interpreter, platforms),
        ]


@dataclass(frozen=True)
class Wheel:
    """A wheel that is installed, and where it is fetched from."""

    name: str
    url: str
    sha256: str
    size: int

    @property
    def file(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    @property
    def locked(self) -> LockedWheel:
        return LockedWheel(file=self.file, sha256=self.sha256)


def installed_wheels(lock: str, target: Target) -> dict[str, Wheel]:
    """Find what `uv sync --only-group engine` installs: the group, and what it needs on this target.

    Args:
        lock: text of uv.lock.

    Returns:
        The chosen wheel of each package, by its name.

    Raises:
        DeployError: uv.lock has no such group or package, or no wheel that fits.
    """
    try:
        packages = cast("list[Package]", tomllib.loads(lock)["package"])
        root = next(package for package in packages if package["source"].get("editable") == ".")
        group = cast("list[Package]", root["dev-dependencies"][ENGINE_GROUP])
    except (tomllib.TOMLDecodeError, KeyError, StopIteration) as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error
    reached = _reached(packages, group, target.environment)
    order = {tag: place for place, tag in enumerate(target.tags)}
    return {name: _choose(package, order) for name, package in sorted(reached.items())}


def group_disagreements(project: str, lock: str) -> list[str]:
    """Say in which requirements of the engine pyproject.toml and uv.lock differ; empty if they agree."""
    try:
        wanted = {_compact(item) for item in tomllib.loads(project)["dependency-groups"][ENGINE_GROUP]}
        packages = cast("list[Package]", tomllib.loads(lock)["package"])
        root = next(package for package in packages if package["source"].get("editable") == ".")
        recorded = cast("list[Package]", root["metadata"]["requires-dev"][ENGINE_GROUP])
    except (tomllib.TOMLDecodeError, KeyError, StopIteration) as error:
        raise _damaged(f"{type(error).__name__}: {error}") from error
    locked = {_requirement(item) for item in recorded}
    return [f"{item} is in pyproject.toml only" for item in sorted(wanted - locked)] + [
        f"{item} is in uv.lock only" for item in sorted(locked - wanted)
    ]


def _requirement(recorded: Package) -> str:
    extras = f"[{','.join(recorded['extras'])}]" if recorded.get("extras") else ""
    return _compact(f"{recorded['name']}{extras}{recorded.get('specifier', '')}")


def _compact(requirement: str) -> str:
    return requirement.replace(" ", "").lower()


def _reached(packages: list[Package], group: list[Package], environment: Mapping[str, str]) -> dict[str, Package]:
    by_name: dict[str, list[Package]] = {}
    for package in packages:
        by_name.setdefault(package["name"], []).append(package)
    reached: dict[str, Package] = {}
    seen: set[tuple[str, str]] = set()
    waiting = deque(group)
    while waiting:
        dependency = waiting.popleft()
        if not _applies(dependency.get("marker", ""), environment):
            continue
        versions = by_name.get(dependency["name"], [])
        wanted = dependency.get("version")
        package = next((found for found in versions if wanted in (None, found["version"])), None)
        if package is None:
            raise _damaged(f"it has no package {dependency['name']} {wanted or ''}".rstrip())
        reached[package["name"]] = package
        for extra in ("", *dependency.get("extra", ())):
            if (package["name"], extra) not in seen:
                seen.add((package["name"], extra))
                optional = package.get("optional-dependencies", {})
                waiting.extend(optional.get(extra, ()) if extra else package.get("dependencies", ()))
    return reached


def _applies(marker: str, environment: Mapping[str, str]) -> bool:
    return not marker or _marker(marker).evaluate({**environment, "extra": ""})


@cache
def _marker(text: str) -> Marker:
    return Marker(text)


def _choose(package: Package, order: Mapping[Tag, int]) -> Wheel:
    best: tuple[int, Wheel] | None = None
    for item in package.get("wheels", ()):
        wheel = Wheel(
            canonicalize_name(package["name"]), item["url"], item["hash"].removeprefix("sha256:"), item["size"]
        )
        _, _, _, tags = parse_wheel_filename(wheel.file)
        rank = min((order[tag] for tag in tags if tag in order), default=None)
        if rank is not None and (best is None or rank < best[0]):
            best = rank, wheel
    if best is None:
        raise _damaged(f"{package['name']} {package['version']} has no wheel for the image's Python")
    return best[1]


def _damaged(why: str) -> DeployError:
    return DeployError(
        "uv.lock does not describe the engine's wheels",
        why,
        "restore it from git, or lock anew: `.tools/bin/uv lock`",
    )
