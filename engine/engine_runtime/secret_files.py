"""Reads the secret files of a container. No message repeats what is in them."""

import os
import re
from pathlib import Path

KEYS_FILE = Path("/run/secrets/api_key")
ADMIN_KEY_FILE = Path("/run/secrets/admin_key")
CERTIFICATE_FILE = Path("/run/secrets/tls_certificate")
CERTIFICATE_KEY_FILE = Path("/run/secrets/tls_key")


class UsageError(Exception):
    """The container was started in a way that cannot work; the text says what to change."""


def read_text(path: Path) -> str:
    """What the file says, empty when there is none.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"user {os.getuid()} cannot read the secret file: {error}") from error


def read_keys(path: Path) -> dict[str, str]:
    """The API keys in a file, each with its owner's name.

    A line is `KEY` or `KEY NAME`; empty lines and those that begin with # count for nothing. A key without a name is
    called after its line, `key-3`.

    Raises:
        UsageError: the file cannot be read; a line has more than two words or a name that is not one; a key is there
            twice.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        name = words[1] if len(words) > 1 else f"key-{number}"
        if len(words) > 2 or not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
            raise UsageError(f"line {number} of the API keys must be KEY, or KEY NAME with letters, digits and . _ -")
        if words[0] in found:
            raise UsageError(f"line {number} of the API keys repeats a key")
        found[words[0]] = name
    return found
