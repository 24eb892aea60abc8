"""What decides the image, as files of a build context and as one hash over them.

The build sees these files and no others, so nothing can change the image without changing the hash; and nothing else
is hashed, so tests, documents and the controller's own dependencies leave the image alone.
"""

import hashlib
import json
import re
import tomllib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import tomli_w

from deploy.errors import DeployError
from deploy.lock.debian import LockedPackage, read_rootfs_lock

IMAGE_NAME = "deepseek-v4-flash-sm120"
# The time of every file in the image, and of the image: 2026-01-01T00:00:00Z. A constant, since a new time would make
# every layer a new one.
SOURCE_DATE_EPOCH = 1767225600
ENGINE_GROUP = "engine"

# Where each input lies: in the repository -> in the build context. Folders are taken whole.
SOURCES = {
    "Dockerfile": "Dockerfile",
    "deploy/image/apply_patches.py": "patches/apply_patches.py",
    "deploy/image/bake_modules.py": "modules/bake_modules.py",
    "deploy/image/install_wheels.sh": "tools/install_wheels.sh",
    "deploy/image/rootfs.sh": "rootfs/rootfs.sh",
    "deploy/image/wheel_conflicts.py": "tools/wheel_conflicts.py",
    "engine/cpu_standins": "packages/engine/cpu_standins",
    "engine/engine_runtime": "packages/engine/engine_runtime",
    "engine/pyproject.toml": "packages/engine/pyproject.toml",
    "kernels/pyproject.toml": "packages/kernels/pyproject.toml",
    "kernels/sm120_kernels": "packages/kernels/sm120_kernels",
    "patches": "patches",
}
ENVIRONMENT_FILES = ("Dockerfile", "rootfs/", "tools/", "torch-environment/", "engine-environment/", "modules/")


@dataclass(frozen=True)
class ImageInputs:
    """Everything that decides the image.

    Attributes:
        files: contents by path in the build context.
        packages: the root file system's packages.
        uv_version: of the program that installs the wheels; it leaves its name and version in the image.
    """

    files: Mapping[str, bytes]
    packages: tuple[LockedPackage, ...]
    uv_version: str

    @property
    def hash(self) -> str:
        """Hash of all inputs, 64 hexadecimal digits."""
        return self._hash(self.files)

    @property
    def environment_hash(self) -> str:
        """Hash of what the large layers are made from: an image with the same one shares them."""
        return self._hash({path: content for path, content in self.files.items() if path.startswith(ENVIRONMENT_FILES)})

    def _hash(self, files: Mapping[str, bytes]) -> str:
        facts = {
            "files": {path: hashlib.sha256(content).hexdigest() for path, content in files.items()},
            "packages": [[p.name, p.version, p.architecture, p.sha256, p.essential] for p in self.packages],
            "source_date_epoch": SOURCE_DATE_EPOCH,
            "uv": self.uv_version,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @property
    def tag(self) -> str:
        """The image's name: `deepseek-v4-flash-sm120:<first 16 digits of the hash>`."""
        return f"{IMAGE_NAME}:{self.hash[:16]}"


def image_tag(repository: Path) -> str:
    """Name the image that this repository's files decide.

    Args:
        repository: root of the checkout.

    Returns:
        `deepseek-v4-flash-sm120:<first 16 hexadecimal digits of the input hash>`.

    Raises:
        DeployError: an input is missing or does not parse.
    """
    return read_inputs(repository).tag


def read_inputs(repository: Path, packages: tuple[LockedPackage, ...] | None = None) -> ImageInputs:
    """Read everything that decides the image.

    Args:
        repository: root of the checkout.
        packages: the root file system's packages; those of its deploy.lock if None.

    Raises:
        DeployError: an input is missing or does not parse.
    """
    try:
        files = {
            f"{target}{path.removeprefix(source)}": (repository / path).read_bytes()
            for source, target in SOURCES.items()
            for path in _files(repository, source)
        }
        project = (repository / "pyproject.toml").read_text(encoding="utf-8")
        lock = (repository / "uv.lock").read_text(encoding="utf-8")
        uv = (repository / "requirements-uv.txt").read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DeployError(
            "an input of the image is missing", f"no file {error.filename}", "restore it: `git status` names it"
        ) from error
    for name, roots in (("torch-environment", frozenset({"torch"})), ("engine-environment", None)):
        reduced_project, reduced_lock = reduce_environment(project, lock, roots)
        files[f"{name}/pyproject.toml"] = reduced_project.encode()
        files[f"{name}/uv.lock"] = reduced_lock.encode()
    if packages is None:
        packages = read_rootfs_lock(repository).package
    return ImageInputs(files, packages, parse_uv_version(uv))


def _files(repository: Path, source: str) -> list[str]:
    root = repository / source
    if root.is_file():
        return [source]
    if not root.is_dir():
        raise FileNotFoundError(2, "missing", str(root))
    inside = [path for path in root.rglob("*") if path.is_file()]
    return sorted(str(path.relative_to(repository)) for path in inside if not _is_litter(path.relative_to(root)))


def _is_litter(path: Path) -> bool:
    """Bytecode and hidden files, which tools and editors leave beside the sources."""
    return "__pycache__" in path.parts or any(part.startswith(".") for part in path.parts)


def parse_uv_version(text: str) -> str:
    """Read uv's version from requirements-uv.txt.

    Raises:
        DeployError: it does not pin uv.
    """
    match = re.search(r"^uv==(\S+)", text, flags=re.MULTILINE)
    if match is None:
        raise DeployError("requirements-uv.txt does not pin uv", "no line `uv==VERSION`", "restore it from git")
    return match[1]


def reduce_environment(project: str, lock: str, roots: frozenset[str] | None = None) -> tuple[str, str]:
    """Reduce the repository's Python project to what the image installs, or to a part of it.

    Without this, each change to the controller's or the tests' dependencies would give a new image.

    Args:
        project: text of pyproject.toml.
        lock: text of uv.lock.
        roots: packages to install with all that they need; what the dependency group `engine` names if None.

    Returns:
        A pyproject.toml and a uv.lock with one dependency group, `engine`, and the packages that it reaches.

    Raises:
        DeployError: either does not parse, or has no such group or package.
    """
    try:
        requested = set(tomllib.loads(project)["dependency-groups"][ENGINE_GROUP])
        document = tomllib.loads(lock)
        packages = cast("list[dict[str, Any]]", document["package"])
        root = next(package for package in packages if package["source"].get("editable") == ".")
        direct = root["dev-dependencies"][ENGINE_GROUP]
    except (tomllib.TOMLDecodeError, KeyError, StopIteration) as error:
        raise _inconsistent(f"{type(error).__name__}: {error}") from error
    if roots is not None:
        requested, direct = roots, [{"name": name} for name in sorted(roots)]
    reached = _reached(packages, direct)
    if missing := reached.keys() - {package["name"] for package in packages}:
        raise _inconsistent(f"uv.lock has no package {', '.join(sorted(missing))}")
    reduced_root = {
        "name": "engine-environment",
        "version": "0",
        "source": {"virtual": "."},
        "dev-dependencies": {ENGINE_GROUP: direct},
    }
    reduced_lock = {
        "version": document["version"],
        "revision": document["revision"],
        "requires-python": document["requires-python"],
        "resolution-markers": document.get("resolution-markers", []),
        "supported-markers": document.get("supported-markers", []),
        "package": [
            reduced_root,
            *(_with_extras(package, reached[package["name"]]) for package in packages if package["name"] in reached),
        ],
    }
    reduced_project = {
        "project": {"name": "engine-environment", "version": "0", "requires-python": document["requires-python"]},
        "dependency-groups": {ENGINE_GROUP: sorted(requested)},
    }
    return tomli_w.dumps(reduced_project), tomli_w.dumps(reduced_lock)


def _inconsistent(why: str) -> DeployError:
    return DeployError(
        "pyproject.toml and uv.lock do not describe the engine's environment",
        why,
        "restore both from git, or lock anew: `.tools/bin/uv lock`",
    )


def _reached(packages: list[dict[str, Any]], start: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Names of the packages that some dependency leads to, each with the extras that it is wanted with."""
    versions: dict[str, list[dict[str, Any]]] = {}
    for package in packages:
        versions.setdefault(package["name"], []).append(package)
    reached: dict[str, set[str]] = {}
    waiting = deque(start)
    while waiting:
        dependency = waiting.popleft()
        name, extras = dependency["name"], set(dependency.get("extra", ()))
        new = extras - reached.get(name, set())
        for package in versions.get(name, ()):
            if name not in reached:
                waiting.extend(package.get("dependencies", ()))
            for extra in sorted(new):
                waiting.extend(package.get("optional-dependencies", {}).get(extra, ()))
        reached.setdefault(name, set()).update(extras)
    return reached


def _with_extras(package: dict[str, Any], extras: set[str]) -> dict[str, Any]:
    """A package of uv.lock without the extras that nobody here wants: they come and go with who else asks for them."""
    optional = {name: value for name, value in package.get("optional-dependencies", {}).items() if name in extras}
    reduced = {key: optional if key == "optional-dependencies" else value for key, value in package.items()}
    return {key: value for key, value in reduced.items() if value != {}}
