"""Brings the locked model's files to this host, from a hub or from a folder, each verified against deploy.lock."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote, unquote

import httpx

from deploy.errors import DeployError
from deploy.fetch import CHUNK_BYTES, Advice, Item, fetch, http_client
from deploy.host.errors import HostError
from deploy.lock.model import ModelLock
from deploy.model.check import remember

HUB = "https://huggingface.co"
ADVICE = Advice(
    altered="use another source (--from); if this one is right, the lock is not: deploy lock --update model",
    missing="check the repository and revision under [model], and --from",
    unreachable="check the network and --from",
)


def fetch_model(
    model: ModelLock,
    source: str,
    folder: Path,
    memory: Path,
    *,
    certificates: Path | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Have every locked file in the folder; what is there is verified, completed if cut, fetched anew if other.

    Args:
        model: what is locked.
        source: address of a hub that serves `REPO/resolve/REVISION/PATH`, or a folder with the files.
        folder: the model's folder.
        memory: where `verify` remembers when files were hashed.
        progress: called with bytes done and bytes in all.
        note: called with a line for each file that had to be fetched again, and why.

    Raises:
        DeployError: a file cannot be had; those that came stay, and so does what arrived of the others.
        HostError: the disk is too small.
    """
    address = addresses(model, source)
    _require_room(model, folder)
    items = [Item(file.path, address(file.path), file.sha256, folder / file.path, file.size) for file in model.file]
    with http_client(certificates) as network, httpx.Client(transport=FolderTransport(), timeout=None) as local:
        fetch(items, local if Path(source).is_dir() else network, ADVICE, progress, note)
    _open_to_read(model, folder)
    remember(folder, model, memory)


def _open_to_read(model: ModelLock, folder: Path) -> None:
    """The containers' user is another than ours."""
    for file in model.file:
        path = folder / file.path
        path.chmod(path.stat().st_mode | 0o444)
        for parent in path.parents[: len(Path(file.path).parts)]:
            parent.chmod(parent.stat().st_mode | 0o555)


def addresses(model: ModelLock, source: str) -> Callable[[str], str]:
    """Where each file of a model lies.

    Raises:
        DeployError: the source is neither a folder nor an address, or a hub cannot know the model.
    """
    if Path(source).is_dir():
        base = f"file://localhost{quote(str(Path(source).absolute()))}"
    elif not source.startswith(("http://", "https://")):
        raise DeployError(
            f"{source} is no source of a model",
            "it is neither a folder that exists nor an address that begins with http:// or https://",
            "name a folder with the model's files, or a hub",
        )
    elif not model.repo:
        raise DeployError(
            "the locked model comes from no hub",
            "deploy.lock has its files, but no repository and revision",
            "set repo and revision under [model] in deploy.toml, then deploy lock; or --from FOLDER",
        )
    else:
        base = f"{source.rstrip('/')}/{model.repo}/resolve/{model.revision}"
    return lambda path: f"{base}/{quote(path)}"


def _require_room(model: ModelLock, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    missing = 0
    for file in model.file:
        path = folder / file.path
        partial = path.with_name(f".{path.name}.part")
        have = sum(item.stat().st_size for item in (path, partial) if item.is_file())
        missing += max(file.size - have, 0)
    free = shutil.disk_usage(folder).free
    if free < missing:
        raise HostError(
            "the disk is too small for the model",
            f"{missing / 1e9:.1f} GB are missing in {folder}, {free / 1e9:.1f} GB are free",
            "free some, or set path under [model] in deploy.toml to another disk",
        )


class FolderTransport(httpx.BaseTransport):
    """Answers for `file://` addresses as a web server would, so that a folder is fetched from like a hub."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        path = Path(unquote(request.url.path))
        if not path.is_file():
            return httpx.Response(404)
        begin = int(request.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if begin and begin >= path.stat().st_size:
            return httpx.Response(416)
        return httpx.Response(206 if begin else 200, stream=_FileStream(path, begin))


class _FileStream(httpx.SyncByteStream):
    def __init__(self, path: Path, begin: int) -> None:
        self._path, self._begin = path, begin

    def __iter__(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._begin)
                while chunk := file.read(CHUNK_BYTES):
                    yield chunk
        except OSError as error:
            raise httpx.ReadError(str(error)) from error
