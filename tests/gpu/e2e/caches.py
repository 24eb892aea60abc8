"""What `deploy bake` and a later `deploy up` do with the engines' cache, on a machine without Docker.

Usage: caches.py bake       packs the cache and pushes it
       caches.py restore    fetches it into an empty folder, which takes the cache's place

The code is the controller's own and the registry a real one (Debian's docker-registry, in E2E_HOME). Only Docker is
missing: where the controller starts a container beside the cache's volume, the same program of the image runs here, on
the same folder. Results are JSON files in E2E_HOME.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import httpx
from engine_runtime import caches

from deploy.bake import artifact, container
from deploy.image.registry import Client, Descriptor, Manifest, parse_registry
from deploy.lock.model import ImageLock
from deploy.stack.state import State

HOME = Path(os.environ.get("E2E_HOME", "/tmp/gpu-e2e"))
PORT, GPU = 31500, "sm_90"
PROJECT = "e2e"
FACTS = HOME / "baked.json"


@contextmanager
def beside_the_cache(project: str, image: str, verb: str, *, writable: bool) -> Generator[subprocess.Popen[bytes]]:
    """In the place of a container."""
    command = [sys.executable, "-m", "engine_runtime.caches", verb]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        if not writable:
            process.stdin.close()
        yield process
    if process.returncode:
        sys.exit(f"engine_runtime.caches {verb} ended with {process.returncode}")


@contextmanager
def registry() -> Generator[Client]:
    """The registry while the block runs; what it holds stays."""
    configuration = HOME / "registry.yml"
    configuration.write_text(
        "version: 0.1\nlog: {level: error}\n"
        f"storage: {{filesystem: {{rootdirectory: {HOME / 'registry'}}}}}\nhttp: {{addr: '127.0.0.1:{PORT}'}}\n"
    )
    with (HOME / "registry.log").open("w") as log:
        process = subprocess.Popen([HOME / "docker-registry", "serve", configuration], stdout=log, stderr=log)
    try:
        for _ in range(200):
            try:
                httpx.get(f"http://127.0.0.1:{PORT}/v2/")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        with Client(parse_registry(f"127.0.0.1:{PORT}")) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


def bake() -> dict[str, object]:
    with registry() as client:
        # In the place of the image that the cache lies beside.
        nothing = Descriptor("sha256:" + "0" * 64, 0, "")
        image = client.put_artifact("image", "text/plain", b"image", Manifest(nothing.digest, b"", "", nothing, ()))
        lock = ImageLock(inputs="e2e" * 20 + "0000", environment="0" * 64, manifest=image.digest)
        begun = time.monotonic()
        baked = artifact.bake(PROJECT, lock, "image", GPU, client, lambda done, total: None)
    FACTS.write_text(artifact.with_cache(lock, baked.cache).model_dump_json())
    return {
        "files": baked.packed.files,
        "bytes": baked.packed.size,
        "compressed": baked.cache.size,
        "reference": baked.reference,
        "seconds": round(time.monotonic() - begun, 1),
    }


def restore() -> dict[str, object]:
    caches.CACHE.rename(caches.CACHE.with_name(f"engine-before-{time.time_ns()}"))
    caches.CACHE.mkdir()
    lock = ImageLock.model_validate_json(FACTS.read_text())
    begun = time.monotonic()
    with registry() as client:
        said = artifact.restore(PROJECT, lock, "image", GPU, client, State(HOME / "state"))
    return {"said": said, "seconds": round(time.monotonic() - begun, 1), **caches.count(caches.CACHE)}


def main() -> None:
    os.environ["XDG_CACHE_HOME"] = str(HOME / "fetched")
    with (
        mock.patch.object(container, "_container", beside_the_cache),
        mock.patch.object(container, "volume_made", lambda project: str(caches.CACHE.stat().st_ino)),
        mock.patch.object(container, "make_volume", lambda project: None),
    ):
        result = {"bake": bake, "restore": restore}[sys.argv[1]]()
    print(f"caches {sys.argv[1]}", json.dumps(result), flush=True)
    (HOME / f"caches-{sys.argv[1]}.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
