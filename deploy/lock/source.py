"""Locks by name: a file, or a git revision of this repository."""

import subprocess
from pathlib import Path

from deploy.errors import DeployError
from deploy.lock.document import FILE_NAME
from deploy.lock.model import Lock, load


def named_lock(root: Path, name: str) -> Lock:
    """Read a lock.

    Args:
        root: the checkout.
        name: a lock file, a folder that holds one, or whatever git takes for a revision: `HEAD~1`, `main`, `v1.2`.

    Raises:
        DeployError: it is neither, or there is no lock at that revision.
    """
    path = Path(name) / FILE_NAME if Path(name).is_dir() else Path(name)
    if name and path.is_file():
        try:
            return load(path.read_text(encoding="utf-8"), name)
        except UnicodeDecodeError as error:
            raise DeployError(f"{name} is no lock", str(error), "name a deploy.lock or a git revision") from error
    # No option and no empty name, which would mean the index: only names of commits.
    revision = name if name and not name.startswith("-") else "no-such-revision"
    command = ["git", "-C", str(root), "cat-file", "blob", f"{revision}:{FILE_NAME}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError as error:
        raise DeployError(
            f"{name} cannot be read", "it is no file, and there is no git to ask", "apt-get install git"
        ) from error
    if done.returncode != 0:
        said = done.stderr.strip().removeprefix("fatal: ").splitlines()
        raise DeployError(
            f"{name} is neither a lock file nor a revision that has one",
            said[0] if said else f"git exit code {done.returncode}",
            "name a deploy.lock, a git revision (git log --oneline deploy.lock), or `running`",
        )
    return load(done.stdout, f"{name}:{FILE_NAME}")
