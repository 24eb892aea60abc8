"""Brings deploy.lock in line with what it locks.

Most of it follows from the repository's own files and is derived anew each time. Four parts do not, and stay as they
are until something they depend on has changed or they are asked for: `rootfs` (apt chooses), `engine` (SGLang's wheel
is read), `model` (its files are read) and what came out of the image's build.
"""

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from sm120_kernels.plugin.table import HOOKS

from deploy.errors import DeployError
from deploy.host.docker_facts import MINIMUM_COMPOSE, MINIMUM_ENGINE
from deploy.host.gpus import MINIMUM_DRIVER
from deploy.image.inputs import IMAGE_NAME, ImageInputs, parse_uv_version, read_inputs
from deploy.lock.debian import (
    DEBIAN_KEYRING,
    REQUEST_FILE,
    LockedPackage,
    RootfsLock,
    disagreements,
    find_mirrors,
    read_request,
    resolve,
)
from deploy.lock.diff import Change, diff
from deploy.lock.document import FILE_NAME
from deploy.lock.engine import PACKAGE, lock_engine, locked_patches
from deploy.lock.model import (
    EngineLock,
    HostLock,
    ImageLock,
    KernelsLock,
    Lock,
    LockedHook,
    LockedRole,
    ModelLock,
    Part,
    PythonLock,
    RuntimeLock,
    TunedLock,
    dump,
    read_lock,
    write_lock,
)
from deploy.lock.tree import content_hashes, tree_hash
from deploy.lock.wheels import Target, group_disagreements, installed_wheels
from deploy.model.hashing import folder_files, lock_folder
from deploy.spec.load import SpecFile
from deploy.spec.profiles import COMPOSE_FILES, Profile
from deploy.spec.signoff import stale
from deploy.stack.preview import preview_without_host
from deploy.stack.roles import locked_roles

# Which package brings the interpreter and which the C library; their versions decide which wheels fit.
INTERPRETER, C_LIBRARY = re.compile(r"python3\.\d+-minimal"), re.compile("libc6")

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Disagreement:
    """Something in which deploy.lock is not what the repository and deploy.toml say."""

    part: str
    what: str
    fix: str


@dataclass(frozen=True)
class Update:
    """What `update_lock` did.

    Attributes:
        changes: from the old lock to the new.
        unresolved: what could not be locked here, and how to do it.
    """

    lock: Lock
    changes: tuple[Change, ...]
    unresolved: tuple[Disagreement, ...]


@dataclass(frozen=True)
class Sources:
    """Where `update_lock` may look.

    Attributes:
        mirror: Debian archive; the machine's own if None. `security_mirror` likewise.
        keyring: the keys that its release files must be signed with.
        certificates: authorities to trust for the Python package index.
        cache: folder of fetched wheels.
    """

    mirror: str | None = None
    security_mirror: str | None = None
    keyring: Path = DEBIAN_KEYRING
    certificates: Path | None = None
    cache: Path | None = None


def check_lock(root: Path, spec_file: SpecFile) -> list[Disagreement]:
    """List where deploy.lock is behind the repository and deploy.toml. Uses no network and no Docker engine.

    Raises:
        DeployError: an input is missing or damaged.
    """
    locked = read_lock(root)
    derived, unresolved = derive(root, spec_file, locked)
    # An image that must be built anew has no layers yet: the change of its inputs says it all.
    changes = [change for change in diff(locked, derived).changes if change.section != "layer"]
    # Of a profile that is another now, its name says it all.
    gone, new = locked.roles.keys() - derived.roles.keys(), derived.roles.keys() - locked.roles.keys()
    if gone or new:
        what = f"{', '.join(gone) or 'none'} is locked, deploy.toml has {', '.join(new) or 'another'}"
        unresolved.append(Disagreement("profile", what, "deploy lock"))
        changes = [change for change in changes if not change.name.startswith(tuple(f"{name} " for name in gone | new))]
    return unresolved + [Disagreement(change.section, describe(change), "deploy lock") for change in changes]


def update_lock(
    root: Path,
    spec_file: SpecFile,
    parts: Iterable[Part] = (),
    sources: Sources | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Update:
    """Derive what can be derived, resolve what has changed or is asked for, and replace deploy.lock in one step.

    Args:
        root: the checkout.
        spec_file: deploy.toml.
        parts: resolved anew even if nothing says that they must be.
        progress: called with what is read, bytes done and bytes in all.

    Raises:
        DeployError: a part that was asked for cannot be resolved, or an input is damaged; deploy.lock is as it was.
    """
    sources = sources or Sources()
    wanted = set(parts)
    before = read_lock(root) if (root / FILE_NAME).exists() else Lock()
    locked = before
    if "rootfs" in wanted or _rootfs_open(root, locked):
        progress("Debian packages", 0, 0)
        request = read_request(root)
        mirrors = find_mirrors(request.suite, sources.mirror, sources.security_mirror)
        rootfs = resolve(request, mirrors, sources.keyring)
        locked = locked.model_copy(update={"rootfs": rootfs})
    locked, unresolved = derive(root, spec_file, locked)
    stale = {item.part for item in unresolved}
    if wanted & {"engine"} or "engine" in stale:
        locked = locked.model_copy(update={"engine": _engine(root, locked, sources, progress)})
    if wanted & {"model"} or "model" in stale:
        folder = spec_file.file.parent / spec_file.spec.model.path
        if folder.is_dir() or "model" in wanted:
            spec = spec_file.spec.model
            model = lock_folder(
                folder, spec.repo, spec.revision, lambda done, total: progress(str(folder), done, total)
            )
            locked = locked.model_copy(update={"model": model})
    if locked.image and ("image" in wanted or not locked.image.id):
        image, missing = built_image(locked.image)
        if missing and "image" in wanted:
            raise DeployError("the image cannot be locked", missing.what, missing.fix)
        unresolved += [missing] if missing else []
        locked = locked.model_copy(update={"image": image})
    still = derive(root, spec_file, locked)[1] if stale else []
    if dump(locked) != dump(before):
        write_lock(root, locked)
    left = still + [item for item in unresolved if item.part == "image"]
    return Update(locked, diff(before, locked).changes, tuple(left))


def derive(root: Path, spec_file: SpecFile, locked: Lock) -> tuple[Lock, list[Disagreement]]:
    """Derive every part that follows from the repository's files, and say which of the others must be resolved.

    Args:
        locked: gives the parts that are not derived.

    Returns:
        The lock as it should be, as far as it can be known, and what cannot.
    """
    unresolved = _rootfs_open(root, locked)
    rootfs = locked.rootfs
    if rootfs is None:
        return locked, unresolved
    inputs = read_inputs(root, rootfs.package)
    project, uv_lock = ((root / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "uv.lock"))
    wheels = installed_wheels(uv_lock, _target(rootfs))
    for text in group_disagreements(project, uv_lock):
        unresolved.append(Disagreement("wheels", text, ".tools/bin/uv lock"))
    patches = locked_patches(inputs.files)
    engine = locked.engine
    if engine is None or (engine.wheel, engine.patch) != (wheels[PACKAGE].sha256, patches):
        what = "not locked yet" if engine is None else "SGLang's wheel or the patch series has changed"
        unresolved.append(Disagreement("engine", what, "deploy lock"))
    unresolved += _model_open(spec_file, locked)
    unresolved += [
        Disagreement("tuned", what, "deploy tune, or remove [tuned] from deploy.toml") for what in stale(spec_file.spec)
    ]
    with ThreadPoolExecutor() as pool:
        profiles = dict.fromkeys((spec_file.spec.profile, "cpu"))
        roles = {profile: pool.submit(profile_roles, root, spec_file, profile) for profile in profiles}
        tiny = pool.submit(_tiny_model)
        return locked.model_copy(
            update={
                "python": _python(root, rootfs, uv_lock),
                "wheels": {name: wheel.locked for name, wheel in wheels.items()},
                "kernels": KernelsLock(tree=_tree(inputs, "packages/kernels/sm120_kernels"), hook=_hooks()),
                "runtime": RuntimeLock(
                    engine_runtime=_tree(inputs, "packages/engine/engine_runtime"),
                    cpu_standins=_tree(inputs, "packages/engine/cpu_standins"),
                ),
                "tiny_model": tiny.result(),
                "host": HostLock(
                    driver=_dotted(MINIMUM_DRIVER),
                    docker_engine=_dotted(MINIMUM_ENGINE),
                    docker_compose=_dotted(MINIMUM_COMPOSE),
                ),
                "compose": {name: _sha256(root / name) for name in sorted(COMPOSE_FILES)},
                "roles": {profile: future.result() for profile, future in sorted(roles.items())},
                "image": _image(locked.image, inputs),
                "tuned": _tuned(spec_file),
            }
        ), unresolved


def profile_roles(root: Path, spec_file: SpecFile, profile: Profile) -> dict[str, LockedRole]:
    """What each container of a profile is started with. Nothing of this host is in it.

    Raises:
        HostError: there is no docker compose to ask.
        DeployError: Compose refuses its files.
    """
    spec = spec_file.spec.model_copy(update={"profile": profile})
    config = preview_without_host(root, replace(spec_file, spec=spec))
    return dict(sorted(locked_roles(config).items()))


def describe(change: Change) -> str:
    """A change in one line."""
    match change.before, change.after:
        case None, after:
            return f"{change.name}: {after} is not locked"
        case before, None:
            return f"{change.name}: {before} is locked, but no longer there"
        case before, after:
            return f"{change.name}: {before} is locked, {after} is there"


def _rootfs_open(root: Path, locked: Lock) -> list[Disagreement]:
    request = read_request(root)
    if locked.rootfs is None:
        return [Disagreement("rootfs", "not locked yet", "deploy lock")]
    return [Disagreement("rootfs", line, "deploy lock") for line in disagreements(request, locked.rootfs)]


def _model_open(spec_file: SpecFile, locked: Lock) -> list[Disagreement]:
    spec = spec_file.spec.model
    folder = spec_file.file.parent / spec.path
    named = (spec.repo, spec.revision)
    have = (locked.model.repo, locked.model.revision) if locked.model else ("", "")
    if named != have:
        told = f"deploy.toml names {'@'.join(named) if spec.repo else 'no repository'}"
        held = f"deploy.lock has {'@'.join(have) if have[0] else 'none'}"
        where = "deploy lock --update model" if folder.is_dir() else f"bring its files to {folder}, then deploy lock"
        return [Disagreement("model", f"{told}, {held}", where)]
    if not folder.is_dir():
        return []
    there = {name: path.stat().st_size for name, path in folder_files(folder).items()}
    wanted = {file.path: file.size for file in locked.model.file} if locked.model else {}
    names = sorted(path for path in there.keys() | wanted.keys() if there.get(path) != wanted.get(path))
    if not names:
        return []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    what = f"{folder} is not what was locked: {', '.join(names[:3])}{more}"
    return [Disagreement("model", what, "deploy lock --update model")]


def _engine(root: Path, locked: Lock, sources: Sources, progress: Progress) -> EngineLock:
    assert locked.rootfs
    inputs = read_inputs(root, locked.rootfs.package)
    file, sha256 = engine_wheel(root, locked.rootfs, sources, progress)
    return lock_engine(file, sha256, inputs.files)


def engine_wheel(root: Path, rootfs: RootfsLock, sources: Sources, progress: Progress) -> tuple[Path, str]:
    """SGLang's locked wheel, fetched unless it is in the cache, and its hash.

    Args:
        root: the checkout.
        rootfs: decides which wheel fits.

    Raises:
        DeployError: uv.lock names none, or it cannot be fetched.
    """
    # Here and not above, as in `built_image`: loading the HTTP client takes longer than `lock --check`.
    from deploy.fetch import Advice, Item, cache_folder, fetch, http_client

    wheel = installed_wheels((root / "uv.lock").read_text(encoding="utf-8"), _target(rootfs))[PACKAGE]
    target = (sources.cache or cache_folder("wheels")) / wheel.sha256
    advice = Advice(
        altered="something between here and the package index alters files: try another network",
        missing="the package index no longer has what uv.lock names: .tools/bin/uv lock",
        unreachable="check the network and the certificates (--certificates FILE); deploy.lock is as it was",
    )
    with http_client(sources.certificates) as http:
        item = Item(wheel.file, wheel.url, wheel.sha256, target, wheel.size)
        fetch([item], http, advice, lambda done, total: progress(wheel.file, done, total))
    return target, wheel.sha256


def built_image(image: ImageLock) -> tuple[ImageLock, Disagreement | None]:
    """Add to an image what the local Docker engine has built from its inputs.

    Returns:
        The image with its id and layers; or as it was, and why.

    Raises:
        DeployError: its layers have an order that another host would not come to.
    """
    from python_on_whales import DockerClient

    from deploy.image.build import find_image
    from deploy.image.layers import read_layers
    from deploy.image.order import require_order

    tag = f"{IMAGE_NAME}:{image.inputs[:16]}"
    try:
        found = find_image(tag, DockerClient())
    except DeployError as error:
        return image, Disagreement(
            "image", f"{tag} was not looked up: {error.message}", "make docker, then deploy lock"
        )
    if found is None:
        fix = "deploy build, then deploy lock"
        return image, Disagreement("image", f"{tag} is not on this host, so its layers are not locked", fix)
    same = found.id == image.id
    if not same:
        require_order(found.id)
    update = {"id": found.id, "layer": read_layers(found.id), "manifest": image.manifest if same else "", "cache": ()}
    return (image if same else image.model_copy(update=update)), None


def _image(locked: ImageLock | None, inputs: ImageInputs) -> ImageLock:
    """The locked image if it is made from these inputs, else one that is not built yet."""
    if locked and (locked.inputs, locked.environment) == (inputs.hash, inputs.environment_hash):
        return locked
    return ImageLock(inputs=inputs.hash, environment=inputs.environment_hash)


def _tuned(spec_file: SpecFile) -> TunedLock | None:
    tuned = spec_file.spec.tuned
    if tuned is None:
        return None
    settings = {winner.setting: winner.now for winner in tuned.winner}
    return TunedLock(**tuned.model_dump(exclude={"workload", "results", "winner"}), setting=settings)


def _python(root: Path, rootfs: RootfsLock, uv_lock: str) -> PythonLock:
    text = (root / "requirements-uv.txt").read_text(encoding="utf-8")
    hashes = re.findall(r"--hash=sha256:([0-9a-f]{64})", text)
    if len(hashes) != 1:
        raise DeployError(
            "requirements-uv.txt does not pin one file",
            f"it has {len(hashes)} hashes",
            "git checkout requirements-uv.txt",
        )
    package = _package(rootfs, INTERPRETER)
    return PythonLock(
        package=package.name,
        version=_upstream(package.version),
        uv=parse_uv_version(text),
        uv_sha256=hashes[0],
        uv_lock=hashlib.sha256(uv_lock.encode()).hexdigest(),
    )


def _target(rootfs: RootfsLock) -> Target:
    glibc = _upstream(_package(rootfs, C_LIBRARY).version)
    return Target(_upstream(_package(rootfs, INTERPRETER).version), int(glibc.split(".")[1]))


def _package(rootfs: RootfsLock, name: re.Pattern[str]) -> LockedPackage:
    found = next((package for package in rootfs.package if name.fullmatch(package.name)), None)
    if found is None:
        raise DeployError(
            "the root file system cannot hold the engine",
            f"deploy.lock has no package {name.pattern}",
            f"correct {REQUEST_FILE}, then deploy lock --update rootfs",
        )
    return found


def _upstream(version: str) -> str:
    """A Debian version without epoch and Debian revision (deb-version(7))."""
    without_epoch = version.partition(":")[2] or version
    return without_epoch.rpartition("-")[0] or without_epoch


def _tiny_model() -> ModelLock:
    # Here and not above: it loads numpy.
    from deploy.model.tiny import generate

    with tempfile.TemporaryDirectory(prefix="deploy-lock-") as directory:
        return lock_folder(generate(Path(directory) / "tiny"))


def _hooks() -> tuple[LockedHook, ...]:
    return tuple(
        LockedHook(target=hook.target, op=hook.op, switch=hook.switch, upstream_sha256=hook.upstream_sha256)
        for hook in HOOKS
    )


def _tree(inputs: ImageInputs, folder: str) -> str:
    return tree_hash(content_hashes(inputs.files, folder))


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError as error:
        raise DeployError(f"{path.name} is missing", f"no file {path}", f"git checkout {path.name}") from error


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
