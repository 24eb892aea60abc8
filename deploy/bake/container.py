"""Moves the engines' cache, a Docker volume, to and from a file, through a container of the engine's own image."""

import json
import subprocess
import uuid
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import zstandard
from python_on_whales import DockerClient
from python_on_whales.exceptions import DockerException

from deploy.errors import DeployError
from deploy.stack.compose import Stack

CACHE, VOLUME = "/var/cache/engine", "jit-cache"
CHUNK_BYTES = 1 << 20
COMPRESSION_LEVEL = 9
_LABEL = "com.docker.compose"

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Packed:
    """A cache in a file.

    Attributes:
        files: how many there are.
        size: bytes unpacked.
    """

    files: int
    size: int


def volume_name(stack: Stack) -> str:
    """What Docker calls the stack's cache."""
    return f"{stack.project}_{VOLUME}"


def volume_made(stack: Stack) -> str:
    """When the stack's cache was made, empty if there is none."""
    try:
        return str(DockerClient().volume.inspect(volume_name(stack)).created_at)
    except DockerException:
        return ""


def make_volume(stack: Stack) -> None:
    """Make the stack's cache as Compose would, unless it is there."""
    if not volume_made(stack):
        labels = {f"{_LABEL}.project": stack.project, f"{_LABEL}.volume": VOLUME}
        DockerClient().volume.create(volume_name(stack), labels=labels)


def pack(stack: Stack, image: str, target: Path, progress: Progress = lambda done, total: None) -> Packed:
    """Write what the engines compiled into a file, compressed. They may run meanwhile.

    Args:
        image: the engine's, by name or id.
        progress: called with bytes done and in all, unpacked.

    Raises:
        DeployError: the container fails.
    """
    with _container(stack, image, "count", writable=False) as counting:
        answer = cast("IO[bytes]", counting.stdout).read()
    found: Any = json.loads(answer)
    done = 0
    packer = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, threads=-1).compressobj()
    with target.open("wb") as file, _container(stack, image, "pack", writable=False) as packing:
        source = cast("IO[bytes]", packing.stdout)
        while chunk := source.read(CHUNK_BYTES):
            file.write(packer.compress(chunk))
            done += len(chunk)
            progress(min(done, found["bytes"]), found["bytes"])
        file.write(packer.flush())
    return Packed(found["files"], found["bytes"])


def unpack(stack: Stack, image: str, source: Path, progress: Progress = lambda done, total: None) -> int:
    """Put the files of a packed cache into the stack's, where they are missing. Returns how many came.

    Args:
        progress: called with bytes done and in all, compressed.

    Raises:
        DeployError: the file is damaged or the container fails; what was there stays as it was.
    """
    make_volume(stack)
    total, done = source.stat().st_size, 0
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    with source.open("rb") as file, _container(stack, image, "unpack", writable=True) as unpacking:
        target = cast("IO[bytes]", unpacking.stdin)
        # If it gives up, what it says tells why.
        with suppress(BrokenPipeError):
            try:
                while chunk := file.read(CHUNK_BYTES):
                    target.write(unpacker.decompress(chunk))
                    done += len(chunk)
                    progress(done, total)
            except zstandard.ZstdError as error:
                raise _failed("unpack", f"{source} is no packed cache: {error}") from error
        with suppress(BrokenPipeError):
            target.close()
        answer = cast("IO[bytes]", unpacking.stdout).read()
    return int(json.loads(answer)["files"])


@contextmanager
def _container(stack: Stack, image: str, verb: str, *, writable: bool) -> Generator[subprocess.Popen[bytes]]:
    """`python -m engine_runtime.caches VERB` beside the cache and nothing else; gone when the block ends."""
    name = f"{stack.project}-caches-{uuid.uuid4().hex[:8]}"
    mount = f"{volume_name(stack)}:{CACHE}" + ("" if writable else ":ro")
    command = [*cast("list[str]", DockerClient().client_config.docker_cmd), "run", "--rm", "--interactive"]
    command += ["--name", name, "--network", "none", "--read-only", "--cap-drop", "ALL"]
    command += ["--security-opt", "no-new-privileges:true", "--user", "65532:65532", "--volume", mount]
    command += ["--entrypoint", "tini", image, "--", "python", "-m", "engine_runtime.caches", verb]
    # In a session of its own: Ctrl-C reaches us first, and we end it.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        if not writable:
            cast("IO[bytes]", process.stdin).close()
        try:
            yield process
        except BaseException:
            process.kill()
            with suppress(DockerException):
                DockerClient().container.remove(name, force=True)
            raise
        said = cast("IO[bytes]", process.stderr).read().decode(errors="replace").strip().splitlines()
    if process.returncode:
        raise _failed(verb, said[-1] if said else f"the container ended with {process.returncode}")


def _failed(verb: str, why: str) -> DeployError:
    return DeployError(f"the engines' cache could not be {verb}ed", why, "docker info; then run the same command again")
