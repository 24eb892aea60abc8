"""Runs HAProxy in front of the router, with `front.cfg` beside this file: `python -m engine_runtime.launch front`.

The keys and the certificate are secret files. HAProxy gets the keys as hashes, and both in the container's /tmp, which
is memory.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from engine_runtime.secret_files import (
    CERTIFICATE_FILE,
    CERTIFICATE_KEY_FILE,
    KEYS_FILE,
    UsageError,
    read_keys,
    read_text,
)

CONFIGURATION = Path(__file__).with_name("front.cfg")
FOLDER = Path("/tmp/front")
SETTINGS: Mapping[str, str] = {
    "ROUTER_ADDRESS": "router:30000",
    "REQUESTS_PER_MINUTE": "0",
    "CONCURRENT_REQUESTS": "0",
    "MAX_REQUEST_BYTES": "2097152",
    "REQUEST_TIMEOUT": "1800",
    "CLIENT_HEADER_SECONDS": "10",
    "CLIENT_SILENCE_SECONDS": "60",
    "GRACE_SECONDS": "30",
}
"""What front.cfg asks for besides the files, with the defaults; 0 means no limit where it is a limit."""


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of front.cfg.

    Args:
        environment: overrides SETTINGS where it has a value that is not empty.

    Raises:
        UsageError: a value that front.cfg could not use.
    """
    found = {name: environment.get(name) or default for name, default in SETTINGS.items()}
    for name, value in found.items():
        if name != "ROUTER_ADDRESS" and not re.fullmatch(r"[0-9]{1,9}", value):
            raise UsageError(f"{name} must be a whole number, not {value!r}")
    return found


def key_map(keys: Mapping[str, str]) -> str:
    """HAProxy's map from the SHA-256 of a key, in capital hexadecimal digits, to the name of its owner."""
    return "".join(f"{hashlib.sha256(key.encode()).hexdigest().upper()} {name}\n" for key, name in keys.items())


def prepare(environment: Mapping[str, str], folder: Path = FOLDER) -> dict[str, str]:
    """Check the secret files and write what HAProxy reads.

    Args:
        environment: PUBLISHED_ADDRESS and the names of SETTINGS.
        folder: where to write; must be private to this container.

    Returns:
        The environment for HAProxy.

    Raises:
        UsageError: no key, or a certificate without its private key.
    """
    keys = read_keys(KEYS_FILE)
    if not keys:
        raise UsageError("the front serves nobody without a key: set API_KEY_FILE")
    certificate, private = read_text(CERTIFICATE_FILE), read_text(CERTIFICATE_KEY_FILE)
    if bool(certificate) != bool(private):
        raise UsageError("a certificate needs its private key and the other way round: set both TLS files or none")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    variables = {**settings(environment), "KEYS_FILE": str(folder / "keys.map")}
    _write(folder / "keys.map", key_map(keys))
    if certificate:
        _write(folder / "tls.pem", f"{certificate.rstrip()}\n{private}")
        variables["TLS_FILE"] = str(folder / "tls.pem")
    return variables


def run(environment: Mapping[str, str]) -> None:
    """Become HAProxy.

    Raises:
        UsageError: as `prepare`, or this image has no HAProxy.
    """
    variables = prepare(environment)
    try:
        os.execvpe("haproxy", ["haproxy", "-db", "-f", str(CONFIGURATION)], {**os.environ, **variables})
    except FileNotFoundError as error:
        raise UsageError("there is no haproxy in this image") from error


def _write(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:  # noqa: PTH123
        file.write(text)
