"""What decides the image, as one hash: a pure function of files in the repository."""

from pathlib import Path


def image_tag(repository: Path) -> str:
    """Name the image that this repository's files decide.

    Args:
        repository: root of the checkout.

    Returns:
        `deepseek-v4-flash-sm120:<first 16 hex digits of the input hash>`.

    Raises:
        DeployError: an input is missing or does not parse.
    """
    raise NotImplementedError
