"""Triton's cache in two parts: the kernels that were baked into the image, and the folder of what this host compiled.

Triton asks the class that ``TRITON_CACHE_MANAGER=sm120_kernels.baked:BakedCache`` names, in every process. A baked
kernel is found by the key that Triton itself makes of source, specialisation, options and compiler, so one of another
version is not found and compiled anew. Imports no more than Triton has loaded already.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from triton.runtime.cache import FileCacheManager

FOLDER = "SM120_KERNELS_BAKED"
"""Environment variable: the baked folder, one folder a kernel and `LAUNCHER`."""
LAUNCHER = "launcher"
"""Holds the extension module by which Triton talks to the driver."""
LOG = "SM120_KERNELS_COMPILED"
"""Environment variable: a file that gets one line, `KIND NAME KEY`, for everything that had to be compiled."""
BEGUN = ".begun"
"""Ending of the file beside it that gets one line, `SECONDS KEY`, when a kernel's compilation begins: seconds of the
machine's clock that never jumps."""


def folder() -> Path:
    """Where the baked kernels are."""
    return Path(os.environ.get(FOLDER, "/opt/baked/triton"))


def log() -> Path:
    """Where compilations are written down."""
    return Path(os.environ.get(LOG, "/tmp/sm120_kernels/compiled"))


class BakedCache(FileCacheManager):
    """Looks a kernel up among the baked ones, then in Triton's own folder, and writes down what is in neither."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        self._baked = None if override or dump else folder() / key

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Files of a compiled kernel by name, None if there is none.

        Args:
            filename: of its description.
        """
        if self._baked and (self._baked / filename).is_file():
            return {path.name: str(path) for path in sorted(self._baked.iterdir())}
        found = super().get_group(filename)
        if found is None and self._baked:
            # Triton compiles now, partly in the process itself: nothing else shows that it is at work.
            _append(log().with_suffix(BEGUN), f"{time.monotonic():.0f} {self.key}")
        return found

    def get_file(self, filename: str) -> str | None:
        """Path of a single file, None if there is none."""
        # By name: its key has the folder of the driver's library in it, which differs from host to host.
        if self._baked and (launcher := folder() / LAUNCHER / filename).is_file():
            return str(launcher)
        return super().get_file(filename)

    def put(self, data: bytes | str, filename: str, binary: bool = True) -> str:
        """Write one file; a shared library is one compilation."""
        if self._baked and filename.endswith(".so"):
            _append(log(), f"library {filename} {self.key}")
        return super().put(data, filename, binary)

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Write down which files belong to a kernel, the last step of its compilation."""
        if self._baked:
            _append(log(), f"kernel {filename.removesuffix('.json')} {self.key}")
        return super().put_group(filename, group)


def _append(path: Path, line: str) -> None:
    # A full or missing disk is no reason to stop an engine. One short write: processes do not mix their lines.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
