"""SGLang before and after the patch series, from its locked wheel."""

import hashlib
import re
import tempfile
import zipfile
from collections.abc import Mapping
from email.parser import HeaderParser
from pathlib import Path

from deploy.errors import DeployError
from deploy.image.apply_patches import apply, series, touched
from deploy.lock.model import EngineLock, LockedPatch
from deploy.lock.tree import tree_hash

PACKAGE = "sglang"
SERIES = "patches/series"


def locked_patches(files: Mapping[str, bytes]) -> tuple[LockedPatch, ...]:
    """Describe the patch series.

    Args:
        files: contents by path; the series and its patches are below `patches/`.

    Raises:
        DeployError: the series names a patch that is not there, or one that touches what it must not.
    """
    patches: list[LockedPatch] = []
    for name in series(files[SERIES].decode()):
        try:
            content = files[f"patches/{name}"]
            text = content.decode()
            names = tuple(sorted(touched(text)))
        except (KeyError, ValueError) as error:
            why = "there is no such file" if isinstance(error, KeyError) else str(error)
            raise DeployError(
                f"patches/{name} is not a usable patch", why, f"mend it, or take it out of {SERIES}"
            ) from error
        sha256 = hashlib.sha256(content).hexdigest()
        patches.append(LockedPatch(name=name, title=title(text, name), sha256=sha256, files=names))
    return tuple(patches)


def title(patch: str, name: str) -> str:
    """What a patch is about: its mail subject, else the first line before the changes, else its file's name."""
    head = re.split(r"^(?:diff |--- )", patch, maxsplit=1, flags=re.MULTILINE)[0]
    subject = HeaderParser().parsestr(re.sub(r"\AFrom [0-9a-f]{40} .*\n", "", head)).get("Subject", "")
    words = re.sub(r"^\[PATCH[^]]*\]\s*", "", " ".join(subject.split()))
    return words or next((line.strip(" #") for line in head.splitlines() if line.strip(" #")), name)


def lock_engine(wheel: Path, sha256: str, files: Mapping[str, bytes]) -> EngineLock:
    """Hash SGLang's files before and after the patch series.

    Args:
        wheel: SGLang's wheel, whose own hash is `sha256`.
        files: as `locked_patches`.

    Raises:
        DeployError: the series does not apply to this wheel, or this machine has no `patch`.
    """
    patches = locked_patches(files)
    with zipfile.ZipFile(wheel) as archive:
        before = {
            name.removeprefix(f"{PACKAGE}/"): hashlib.sha256(archive.read(name)).hexdigest()
            for name in archive.namelist()
            if name.startswith(f"{PACKAGE}/") and not name.endswith("/") and "__pycache__" not in name.split("/")
        }
        changed = _patched(archive, patches, files)
    after = dict(before)
    for name, content in changed.items():
        inner = name.removeprefix(f"{PACKAGE}/")
        after.pop(inner, None)
        if content is not None:
            after[inner] = hashlib.sha256(content).hexdigest()
    return EngineLock(
        wheel=sha256,
        tree=tree_hash(before),
        patched_tree=tree_hash(after),
        patch=patches,
        patched={f"{PACKAGE}/{name}": after[name] for name in after if after[name] != before.get(name)},
    )


def _patched(
    archive: zipfile.ZipFile, patches: tuple[LockedPatch, ...], files: Mapping[str, bytes]
) -> dict[str, bytes | None]:
    """Contents of the files that the series touches, after it; None for a file that it removes."""
    names = {name for patch in patches for name in patch.files}
    with tempfile.TemporaryDirectory(prefix="deploy-lock-") as directory:
        root = Path(directory) / "site-packages"
        root.mkdir()
        for name in names & set(archive.namelist()):
            archive.extract(name, root)
        for patch in patches:
            file = Path(directory) / "current.patch"
            file.write_bytes(files[f"patches/{patch.name}"])
            try:
                apply(file, root)
            except ValueError as error:
                raise DeployError(
                    f"patches/{patch.name} does not apply to the locked SGLang",
                    str(error),
                    "renew the patch against this version, or take it out of patches/series",
                ) from error
            except FileNotFoundError as error:
                raise DeployError(
                    "patches cannot be applied on this machine", "there is no `patch`", "apt-get install patch"
                ) from error
        return {name: (root / name).read_bytes() if (root / name).is_file() else None for name in names}
