"""Brings files from addresses to their places by hash: several at a time, resumed after a cut, each verified."""

import fcntl
import hashlib
import os
import queue
import ssl
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from deploy.errors import DeployError
from deploy.reading import file_sha256

PARALLEL = 8
CHUNK_BYTES = 1 << 18
TIMEOUT_S = 20
# In a row and without a chunk of progress: a transfer that comes further each time goes on.
ATTEMPTS = 5
PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
LOOK_S = 0.1
# Answers that another moment may change, besides all above 500.
TRY_AGAIN = (408, 425, 429)


@dataclass(frozen=True)
class Item:
    """One file to fetch.

    Attributes:
        name: as a person knows it, for messages.
        target: where it goes. What arrived of it waits beside it, hidden, until it is whole.
        size: bytes; 0 if not known.
    """

    name: str
    url: str
    sha256: str
    target: Path
    size: int = 0


@dataclass(frozen=True)
class Advice:
    """What to do about a file that is not what was locked, not there, or out of reach."""

    altered: str
    missing: str
    unreachable: str


class _TryAgain(Exception):
    pass


def cache_folder(kind: str) -> Path:
    """Where fetched files of a kind stay: below `$XDG_CACHE_HOME`, or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "deepseek-v4-flash-sm120" / kind


def http_client(certificates: Path | None = None, auth: httpx.Auth | None = None) -> httpx.Client:
    """A client that trusts the authorities and uses the proxies of this machine.

    Args:
        certificates: PEM file of the authorities to trust; `SSL_CERT_FILE` or the usual ones if None.
    """
    trusted = ssl.create_default_context(cafile=str(certificates) if certificates else None)
    return httpx.Client(verify=trusted, timeout=TIMEOUT_S, follow_redirects=True, auth=auth)


def fetch(
    items: Iterable[Item],
    http: httpx.Client,
    advice: Advice,
    progress: Callable[[int, int], None] = lambda done, total: None,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Bring every file to its place; what is there already is verified, not fetched.

    A file in place that is cut is completed, one with other bytes is fetched anew.

    Args:
        advice: for the message, if one cannot be had.
        progress: called with bytes done and bytes in all.
        note: called with a line for each file that had to be fetched again, and why.

    Raises:
        DeployError: a file is gone or altered, or its server does not answer; the others that came stay.
        KeyboardInterrupt: passed on; what arrived so far is kept for the next time.
    """
    wanted = list(items)
    total = sum(item.size for item in wanted)
    counted, told = _Counter(), queue.SimpleQueue[str]()
    stop = threading.Event()
    progress(0, total)
    with ThreadPoolExecutor(PARALLEL) as pool:
        try:
            waiting = {pool.submit(_one, item, http, advice, counted, told.put, stop) for item in wanted}
            while waiting:
                finished, waiting = wait(waiting, LOOK_S, FIRST_EXCEPTION)
                while not told.empty():
                    note(told.get())
                for future in finished:
                    future.result()
                progress(counted.value, max(total, counted.value))
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


class _Counter:
    def __init__(self) -> None:
        self.value = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.value += count


def _one(
    item: Item,
    http: httpx.Client,
    advice: Advice,
    counted: _Counter,
    note: Callable[[str], None],
    stop: threading.Event,
) -> None:
    try:
        item.target.parent.mkdir(parents=True, exist_ok=True)
        with _partial(item.target) as file:
            if _in_place(item, file, note):
                counted.add(item.target.stat().st_size)
            elif _complete(item, http, advice, file, counted, note, stop):
                os.fsync(file.fileno())
                _partial_path(item.target).replace(item.target)
    except OSError as error:
        raise DeployError(
            f"{item.name} could not be fetched", f"{error.filename or item.target}: {error.strerror}", "mend that"
        ) from error


def _in_place(item: Item, file: IO[bytes], note: Callable[[str], None]) -> bool:
    if not item.target.is_file():
        return False
    size = item.target.stat().st_size
    if not item.size or size >= item.size:
        found = file_sha256(item.target)
        if found == item.sha256:
            return True
        note(f"{item.name}: sha256 {found} instead of {item.sha256}; fetched again")
    else:
        note(f"{item.name}: {size} of {item.size} bytes; the rest is fetched")
        if size > file.seek(0, os.SEEK_END):
            # In place of what may wait there: it is the longer beginning.
            file.truncate(0)
            with item.target.open("rb") as source:
                while chunk := source.read(CHUNK_BYTES):
                    file.write(chunk)
            file.flush()
    return False


def _complete(
    item: Item,
    http: httpx.Client,
    advice: Advice,
    file: IO[bytes],
    counted: _Counter,
    note: Callable[[str], None],
    stop: threading.Event,
) -> bool:
    """Fetch what is missing; False if it was stopped."""
    attempts, spoilt, added = 0, False, 0

    def gain(count: int) -> None:
        nonlocal added
        added += count
        counted.add(count)

    while not stop.is_set():
        begun = file.seek(0, os.SEEK_END)
        try:
            digest = _transfer(item, http, file, gain, stop)
        except httpx.HTTPStatusError as error:
            raise DeployError(
                f"{item.name} is not there", f"{item.url} answered {error.response.status_code}", advice.missing
            ) from error
        except (httpx.TransportError, _TryAgain) as error:
            attempts = 1 if file.seek(0, os.SEEK_END) - begun >= CHUNK_BYTES else attempts + 1
            if attempts >= ATTEMPTS:
                raise _unreachable(item, advice, error) from error
            stop.wait(min(PAUSE_S * 2 ** (attempts - 1), LONGEST_PAUSE_S))
        # The last two: of an address that the server sends us to.
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise _unreachable(item, advice, error) from error
        else:
            if digest == item.sha256:
                return True
            if stop.is_set():
                break
            file.truncate(0)
            gain(-added)
            if not begun and spoilt:
                _partial_path(item.target).unlink(missing_ok=True)
                raise DeployError(
                    f"{item.name} is not what was locked",
                    f"{item.url} has sha256 {digest}, deploy.lock expects {item.sha256}",
                    advice.altered,
                )
            # Once may be a transfer that went wrong, or an old beginning that does not fit.
            spoilt = spoilt or not begun
            note(f"{item.name}: sha256 {digest} instead of {item.sha256}; fetched again")
    return False


def _transfer(
    item: Item, http: httpx.Client, file: IO[bytes], gain: Callable[[int], None], stop: threading.Event
) -> str:
    """Append what is missing to a file, and return the sha256 of it all."""
    digest = hashlib.sha256()
    file.seek(0)
    have = 0
    while chunk := file.read(CHUNK_BYTES):
        digest.update(chunk)
        have += len(chunk)
    gain(have)
    counted = have
    try:
        if item.size and have == item.size:
            return digest.hexdigest()
        headers = {"Range": f"bytes={have}-"} if have else {}
        # Content-Encoding would compress what is hashed as it is.
        with http.stream("GET", item.url, headers={**headers, "Accept-Encoding": "identity"}) as response:
            if response.status_code in TRY_AGAIN or response.status_code >= 500:
                raise _TryAgain(f"it answered {response.status_code}")
            if have and response.status_code != 206:
                # No ranges there, or the beginning here is longer than the file.
                file.truncate(0)
                digest, counted = hashlib.sha256(), 0
                gain(-have)
                if response.status_code == 416:
                    raise _TryAgain("it has fewer bytes than have arrived")
            response.raise_for_status()
            # As it arrives: pieces of a fixed size would lose the last one to a cut.
            for chunk in response.iter_raw():
                if stop.is_set():
                    break
                digest.update(chunk)
                file.write(chunk)
                counted += len(chunk)
                gain(len(chunk))
                if item.size and counted > item.size:
                    break
        return digest.hexdigest()
    except BaseException:
        gain(-counted)
        raise
    finally:
        file.flush()


def _unreachable(item: Item, advice: Advice, error: Exception) -> DeployError:
    return DeployError(
        f"{item.name} could not be fetched",
        f"{item.url}: {error or type(error).__name__}",
        f"{advice.unreachable}; what arrived is kept, the same command goes on from there",
    )


def _partial_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.part")


@contextmanager
def _partial(target: Path) -> Generator[IO[bytes]]:
    """The file of what arrived so far, for one process at a time; an empty one leaves nothing behind."""
    path = _partial_path(target)
    while True:
        file = path.open("a+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        # The one who held it may have moved it into place meanwhile.
        if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            break
        file.close()
    with file:
        try:
            yield file
        finally:
            if path.exists() and not path.stat().st_size:
                path.unlink()
