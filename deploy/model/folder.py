"""Where a model's folder is, and whether it is complete and readable.

The latter is decided from names, sizes and headers, without reading the weights.
"""

import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

from deploy.host.errors import HostError
from deploy.spec.load import SpecFile
from deploy.stack.state import State

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
INDEX = "model.safetensors.index.json"
# The image's unprivileged user reads the mounted folder.
CONTAINER_UID = 65532
LONGEST_HEADER = 100_000_000


def model_folder(spec_file: SpecFile, state: State) -> Path:
    """Where the served model lies: the generated one on the cpu profile, else `[model] path` beside deploy.toml."""
    if spec_file.spec.profile == "cpu":
        return state.tiny_model.absolute()
    return (spec_file.file.parent / spec_file.spec.model.path).absolute()


def draft_folder(spec_file: SpecFile) -> Path | None:
    """Where DSpark's draft model lies, None if it is in the model's folder."""
    path = spec_file.spec.engine.draft_path
    return (spec_file.file.parent / path).absolute() if path else None


def require_model(folder: Path) -> None:
    """Check a Hugging Face model folder: config.json, tokenizer, and every byte of every shard that the index names.

    Raises:
        HostError: names the missing, cut or unreadable files.
    """
    if not folder.is_dir():
        raise HostError(
            f"the model folder {folder} does not exist",
            "the engines read the weights from it",
            "set path under [model] in deploy.toml, or run without GPUs: deploy up --profile cpu",
        )
    files = ["config.json", *_tokenizer(folder), *_shards(folder)]
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise _incomplete(folder, f"{_listed(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    _config(folder)
    cut = [reason for name in files if name.endswith(".safetensors") and (reason := _damage(folder / name))]
    if cut:
        raise _incomplete(folder, _listed(cut))
    closed = [name for name in [".", *files] if not _readable(folder / name)]
    if closed:
        raise HostError(
            f"the container's user cannot read {_listed(closed)} in {folder}",
            f"the engines run as user {CONTAINER_UID}, not as root",
            f"chmod -R o+rX {folder}",
        )


def _tokenizer(folder: Path) -> list[str]:
    return [next((name for name in TOKENIZERS if (folder / name).is_file()), TOKENIZERS[0])]


def _config(folder: Path) -> None:
    try:
        config: Any = json.loads((folder / "config.json").read_text())
        config["architectures"]
    except (ValueError, KeyError, TypeError) as error:
        raise _incomplete(folder, "config.json is not a model's configuration") from error


def _shards(folder: Path) -> list[str]:
    if not (folder / INDEX).is_file():
        return ["model.safetensors"]
    try:
        index: Any = json.loads((folder / INDEX).read_text())
        return sorted(set(map(str, index["weight_map"].values())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _incomplete(folder, f"{INDEX} is not an index of shards") from error


def _damage(shard: Path) -> str | None:
    """What is wrong with a safetensors file, judged by its header and size, or None.

    The format: 8 bytes with the header's length, a JSON header with each tensor's offsets, then the data
    (https://huggingface.co/docs/safetensors).
    """
    size = shard.stat().st_size
    with shard.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else LONGEST_HEADER + 1
        if length > min(size, LONGEST_HEADER):
            return f"{shard.name} is cut or not a safetensors file"
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return f"{shard.name} has a broken header"
    expected = 8 + length + max(ends, default=0)
    return None if size == expected else f"{shard.name} has {size} of {expected} bytes"


def _readable(path: Path) -> bool:
    status = path.stat()
    owned = status.st_uid == CONTAINER_UID
    needed = (stat.S_IRUSR if owned else stat.S_IROTH) | (
        (stat.S_IXUSR if owned else stat.S_IXOTH) if path.is_dir() else 0
    )
    return status.st_mode & needed == needed or os.geteuid() == CONTAINER_UID


def _incomplete(folder: Path, why: str) -> HostError:
    return HostError(
        f"the model folder {folder} is incomplete", why, "download these files again, or correct path under [model]"
    )


def _listed(names: list[str], most: int = 5) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
