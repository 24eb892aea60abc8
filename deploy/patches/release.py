"""SGLang as it was published: the locked wheel, or any other release."""

import re
import subprocess
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from deploy.errors import DeployError
from deploy.lock.model import read_lock
from deploy.lock.resolve import PACKAGE, Progress, Sources, engine_wheel
from deploy.patches.series import Source

PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_36"


@contextmanager
def locked_release(root: Path, progress: Progress) -> Generator[Source]:
    """The SGLang that the repository locks, from its wheel.

    Args:
        root: the checkout.

    Raises:
        DeployError: it cannot be fetched, or nothing is locked yet.
    """
    rootfs = read_lock(root).rootfs
    if rootfs is None:
        raise DeployError("no SGLang is locked", "deploy.lock has no root file system", "deploy lock")
    file, _ = engine_wheel(root, rootfs, Sources(), progress)
    with zipfile.ZipFile(file) as archive:
        inside = set(archive.namelist())
        yield lambda path: archive.read(path).decode("utf-8") if path in inside else None


def folder_source(tree: Path) -> Source:
    """SGLang as it lies in a folder that holds `sglang/`."""

    def source(path: str) -> str | None:
        return (tree / path).read_bytes().decode("utf-8") if (tree / path).is_file() else None

    return source


def install_release(
    uv: Path,
    version: str,
    tree: Path,
    run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run,
) -> None:
    """Unpack a release into a folder, from the package index that uv is set up with; no dependencies.

    Args:
        uv: the program.
        version: such as `0.5.24`.
        tree: receives `sglang/`.

    Raises:
        DeployError: there is no such version, or the index does not answer.
    """
    if not re.fullmatch(r"[0-9][0-9A-Za-z.+!]*", version):
        raise DeployError(f"{version!r} is no version", "a version starts with a number", "name one, such as 0.5.24")
    command = [str(uv), "pip", "install", "--quiet", "--no-deps", "--no-build", "--prerelease=allow"]
    command += [f"--python-version={PYTHON}", f"--python-platform={PLATFORM}", f"--target={tree}"]
    try:
        done = run([*command, f"{PACKAGE}=={version}"], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise DeployError("uv does not run", f"there is no {uv}", "make .tools/bin/uv") from error
    if done.returncode != 0:
        raise DeployError(
            f"SGLang {version} could not be fetched",
            done.stderr.strip(),
            "name a published version; uv's own settings say which index is asked",
        )
