"""Gives a second Docker engine an image of the first one without a copy: hard links to its layers (driver overlay2)."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

DRIVER = "overlay2"


def share(root: Path, name: str, other: Path) -> None:
    """Put an image into the data folder of an engine that does not run yet.

    Layers that are in use are never written to, so both engines may have them.

    Args:
        root: data folder of the engine that has the image.
        name: `repository:tag`.
        other: data folder of the other one, on the same file system.
    """
    image_id = json.loads((root / "image" / DRIVER / "repositories.json").read_text())["Repositories"][
        name.partition(":")[0]
    ][name]
    algorithm, _, digest = image_id.partition(":")
    config = root / "image" / DRIVER / "imagedb/content" / algorithm / digest
    for place in (config, root / "image" / DRIVER / "imagedb/metadata" / algorithm / digest):
        if place.exists():
            _copy(place, root, other)
    chain = ""
    for layer in json.loads(config.read_text())["rootfs"]["diff_ids"]:
        chain = layer if not chain else "sha256:" + hashlib.sha256(f"{chain} {layer}".encode()).hexdigest()
        database = root / "image" / DRIVER / "layerdb" / chain.replace(":", "/")
        _copy(database, root, other)
        files = root / DRIVER / (database / "cache-id").read_text()
        target = other / DRIVER / files.name
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "--archive", "--link", str(files), str(target)], check=True)
        short = other / DRIVER / "l" / (files / "link").read_text()
        short.parent.mkdir(exist_ok=True)
        short.symlink_to(f"../{files.name}/diff")
    repositories = {"Repositories": {name.partition(":")[0]: {name: image_id}}}
    (other / "image" / DRIVER / "repositories.json").write_text(json.dumps(repositories))


def _copy(place: Path, root: Path, other: Path) -> None:
    target = other / place.relative_to(root)
    target.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        shutil.copytree(place, target)
    else:
        shutil.copy2(place, target)
