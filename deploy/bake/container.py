"""Moves the engines' cache, a Docker volume, to and from a file, through a container of the engine's own image."""

import json
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import zstandard
from python_on_whales import DockerClient
from python_on_whales.exceptions import DockerException

from deploy.errors import DeployError

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


def volume_name(project: str) -> str:
    """What Docker calls the project's cache."""
    return f"{project}_{VOLUME}"


def volume_made(project: str) -> str:
    """When the project's cache was made, empty if there is none."""
    try:
        return str(DockerClient().volume.inspect(volume_name(project)).created_at)
    except DockerException:
        return ""


def make_volume(project: str) -> None:
    """Make the project's cache as Compose would, unless it is there."""
    if not volume_made(project):
        labels = {f"{_LABEL}.project": project, f"{_LABEL}.volume": VOLUME}
        DockerClient().volume.create(volume_name(project), labels=labels)


def pack(project: str, image: str, target: Path, progress: Progress = lambda done, total: None) -> Packed:
    """Write what the engines compiled into a file, compressed. They may run meanwhile.

    Args:
        image: the engine's, by name or id.
        progress: called with bytes done and in all, unpacked.

    Raises:
        DeployError: the container fails.
    """
    with _container(project, image, "count", writable=False) as counting:
        answer = cast("IO[bytes]", counting.stdout).read()
    found: Any = json.loads(answer)
    done = 0
    packer = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, threads=-1).compressobj()
    with target.open("wb") as file, _container(project, image, "pack", writable=False) as packing:
        source = cast("IO[bytes]", packing.stdout)
        while chunk := source.read(CHUNK_BYTES):
            file.write(packer.compress(chunk))
            done += len(chunk)
            progress(min(done, found["bytes"]), found["bytes"])
        file.write(packer.flush())
    return Packed(found["files"], found["bytes"])


def unpack(project: str, image: str, source: Path, progress: Progress = lambda done, total: None) -> int:
    """Put the files of a packed cache into the stack's, where they are missing. Returns how many came.

    Args:
        progress: called with bytes done and in all, compressed.

    Raises:
        DeployError: the file is damaged or the container fails; what was there stays as it was.
    """
    make_volume(project)
    total, done = source.stat().st_size, 0
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    with source.open("rb") as file, _container(project, image, "unpack", writable=True) as unpacking:
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


def remove_volume(project: str) -> None:
    """Remove the project's cache."""
    with suppress(DockerException):
        DockerClient().volume.remove(volume_name(project))


def compile_modules(
    project: str,
    image: str,
    names: Sequence[str],
    jobs: int,
    said: Callable[[str], None],
    complaints: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Run `compile_modules.py` beside the project's cache. What was compiled when it is stopped is there the next time.

    Args:
        image: the engine's, by name or id.
        names: of modules; all if empty.
        jobs: compilers at a time.
        said: called with each line that it or ninja prints.
        complaints: of what was said, the lines that tell why it failed.

    Raises:
        DeployError: a compiler fails, or the container does.
    """
    make_volume(project)
    scripts = [Path(__file__).with_name("compile_modules.py"), Path(__file__).parents[1] / "image/bake_modules.py"]
    mounts = [word for path in scripts for word in ("--volume", f"{path}:/modules/{path.name}:ro")]
    # exec: some compilers run what they have made.
    mounts += ["--tmpfs", "/tmp:mode=1777,exec", "--env", f"MAX_JOBS={jobs}"]
    program = ["python", "-W", "ignore", "/modules/compile_modules.py", *names]
    try:
        with _container(project, image, "compile", program, writable=True, options=mounts) as compiling:
            cast("IO[bytes]", compiling.stdin).close()
            for line in cast("IO[bytes]", compiling.stdout):
                said(line.decode(errors="replace").rstrip())
    except DeployError as error:
        why = "\n".join(complaints()[:3]) or error.why
        fix = "deploy bake modules --jobs 1; what is compiled stays"
        raise DeployError("a module could not be compiled", why, fix) from error


@contextmanager
def _container(
    project: str,
    image: str,
    verb: str,
    program: Sequence[str] = (),
    *,
    writable: bool,
    options: Sequence[str] = (),
) -> Generator[subprocess.Popen[bytes]]:
    """A program beside the cache and nothing else, gone when the block ends: `python -m engine_runtime.caches VERB`."""
    name = f"{project}-caches-{uuid.uuid4().hex[:8]}"
    mount = f"{volume_name(project)}:{CACHE}" + ("" if writable else ":ro")
    command = [*cast("list[str]", DockerClient().client_config.docker_cmd), "run", "--rm", "--interactive"]
    command += ["--name", name, "--network", "none", "--read-only", "--cap-drop", "ALL"]
    command += ["--security-opt", "no-new-privileges:true", "--user", "65532:65532", "--volume", mount, *options]
    command += ["--entrypoint", "tini", image, "--", *(program or ("python", "-m", "engine_runtime.caches", verb))]
    # In a session of its own: Ctrl-C reaches us first, and we end it.
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, start_new_session=True
        ) as process,
    ):
        if not writable:
            cast("IO[bytes]", process.stdin).close()
        try:
            yield process
        except BaseException:
            process.kill()
            with suppress(DockerException):
                DockerClient().container.remove(name, force=True)
            raise
        process.wait()
        complaints.seek(0)
        said = complaints.read().decode(errors="replace").strip().splitlines()
    if process.returncode:
        raise _failed(verb, said[-1] if said else f"the container ended with {process.returncode}")


def _failed(verb: str, why: str) -> DeployError:
    return DeployError(
        f"the engines' cache could not be {verb.removesuffix('e')}ed",
        why,
        "docker info; then run the same command again",
    )
