"""Are an image's layers in the order that an engine gives them which holds none of their content already?

Docker's overlay2 driver has two ways to write a layer. Where the layer below lies under two names, because an identical
one was there before the build, it takes the second, which sorts whole paths, so that `a-1.0/x` comes before `a/x`; the
first goes folder by folder. Content and times are equal, the digests are not. (moby 26, daemon/graphdriver/overlay2:
Diff and isParent; pkg/archive: TarWithOptions and ExportChanges.)
"""

import subprocess
import tarfile
from collections.abc import Iterable
from itertools import pairwise
from typing import IO

from deploy.errors import DeployError


def disorder(names: Iterable[str]) -> str | None:
    """The first of a layer's paths that a walk folder by folder would have met earlier; None if there is none."""
    for before, after in pairwise(name.rstrip("/").split("/") for name in names):
        if after < before:
            return "/".join(after)
    return None


def disordered_layer(stream: IO[bytes]) -> str | None:
    """The first path out of order in a layer of a `docker save` stream; None if all are as a clean engine has them."""
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member) if member.isfile() else None
            if content is None:
                continue
            try:
                with tarfile.open(fileobj=content, mode="r|") as layer:
                    found = disorder(entry.name for entry in layer)
            except tarfile.ReadError:
                continue  # the image's description
            if found:
                return found
    return None


def require_order(image: str) -> None:
    """Refuse to lock an image whose digests another host could not come to; reads the whole image (a minute).

    Raises:
        DeployError: a layer is out of order.
    """
    with subprocess.Popen(["docker", "save", image], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as saving:
        assert saving.stdout
        found = disordered_layer(saving.stdout)
        if found:
            saving.kill()
    if found:
        raise DeployError(
            f"the layers of {image[:19]} have digests that a clean engine would not give them",
            f"it was built while this engine held layers of the same content, so {found} is written in another place",
            "make down, or remove the image and the build cache yourself; then deploy build and deploy lock",
        )
