"""`deploy` on a machine without GPUs, with stand-ins for the engines, and killed at a chosen moment.

    STANDIN_IMAGE=NAME [KILL_AT=N] controller.py VERB ...

What is put in the place of the controller's own: the look at the host's GPUs, the model folder, and the build of the
image. Everything that changes the stack is the controller's own. KILL_AT kills the process, as a power cut would, at
its N-th change on the disk or order to Docker. OVERRIDE is override.py's.
"""

import os
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import override

from deploy import entry
from deploy.stack import up

HERE = Path(__file__).parent
# What of the Docker command line changes something.
ORDERS = {"up", "rm", "remove", "kill", "restart", "stop", "down", "tag"}


def install() -> None:
    override.add_files(str(HERE / "standin.yaml"))
    override.install()
    override.use_image(os.environ["STANDIN_IMAGE"])
    up.check_host = lambda stack, spec: "a host of the test"
    up._prepare_model = lambda spec_file, state: "no model"  # pyright: ignore


def kill_at(count: int) -> None:
    left = [count]

    def change() -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        change()
        return operation(*arguments, **options)

    for name in ("replace", "rename", "symlink", "unlink"):
        setattr(os, name, partial(dying, getattr(os, name)))
    started = subprocess.Popen

    class Popen(started):  # pyright: ignore
        def __init__(self, arguments: Any, *rest: Any, **options: Any) -> None:
            order = [str(word) for word in arguments if not str(word).startswith("-")]
            changing = bool(ORDERS & set(order[1:])) and "config" not in order
            if changing:
                change()
            super().__init__(arguments, *rest, **options)
            if changing:
                # The order has been given, nobody waits for it.
                change()

    subprocess.Popen = Popen


if __name__ == "__main__":
    install()
    if at := os.environ.get("KILL_AT"):
        kill_at(int(at))
    entry.main()
