"""Looks at a container from inside; `verify` runs it there with nothing but the standard library.

Usage: python -I - PORT < inside.py      PORT 0: there is no server to ask

Prints JSON: `files` (sha256 by path of each tree), `report` (what the engine says it was started with), `hooks` (the
functions of SGLang that the plug-in says it replaced), `compiled` (what had to be compiled, by compiler).
"""

import hashlib
import json
import os
import sys
import sysconfig
import urllib.request
from pathlib import Path
from typing import Any

SITE_PACKAGES = sysconfig.get_path("purelib")
TREES = {
    "sglang": f"{SITE_PACKAGES}/sglang",
    "sm120_kernels": f"{SITE_PACKAGES}/sm120_kernels",
    "engine_runtime": f"{SITE_PACKAGES}/engine_runtime",
    "cpu_standins": "/opt/cpu_standins",
}
# Written by the kernels' plug-in once its hooks are in place.
HOOKS = Path("/tmp/sm120_kernels/hooks.json")
# Written by the engine's entry point once it serves.
COMPILED = Path("/tmp/engine_runtime/jit.json")


def hashes(root: str) -> dict[str, str]:
    """sha256 of each file below a folder, bytecode left out."""
    found: dict[str, str] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = f"{folder}/{name}"
            with open(path, "rb") as file:  # noqa: PTH123 thousands of them: pathlib takes as long again
                found[path.removeprefix(f"{root}/")] = hashlib.sha256(file.read()).hexdigest()
    return found


def report(port: int) -> tuple[Any, str]:
    """The engine's own account of its arguments, or why there is none."""
    try:
        # Straight to this container's own server, whatever proxy the environment names.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://127.0.0.1:{port}/server_info", timeout=10) as answer:
            return json.load(answer), ""
    except (OSError, ValueError) as error:
        return None, str(error)


def written(path: Path, absent: Any) -> Any:
    """What a process of this container has written down."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return absent


def main() -> None:
    """Print all of it."""
    port = int(sys.argv[1])
    told, silence = report(port) if port else (None, "")
    files = {name: hashes(root) for name, root in TREES.items()}
    noted = {"hooks": written(HOOKS, []), "compiled": written(COMPILED, None)}
    json.dump({"files": files, "report": told, "silence": silence, **noted}, sys.stdout)


if __name__ == "__main__":
    main()
