"""Runs functions of the installed SGLang on the CPU with stand-in inputs.

In the image that SGLang is the patched one. Elsewhere `SGLANG_OVERLAY` names a folder whose `sglang/…` files take the
place of the installed ones, for example what `deploy patches edit PATCH FOLDER` wrote. With the published wheels and no
overlay every test of a patch here fails but those whose name starts with `test_unchanged`.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType


class Overlay(importlib.abc.MetaPathFinder):
    """Finds modules in the overlay before anywhere else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        file = self.folder / (fullname.replace(".", "/") + ".py")
        return importlib.util.spec_from_file_location(fullname, file) if file.is_file() else None


if os.environ.get("SGLANG_OVERLAY"):
    sys.meta_path.insert(0, Overlay(Path(os.environ["SGLANG_OVERLAY"])))
