"""Health probe of a container: `python -m engine_runtime.health engine|router`, exit code 0 when it can serve.

An engine is healthy when it answers a one-token generation (SGLang's `/health`; skipped by SGLang while it is busy
with requests), or does not for a compilation, and the driver shows exactly the GPUs that the role should have: a
container can lose them after a reload of systemd and keep its processes. The router is healthy when it has a healthy
worker of each kind.
"""

import importlib
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from engine_runtime import jit

PATHS = {"engine": "/health", "router": "/readiness"}
PORT = 30000
TIMEOUT_SECONDS = 15.0


def check(
    role: str,
    expected_gpus: int,
    fetch: Callable[[str], int],
    count_gpus: Callable[[], int],
    compiles: Callable[[], bool],
) -> str | None:
    """What is wrong with this container, or None.

    Args:
        role: A key of PATHS.
        expected_gpus: How many GPUs the driver must show; 0 asks nothing.
        fetch: Path → HTTP status of the server in this container; raises OSError when there is none.
        count_gpus: The number of GPUs the driver shows; raises OSError when it cannot tell.
        compiles: Whether an engine that has served is compiling.
    """
    if expected_gpus:
        try:
            seen = count_gpus()
        except OSError as error:
            return f"the NVIDIA driver does not answer in this container: {error}"
        if seen != expected_gpus:
            return f"the driver shows {seen} GPUs, this role needs {expected_gpus}"
    try:
        status = fetch(PATHS[role])
    except OSError as error:
        fault = f"no answer on port {PORT}: {error}"
    else:
        fault = None if status == 200 else f"{PATHS[role]} answered {status}"
    return fault if fault and not compiles() else None


def fetch_local(path: str) -> int:
    """HTTP status of `path` on this container's own server."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=TIMEOUT_SECONDS) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


def count_gpus() -> int:
    """Number of GPUs that NVML sees in this container."""
    # Here, because a machine without a driver need not have it.
    pynvml: Any = importlib.import_module("pynvml")
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError as error:
        raise OSError(str(error)) from error


def compiles() -> bool:
    """Whether a compiler is at work in this container after its engine has been ready once."""
    return jit.REPORT.exists() and bool(jit.running())


def main() -> None:
    """Run the probe; `docker inspect` shows what it prints."""
    if len(sys.argv) != 2 or sys.argv[1] not in PATHS:
        sys.exit(f"usage: python -m engine_runtime.health {'|'.join(PATHS)}")
    fault = check(sys.argv[1], int(os.environ.get("EXPECTED_GPUS", "0")), fetch_local, count_gpus, compiles)
    if fault:
        sys.exit(fault)


if __name__ == "__main__":
    main()
