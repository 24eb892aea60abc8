"""Times a hook's op alone on one GPU of an engine, ours against upstream's: seconds, where an engine takes minutes."""

import json
import math
import subprocess
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from python_on_whales import DockerClient
from python_on_whales.exceptions import DockerException

from deploy.spec.model import Spec, cdi_device
from deploy.tune.experiment import Alone

LIMIT_S = 180
"""Most of it is compilation and the import of torch; what takes longer is left to the engine's trial."""
CONTEXT = 8192
MOUNT = "/opt/benchmarks"


def time_alone(root: Path, spec: Spec, image: str, op: str, requests: int) -> Alone:
    """Run the op's benchmark in a container of the engine's image.

    Args:
        requests: decoded together.

    Returns:
        The ratio of the times; a benchmark that fails leaves the question to the engine's trial.
    """
    begun = time.monotonic()
    role = list(spec.roles.values())[-1]
    name = f"dsv4-tune-{uuid.uuid4().hex[:8]}"
    command = [*cast("list[str]", DockerClient().client_config.docker_cmd), "run", "--rm", "--name", name]
    command += ["--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true"]
    command += ["--user", "65532:65532", "--tmpfs", "/tmp:mode=1777,exec", "--device", cdi_device(role.gpus[0])]
    command += ["--volume", f"{root / 'kernels/benchmarks'}:{MOUNT}/benchmarks:ro", "--env", f"PYTHONPATH={MOUNT}"]
    command += ["--env", "HOME=/tmp", "--env", "TRITON_CACHE_DIR=/tmp/triton", "--env", "SGLANG_CACHE_DIR=/tmp/sglang"]
    command += ["--entrypoint", "tini", image, "--", "python", "-m", "benchmarks.alone", op]
    command += ["--requests", str(requests), "--context", str(CONTEXT), "--ranks", str(spec.gpus_per_engine)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, start_new_session=True)
        ratio, detail = (None, _last(done.stderr)) if done.returncode else read(done.stdout)
    except subprocess.TimeoutExpired:
        ratio, detail = None, [f"not done within {LIMIT_S} s"]
    finally:
        with suppress(DockerException):
            DockerClient().container.remove(name, force=True)
    return Alone(op=op, ratio=ratio, detail=detail, seconds=time.monotonic() - begun)


def read(text: str) -> tuple[float | None, list[str]]:
    """What the benchmark printed: upstream's time over ours, the geometric mean over shapes, and a line a shape.

    A shape that either did not run at counts for neither.
    """
    try:
        rows: Sequence[dict[str, Any]] = json.loads(text)["rows"]
        logs: list[float] = []
        detail: list[str] = []
        for row in rows:
            shape = " ".join(f"{name}={value}" for name, value in row["shape"].items())
            if row["ours"] and row["upstream"]:
                logs.append(math.log(row["upstream"] / row["ours"]))
                detail.append(f"{shape}: {row['ours']:.1f} us, upstream's {row['upstream']:.1f} us")
            else:
                detail.append(f"{shape}: {row['note'] or 'not timed'}")
    except (ValueError, KeyError, TypeError):
        return None, ["the benchmark printed no result"]
    if not rows:
        return None, ["upstream's function does not run without an engine"]
    return (math.exp(sum(logs) / len(logs)) if logs else None), detail


def _last(text: str) -> list[str]:
    return [line for line in text.strip().splitlines() if line.strip()][-1:] or ["it said nothing"]
