"""Hashes a few blocks of a file, and holds a model's folder against such hashes.

Only the standard library: an init container runs this file alone (`python sampling.py MANIFEST FOLDER`), with a JSON
manifest of `{"file": [{"path", "size", "sample"}, …]}`.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

BLOCK_BYTES = 1 << 16
BLOCKS = 16
INDEX = "model.safetensors.index.json"


def sample(path: Path) -> str:
    """Hash a file's size and BLOCKS blocks of it at even distances, the first and the last among them.

    A file that is cut, mixed up with another or only partly written shows; one flipped byte elsewhere does not.

    Returns:
        sha256, 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(str(size).encode())
        last = max(size - BLOCK_BYTES, 0)
        for offset in sorted({last * block // (BLOCKS - 1) for block in range(BLOCKS)}):
            file.seek(offset)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def faults(folder: Path, files: list[dict[str, object]]) -> list[str]:
    """What is wrong with a folder, a line for each file.

    Args:
        files: path in the folder, size in bytes, and sample of each; a sample may be empty. With no file at all the
            folder is only asked for its configuration and the shards that its index names.
    """
    found: list[str] = []
    wanted = files or [{"path": name} for name in ("config.json", *_shards(folder))]
    for file in wanted:
        path = folder / str(file["path"])
        try:
            size = path.stat().st_size
            if file.get("size", size) != size:
                found.append(f"{file['path']}: expected {file['size']} bytes, found {size}")
            elif file.get("sample") and sample(path) != file["sample"]:
                found.append(f"{file['path']}: other bytes than deploy.lock's")
        except OSError as error:
            found.append(f"{file['path']}: {error.strerror or error}")
    return found


def _shards(folder: Path) -> list[str]:
    try:
        return sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def main() -> None:
    """Say what is wrong with a folder; exit code 1 if anything is."""
    manifest, folder = Path(sys.argv[1]), Path(sys.argv[2])
    files: list[dict[str, object]] = json.loads(manifest.read_text())["file"]
    found = faults(folder, files)
    how = (
        f"{len(files)} files as deploy.lock has them" if files else "complete; deploy.lock has no model to compare with"
    )
    sys.stdout.write("\n".join(found or [f"{folder}: {how}"]) + "\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
