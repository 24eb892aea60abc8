"""`deploy` with more compose files, and with another image than this checkout's: override.py VERB ...

OVERRIDE names the files, with `:` between them. IMAGE names an image that is there; without it `deploy` takes its own.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from python_on_whales import DockerClient

from deploy import entry
from deploy.image.build import ImageReference
from deploy.stack import compose, up


def add_files(*more: str) -> None:
    names: Callable[..., tuple[str, ...]] = compose.compose_files
    compose.compose_files = lambda *arguments, **options: (*names(*arguments, **options), *more)


def use_image(tag: str) -> None:
    def obtain(*_: Any, **__: Any) -> Any:
        found = DockerClient().image.inspect(tag)
        return SimpleNamespace(image=ImageReference(tag, found.id, found.size, False), origin="of the test")

    up.obtain = obtain


def install() -> None:
    add_files(*filter(None, os.environ.get("OVERRIDE", "").split(":")))
    if tag := os.environ.get("IMAGE"):
        use_image(tag)


if __name__ == "__main__":
    install()
    entry.main()
