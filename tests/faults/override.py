"""`deploy` with one more compose file, which the variable OVERRIDE names: override.py VERB ..."""

import os
from collections.abc import Callable

from deploy import entry
from deploy.stack import compose


def install() -> None:
    names: Callable[..., tuple[str, ...]] = compose.compose_files
    compose.compose_files = lambda *arguments, **options: (*names(*arguments, **options), os.environ["OVERRIDE"])


if __name__ == "__main__":
    install()
    entry.main()
