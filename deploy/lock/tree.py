"""One hash for a tree of files, which a person can make with standard tools too.

find . -type f ! -path '*/__pycache__/*' -printf '%P\\n' | LC_ALL=C sort | xargs -d '\\n' sha256sum | sha256sum
"""

import hashlib
from collections.abc import Mapping


def tree_hash(files: Mapping[str, str]) -> str:
    """Hash a tree: the sha256 of what `sha256sum` prints for its files in the order of their paths.

    Args:
        files: sha256 of each file by its path below the tree's root. Times and modes do not count.

    Returns:
        64 hexadecimal digits.
    """
    lines = "".join(f"{files[path]}  {path}\n" for path in sorted(files, key=str.encode))
    return hashlib.sha256(lines.encode()).hexdigest()


def content_hashes(files: Mapping[str, bytes], folder: str) -> dict[str, str]:
    """sha256 of each file below a folder, by its path there, bytecode left out.

    Args:
        files: contents by path.
        folder: without a slash at the end.
    """
    return {
        path.removeprefix(f"{folder}/"): hashlib.sha256(content).hexdigest()
        for path, content in files.items()
        if path.startswith(f"{folder}/") and "__pycache__" not in path.split("/")
    }
