"""Put a bug report together: texts in, one redacted archive out."""

import gzip
import io
import re
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from deploy.host.report import HostReport
from deploy.report.redact import Redactor

LINES_OF_LOG = 2000
"""Of each role; what goes wrong is at the end."""
_GENERIC_HOSTS = {"localhost", "host", "server", "ubuntu", "debian", "vm"}


def known_identities(
    report: HostReport, keys: Iterable[str] = (), home: str = "", user: str = ""
) -> list[tuple[str, str]]:
    """What is known to be private on this host: (kind, value).

    Args:
        report: of the host.
        keys: contents of secret files.
        home: the home folder of whoever makes the report.
        user: their name.
    """
    known: list[tuple[str, str]] = [("key", key.strip()) for key in keys if key.strip()]
    known += [("uuid", gpu.uuid) for gpu in report.gpus if gpu.uuid]
    known += [("serial", gpu.serial) for gpu in report.gpus if gpu.serial]
    names = {report.system.hostname, report.system.hostname.split(".")[0]} - {""}
    known += [("host", name) for name in names if name.lower() not in _GENERIC_HOSTS]
    if user and user != "root":
        known.append(("user", user))
    match = re.fullmatch(r"/home/([^/]+)/?", home)
    if match:
        known.append(("user", match[1]))
    return known


def last_lines(text: str, count: int = LINES_OF_LOG) -> str:
    """The end of a log."""
    lines = text.splitlines(keepends=True)
    dropped = len(lines) - count
    return (f"[{dropped} earlier lines left out]\n" if dropped > 0 else "") + "".join(lines[-count:])


def contents(texts: Mapping[str, str], redactor: Redactor) -> dict[str, str]:
    """The redacted files of the archive, with a table of contents that counts what was replaced."""
    files = {name: redactor.text(text) for name, text in texts.items()}
    counts = ", ".join(f"{number} {kind}" for kind, number in redactor.counts().items()) or "nothing"
    listing = "".join(f"- {name}\n" for name in sorted(files))
    files["README.md"] = (
        "# Bug report\n\nMade by `deploy report`. Read it before you send it.\n\n"
        f"{listing}\nReplaced, the same value by the same label everywhere: {counts}.\n"
    )
    return files


def pack(files: Mapping[str, str], folder: str) -> bytes:
    """A .tar.gz of files under one folder. The same files give the same bytes."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in sorted(files):
            data = files[name].encode(errors="replace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), mtime=0)


def save(archive: bytes, path: Path) -> None:
    """Write the archive, readable by its owner only; an existing file is never replaced.

    Raises:
        FileExistsError: there is one of that name.
    """
    path.touch(mode=0o600, exist_ok=False)
    path.write_bytes(archive)
