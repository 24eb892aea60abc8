"""Builds the engine image, or finds it already there."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from python_on_whales import DockerClient
from python_on_whales.exceptions import DockerException, NoSuchImage

from deploy.errors import DeployError
from deploy.fetch import cache_folder
from deploy.host.errors import HostError
from deploy.image.inputs import IMAGE_NAME, SOURCE_DATE_EPOCH, ImageInputs, read_inputs
from deploy.image.packages import fetch_packages, write_bootstrap
from deploy.image.progress import BuildEvent, BuildProgress, read_objects
from deploy.lock.debian import LockedPackage, find_mirrors, read_rootfs_lock

GIGABYTE = 10**9
IMAGE_BYTES = 13 * GIGABYTE  # 11.3 GB used at the most while the image was built, and 11.3 GB after it
KEPT_WHEELS_BYTES = 11 * GIGABYTE  # uv keeps them unpacked
TOP_LAYERS_BYTES = 1 * GIGABYTE
CACHE_BYTES = 0.4 * GIGABYTE  # packages 106 MB, what is unpacked from them 88 MB
BUILDX_VERSION = (0, 13)  # the first with --progress=rawjson
ENVIRONMENT_LABEL = "deepseek-v4-flash-sm120.environment"
LAST_LINES = 30
CANCEL_SECONDS = 30
FREE_DISK = (
    f"free some: `docker system df` shows what Docker holds; `docker image rm {IMAGE_NAME}:TAG` and "
    "`docker builder prune` give it back"
)


@dataclass(frozen=True)
class ImageReference:
    """An image in the local Docker engine.

    Attributes:
        tag: `deepseek-v4-flash-sm120:<input hash>`.
        id: `sha256:…`; the same inputs give the same on every host with the same kind of image store.
        size_bytes: as Docker counts it, unpacked.
        built: False when the image was already there.
    """

    tag: str
    id: str
    size_bytes: int
    built: bool


def ensure_image(
    repository: Path,
    *,
    progress: Callable[[BuildEvent], None] = lambda event: None,
    docker: DockerClient | None = None,
    mirror: str | None = None,
    security_mirror: str | None = None,
    certificates: Path | None = None,
    package_cache: Path | None = None,
    wheel_cache: bool = False,
    uv: Path | None = None,
    rebuild: bool = False,
    host_network: bool = False,
) -> ImageReference:
    """Return the image that the repository's files decide; build it if this host has not got it.

    Args:
        repository: root of the checkout.
        progress: called from the calling thread with every event.
        docker: which Docker to talk to; the default context if None.
        mirror: Debian archive to fetch locked packages from; the machine's own apt configuration if None.
        security_mirror: the same for the security archive; `<mirror>-security` if None and `mirror` is given.
        certificates: PEM file of the certificate authorities to trust for the Python package index;
            this machine's own (`SSL_CERT_FILE`, else Debian's file) if None.
        package_cache: where fetched .deb files stay; `$XDG_CACHE_HOME/deepseek-v4-flash-sm120/debs` if None.
        wheel_cache: keep downloaded wheels in BuildKit's cache (10 GB, unpacked) for the next build of the engine.
        uv: the uv program that the build uses; `<repository>/.tools/bin/uv` if None.
        rebuild: build even if an image with this tag exists, and use no cached step.
        host_network: steps that fetch use the host's network, for an engine without one of its own.

    Raises:
        HostError: Docker does not answer or lacks buildx, or the disk is too small.
        DeployError: a package is gone or altered, a patch does not apply, or a step of the build failed (with its
            last lines).
        KeyboardInterrupt: passed on after the build has been cancelled; no image is tagged.
    """
    docker = docker or DockerClient()
    inputs = read_inputs(repository)
    if not rebuild and (found := find_image(inputs.tag, docker)):
        return found
    uv = uv or repository / ".tools/bin/uv"
    cache = package_cache or cache_folder("debs")
    certificates = certificates or default_certificates()
    with one_build_at_a_time(cache, progress) as directory:
        if not rebuild and (found := find_image(inputs.tag, docker)):
            return found
        check_docker(docker)
        check_disk(docker, inputs, cache, wheel_cache, rebuild, progress)
        check_uv(uv, inputs.uv_version)
        step, begun = "fetch Debian packages", time.monotonic()
        progress(BuildEvent("packages", step, "started"))
        files = fetch_packages(
            inputs.packages,
            lambda: find_mirrors(read_rootfs_lock(repository).suite, mirror, security_mirror),
            cache,
            lambda done, total: progress(BuildEvent("packages", step, "progress", "", done, total)),
        )
        progress(BuildEvent("packages", step, "finished", seconds=time.monotonic() - begun))
        context, debs = directory / "context", directory / "debs"
        write_context(context, inputs, uv)
        os.link(bootstrap(cache, files), context / "bootstrap.tar")
        link_packages(debs, files)
        command = [*cast("list[str]", docker.client_config.docker_cmd), "buildx", "build"]
        command += build_arguments(inputs, context, debs, certificates, wheel_cache, rebuild, host_network)
        run_build(command, progress)
    image = find_image(inputs.tag, docker)
    if image is None:
        raise DeployError(
            "the build left no image behind",
            f"buildx reported success, but Docker has no {inputs.tag}; its builder may not be the Docker engine's own",
            "docker buildx use default",
        )
    return replace(image, built=True)


@contextmanager
def one_build_at_a_time(cache: Path, progress: Callable[[BuildEvent], None]) -> Generator[Path]:
    """An empty folder for one build's files, on the cache's file system so that packages are linked, not copied.

    A second build waits here and then finds the first one's image. Whatever a killed build left is removed.
    """
    cache.mkdir(parents=True, exist_ok=True)
    directory = cache / "build"
    with (cache / "build.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(BuildEvent("packages", "wait for another build on this host", "started"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            progress(BuildEvent("packages", "wait for another build on this host", "finished"))
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def default_certificates() -> Path | None:
    """The certificate authorities that this machine trusts, if they are one file."""
    candidates = [os.environ.get("SSL_CERT_FILE"), "/etc/ssl/certs/ca-certificates.crt"]
    return next((Path(name) for name in candidates if name and Path(name).is_file()), None)


def find_image(tag: str, docker: DockerClient) -> ImageReference | None:
    """Look an image up in the local Docker engine.

    Raises:
        HostError: Docker does not answer.
    """
    try:
        image = docker.image.inspect(tag)
    except NoSuchImage:
        return None
    except DockerException as error:
        raise _no_docker(error) from error
    return ImageReference(tag, image.id, image.size, built=False)


def check_docker(docker: DockerClient) -> None:
    """Make sure that the build can be started and followed.

    Raises:
        HostError: buildx is missing or too old.
    """
    wanted = ".".join(str(number) for number in BUILDX_VERSION)
    fix = f"install buildx {wanted} or newer: docker-buildx on Debian and Ubuntu, docker-buildx-plugin from Docker"
    if not docker.buildx.is_installed():
        raise HostError("Docker cannot build", "the buildx plug-in is not installed", fix)
    answer = docker.buildx.version()
    match = re.search(r"\bv?(\d+)\.(\d+)\.\d+", answer)
    if match and (int(match[1]), int(match[2])) < BUILDX_VERSION:
        raise HostError("Docker's buildx is too old", f"it says {answer.strip()!r}", fix)


def check_disk(
    docker: DockerClient,
    inputs: ImageInputs,
    cache: Path,
    wheel_cache: bool,
    rebuild: bool,
    progress: Callable[[BuildEvent], None] = lambda event: None,
) -> None:
    """Say how much disk the image needs and make sure that it fits, before the download and not after it.

    Raises:
        HostError: it does not.
    """
    image = IMAGE_BYTES + (KEPT_WHEELS_BYTES if wheel_cache else 0)
    label = f"{ENVIRONMENT_LABEL}={inputs.environment_hash[:16]}"
    if not rebuild and docker.image.list(filters={"label": label}):
        image = TOP_LAYERS_BYTES
    root = Path(docker.system.info().docker_root_dir or "/var/lib/docker")
    places = [(cache, "this project keeps its packages", CACHE_BYTES)]
    if root.is_dir():  # else the engine is on another host
        places.append((root, "Docker keeps its data", image))
    for place, use, needed in places:
        free = require_room("building", place, use, needed)
        room = f"needs {needed / GIGABYTE:.1f} GB in {place}, {free / GIGABYTE:.1f} GB are free"
        progress(BuildEvent("packages", room, "finished"))


def require_room(doing: str, place: Path, use: str, needed: float) -> int:
    """Make sure that a file system has room for what is about to be written, and return the bytes that are free.

    Raises:
        HostError: it has not.
    """
    free = shutil.disk_usage(place).free
    if free < needed:
        raise HostError(
            "the disk is too small for the image",
            f"{doing} needs {needed / GIGABYTE:.1f} GB where {use} ({place}); {free / GIGABYTE:.1f} GB are free",
            FREE_DISK,
        )
    return free


def check_uv(uv: Path, version: str) -> None:
    """Make sure that uv is the pinned one, since it signs what it installs.

    Raises:
        DeployError: it is missing or another version.
    """
    fix = "make .tools/bin/uv"
    try:
        answer = subprocess.run([uv, "--version"], capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise DeployError("uv does not run", f"{uv}: {error}", fix) from error
    if answer[1:2] != [version]:
        raise DeployError("uv is not the pinned version", f"{uv} is {' '.join(answer)}, pinned is {version}", fix)


def write_context(context: Path, inputs: ImageInputs, uv: Path) -> None:
    """Write the inputs as the folder that the Dockerfile sees, with modes that no umask has a say in."""
    for name, content in inputs.files.items():
        path = context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for path in context.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    # With its time: BuildKit does not transfer again what it has with the same time and size.
    shutil.copy2(uv, context / "tools/uv")
    (context / "tools/uv").chmod(0o755)


def bootstrap(cache: Path, files: Mapping[LockedPackage, Path]) -> Path:
    """The essential packages unpacked into one tar, made once for each set of them and kept in the cache."""
    essential = [package for package in files if package.essential]
    digest = hashlib.sha256("".join(sorted(package.sha256 for package in essential)).encode()).hexdigest()
    path = cache / f"bootstrap-{digest[:16]}.tar"
    if not path.exists():
        for old in cache.glob("bootstrap-*"):
            old.unlink()
        partial = path.with_suffix(".part")
        write_bootstrap([files[package] for package in essential], partial)
        partial.replace(path)
    return path


def link_packages(debs: Path, files: Mapping[LockedPackage, Path]) -> None:
    """Lay the packages out as rootfs.sh wants them: `essential/`, `other/` and the list of what must come out."""
    for folder in ("essential", "other"):
        (debs / folder).mkdir(parents=True)
    for package, path in files.items():
        os.link(path, debs / ("essential" if package.essential else "other") / f"{package.name}.deb")
    expected = sorted(f"{package.name} {package.version} {package.architecture}\n" for package in files)
    (debs / "expected").write_text("".join(expected), encoding="utf-8")


def build_arguments(
    inputs: ImageInputs,
    context: Path,
    debs: Path,
    certificates: Path | None,
    wheel_cache: bool,
    rebuild: bool,
    host_network: bool = False,
) -> list[str]:
    """Arguments of `docker buildx build` that build and tag the image."""
    command = ["--progress=rawjson", f"--tag={inputs.tag}", "--provenance=false"]
    command += [f"--build-context=debs={debs}", f"--build-arg=SOURCE_DATE_EPOCH={SOURCE_DATE_EPOCH}"]
    command += [f"--build-arg=INPUT_HASH={inputs.hash[:16]}"]
    command += [f"--build-arg=ENVIRONMENT_HASH={inputs.environment_hash[:16]}"]
    if wheel_cache:
        # A secret, since arguments would become part of the image; its content does not matter.
        command.append(f"--secret=id=keep_wheels,src={context / 'Dockerfile'}")
    if certificates:
        command.append(f"--secret=id=ca,src={certificates}")
    if rebuild:
        command.append("--no-cache")
    if host_network:
        command.append("--network=host")
    return [*command, str(context)]


def run_build(command: Sequence[str], progress: Callable[[BuildEvent], None]) -> None:
    """Run the build and pass its progress on; cancel it when interrupted.

    python-on-whales gives no handle to stop a build that it has started, hence the process of our own.

    Raises:
        DeployError: the build failed.
    """
    following = BuildProgress()
    last_lines: deque[str] = deque(maxlen=LAST_LINES)
    # In a session of its own: Ctrl-C reaches us first, and we stop it.
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for item in read_objects(process.stdout):
                if isinstance(item, str):
                    last_lines.append(item)
                    continue
                for event in following.events(item):
                    if event.state == "log":
                        last_lines.append(event.message)
                    progress(event)
        except BaseException:
            process.terminate()
            process.stdout.close()  # or it might wait for us to read on
            try:
                process.wait(CANCEL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if process.returncode == 0:
        return
    why = "\n    ".join(
        [f"step '{following.failure.step}' failed" if following.failure else "buildx failed", *last_lines]
    )
    if "no space left on device" in why:
        raise HostError("the disk filled up while the image was built", why, FREE_DISK)
    raise DeployError(
        "the image could not be built", why, "mend what the last lines say and run it again; finished steps are kept"
    )


def _no_docker(error: DockerException) -> HostError:
    return HostError(
        "Docker does not answer",
        (error.stderr or str(error)).strip(),
        "start it: `systemctl start docker`, or `dockerd` by hand; `docker version` shows whether it runs",
    )
