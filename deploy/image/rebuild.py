"""Builds the image once more from nothing and holds the result against the lock, layer by layer and file by file."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import cast

from python_on_whales import DockerClient

from deploy.errors import DeployError
from deploy.image.build import BuildEvent, ensure_image, find_image
from deploy.image.builder import own_engine
from deploy.image.transfer import require_built, tag_of
from deploy.lock.model import ImageLock

MOST_FILES = 20


@dataclass(frozen=True)
class LayerDifference:
    """The first layer that came out otherwise.

    Attributes:
        place: counted from the lowest, which is 0.
        expected: its locked digest, empty if the image has one layer more now.
        found: its digest now, empty if the image has one layer less.
        files: what differs in it, a line each; empty if that cannot be told.
        why_no_files: then the reason.
    """

    place: int
    expected: str
    found: str
    files: tuple[str, ...]
    why_no_files: str = ""


@dataclass(frozen=True)
class Rebuilt:
    """What came of building it again; `difference` is None if every layer is the locked one."""

    expected: str
    found: str
    layers: int
    difference: LayerDifference | None

    @property
    def same(self) -> bool:
        return self.expected == self.found


def rebuild(
    repository: Path,
    locked: ImageLock,
    folder: Path,
    *,
    progress: Callable[[BuildEvent], None] = lambda event: None,
    mirror: str | None = None,
    security_mirror: str | None = None,
    certificates: Path | None = None,
) -> Rebuilt:
    """Build the locked image in an engine of its own, with no cache of packages, wheels or steps, and compare.

    Args:
        locked: deploy.lock's image.
        folder: a folder that is not there yet; all that is built lies in it and is removed.
        progress: as `ensure_image` has it; `mirror`, `security_mirror`, `certificates` likewise.

    Raises:
        HostError: no engine of its own can be started, or the disk is too small.
        DeployError: the build fails.
    """
    image = require_built(locked)
    with own_engine(folder) as docker:
        ensure_image(
            repository,
            progress=progress,
            docker=docker,
            mirror=mirror,
            security_mirror=security_mirror,
            certificates=certificates,
            package_cache=folder / "packages",
            host_network=True,
        )
        return compare(image, docker)


def compare(image: ImageLock, docker: DockerClient) -> Rebuilt:
    """Compare a locked image with what another engine has under its name."""
    built = docker.image.inspect(tag_of(image))
    wanted, found = [layer.diff_id for layer in image.layer], built.root_fs.layers or []
    place = first_difference(wanted, found)
    difference = None if place is None else _difference(image, wanted, found, place, docker)
    return Rebuilt(image.id, built.id, len(found), difference)


def first_difference(one: Sequence[str], other: Sequence[str]) -> int | None:
    """Where two sequences first differ; None if they are equal."""
    pairs = zip_longest(one, other)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), None)


def _difference(
    image: ImageLock, wanted: Sequence[str], found: Sequence[str], place: int, docker: DockerClient
) -> LayerDifference:
    expected, now = (layers[place] if place < len(layers) else "" for layers in (wanted, found))
    try:
        here = DockerClient()
        locked = find_image(tag_of(image), here)
        if locked is None or locked.id != image.id:
            raise ValueError("the locked image is not on this host: deploy pull, then again")
        mine, other = (_layer_folders(client, tag_of(image))[place] for client in (here, docker))
        lines = tuple(differing_files(mine, other))
    except (ValueError, IndexError, DeployError) as error:
        return LayerDifference(place, expected, now, (), str(error))
    why = "" if lines else "no file differs: it is the order or the headers of the layer's archive"
    return LayerDifference(place, expected, now, lines, why)


def _layer_folders(docker: DockerClient, image: str) -> list[Path]:
    """The folder of each layer's own files, from the lowest.

    Raises:
        ValueError: the engine does not keep them in folders that can be read here.
    """
    driver = docker.image.inspect(image).graph_driver
    data = cast("dict[str, str]", driver.data or {})
    if driver.name != "overlay2" or "UpperDir" not in data:
        raise ValueError("files are compared only where Docker stores images with overlay2")
    lower = [name for name in data.get("LowerDir", "").split(":") if name]
    folders = [Path(name) for name in (*reversed(lower), data["UpperDir"])]
    if not all(folder.is_dir() for folder in folders):
        raise ValueError("the engine's own folders cannot be read here")
    return folders


def differing_files(one: Path, other: Path, most: int = MOST_FILES) -> list[str]:
    """What differs between two folders, a line for each file, in the order of their paths.

    Args:
        most: lines; one more says how many are left out.
    """
    facts = [dict(_walk(folder)) for folder in (one, other)]
    lines: list[str] = []
    for path in sorted(facts[0].keys() | facts[1].keys()):
        a, b = facts[0].get(path), facts[1].get(path)
        if a is None or b is None:
            lines.append(f"{path}: {'only in the locked image' if a else 'only in the new one'}")
        elif changes := [f"{name} {a.get(name)} -> {b.get(name)}" for name in a if a.get(name) != b.get(name)]:
            lines.append(f"{path}: {', '.join(changes)}")
    rest = len(lines) - most
    return [*lines[:most], f"and {rest} more"] if rest > 0 else lines


def _walk(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            yield str(path.relative_to(folder)), _facts(path)


def _facts(path: Path) -> dict[str, str]:
    """All of a file that a layer records."""
    status = path.lstat()
    facts = {
        "mode": stat.filemode(status.st_mode),
        "owner": f"{status.st_uid}:{status.st_gid}",
        "time": str(status.st_mtime_ns / 1e9),
        "attributes": repr({name: os.getxattr(path, name, follow_symlinks=False) for name in _attributes(path)}),
    }
    if stat.S_ISREG(status.st_mode):
        with path.open("rb") as file:
            facts |= {"size": str(status.st_size), "sha256": hashlib.file_digest(file, "sha256").hexdigest()[:16]}
    elif stat.S_ISLNK(status.st_mode):
        facts["target"] = str(path.readlink())
    elif not stat.S_ISDIR(status.st_mode):
        facts["device"] = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return facts


def _attributes(path: Path) -> list[str]:
    """Extended attributes, without those that overlayfs keeps for itself."""
    return [name for name in os.listxattr(path, follow_symlinks=False) if not name.startswith("trusted.overlay.")]
