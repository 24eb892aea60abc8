"""The image that deploy.lock names, if it is the one that the repository's files decide."""

from pathlib import Path

from deploy.errors import DeployError
from deploy.image.inputs import read_inputs
from deploy.lock.model import ImageLock, Lock


def locked_image(root: Path, lock: Lock) -> ImageLock:
    """The locked image.

    Args:
        root: the checkout.
        lock: its deploy.lock.

    Raises:
        DeployError: the lock has none, or that of other files.
    """
    inputs = read_inputs(root)
    if lock.image is None or lock.image.inputs != inputs.hash:
        raise DeployError(
            "deploy.lock is behind the repository",
            f"it locks the image of inputs {lock.image.inputs if lock.image else 'none'}, the files here give "
            f"{inputs.hash}",
            "deploy build, then deploy lock",
        )
    return lock.image
