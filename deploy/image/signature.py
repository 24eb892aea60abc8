"""Signatures of the image by cosign, with key files. The signature lies beside the image in its registry."""

import shutil
import subprocess
from pathlib import Path

from deploy.errors import DeployError
from deploy.image.registry import Registry

PROGRAM = "cosign"
# No public log: a private registry's digests are nobody else's business, and hosts may have no way out.
SIGN = ("sign", "--yes", "--tlog-upload=false")
VERIFY = ("verify", "--insecure-ignore-tlog=true", "--output=json")


class NotSigned(DeployError):
    """The image carries no signature by the required key."""


def sign(registry: Registry, digest: str, key: Path) -> None:
    """Sign an image in a registry with a private key; cosign asks for its password, or reads COSIGN_PASSWORD.

    Raises:
        DeployError: cosign is missing or refuses.
    """
    command = _command(SIGN, registry, digest, key)
    # Its questions go to the terminal.
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise DeployError(
            f"{registry.name}@{digest} could not be signed",
            f"cosign ended with exit code {done.returncode}",
            f"check the key {key} and its password, then push again: the image itself is there",
        )


def require_signature(registry: Registry, digest: str, key: Path) -> None:
    """Make sure that an image in a registry is signed with a key.

    Args:
        digest: of its manifest.
        key: the public key.

    Raises:
        NotSigned: it is not, or by another key.
        DeployError: cosign is missing.
    """
    if not key.is_file():
        raise DeployError(
            "the key that images must be signed with is missing", f"no file {key}", "correct [image] public_key"
        )
    done = subprocess.run(_command(VERIFY, registry, digest, key), capture_output=True, text=True)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
        raise NotSigned(
            "the image is not signed with the required key",
            f"{registry.name}@{digest}, key {key}: {' '.join(words)[-400:]}",
            "deploy push --key cosign.key where that key is, or empty [image] public_key",
        )


def _command(verb: tuple[str, ...], registry: Registry, digest: str, key: Path) -> list[str]:
    program = shutil.which(PROGRAM)
    if program is None:
        raise DeployError(
            "cosign is not installed",
            "it makes and checks the signatures of images",
            "apt-get install cosign (Debian 13), or take it from the sigstore project",
        )
    plain = ["--allow-http-registry"] if registry.scheme == "http" else []
    return [program, *verb, *plain, f"--key={key}", f"{registry.name}@{digest}"]
