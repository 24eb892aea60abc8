"""Locks for tests: strategies of all that a lock can say, and a small one by hand."""

from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from deploy.lock.debian import LockedPackage, LockedRelease, RootfsLock
from deploy.lock.model import (
    EngineLock,
    HostLock,
    ImageLock,
    KernelsLock,
    Lock,
    LockedFile,
    LockedHook,
    LockedLayer,
    LockedPatch,
    LockedRole,
    LockedWheel,
    ModelLock,
    PythonLock,
    RuntimeLock,
    TunedLock,
)

words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=6)
names = st.from_regex(r"[a-z][a-z0-9_.-]{0,5}", fullmatch=True)
hashes = st.sampled_from([digit * 64 for digit in "0123"])
digests = hashes.map("sha256:{}".format)
sizes = st.integers(0, 2**40)


def several(item: st.SearchStrategy[Any], key: str) -> st.SearchStrategy[tuple[Any, ...]]:
    """A few of them with different names, in order, as a lock has them."""

    def name(value: Any) -> str:
        return str(getattr(value, key))

    return st.lists(item, max_size=3, unique_by=name).map(lambda found: tuple(sorted(found, key=name)))


packages = st.builds(
    LockedPackage,
    name=names,
    version=names,
    architecture=st.sampled_from(["all", "amd64"]),
    archive=st.sampled_from(["debian", "debian-security"]),
    path=st.sampled_from(["pool/a.deb", "pool/b.deb"]),
    size=st.integers(1, 2**40),
    sha256=hashes,
    essential=st.booleans(),
)
releases = st.builds(LockedRelease, suite=names, date=st.datetimes(timezones=st.just(UTC)), sha256=hashes)
rootfs = st.builds(
    RootfsLock,
    suite=names,
    requested=st.lists(names, max_size=3).map(tuple),
    release=several(releases, "suite"),
    package=several(packages, "name"),
)
pythons = st.builds(PythonLock, package=names, version=names, uv=names, uv_sha256=hashes, uv_lock=hashes)
wheels = st.builds(LockedWheel, file=st.sampled_from(["a-1-py3-none-any.whl", "a-2-py3-none-any.whl"]), sha256=hashes)
patches = st.builds(LockedPatch, name=names, title=words, sha256=hashes, files=st.lists(names, max_size=2).map(tuple))
engines = st.builds(
    EngineLock,
    wheel=hashes,
    tree=hashes,
    patched_tree=hashes,
    patch=st.lists(patches, max_size=3, unique_by=lambda patch: patch.name).map(tuple),
    patched=st.dictionaries(names, hashes, max_size=2),
)
hooks = st.builds(LockedHook, target=names, op=names, switch=names, upstream_sha256=hashes)
kernels = st.builds(
    KernelsLock, tree=hashes, hook=st.lists(hooks, max_size=2, unique_by=lambda hook: hook.target).map(tuple)
)
runtimes = st.builds(RuntimeLock, engine_runtime=hashes, cpu_standins=hashes)
files = st.builds(LockedFile, path=names, size=sizes, sha256=hashes, sample=st.just("") | hashes)
models = st.builds(
    ModelLock,
    repo=st.sampled_from(["", "owner/name"]),
    revision=st.sampled_from(["", "a" * 40]),
    file=several(files, "path"),
)
hosts = st.builds(HostLock, driver=names, docker_engine=names, docker_compose=names)
options = st.sampled_from(["prefill", "--a", "--a=1", "--b", "--b=", "2", "--c=x y"])
roles = st.builds(
    LockedRole,
    sha256=hashes,
    arguments=st.lists(options, max_size=4).map(tuple),
    environment=st.dictionaries(names, words, max_size=2),
)
layers = st.builds(LockedLayer, diff_id=digests, size=sizes, blob=st.just("") | digests, blob_size=sizes)
images = st.builds(ImageLock, inputs=hashes, environment=hashes) | st.builds(
    ImageLock,
    inputs=hashes,
    environment=hashes,
    id=digests,
    manifest=st.just("") | digests,
    layer=st.lists(layers, min_size=1, max_size=3).map(tuple),
)
tuned = st.builds(
    TunedLock,
    by=names,
    at=names,
    host=names,
    gpu=names,
    image=names,
    results_sha256=hashes,
    setting=st.dictionaries(names, names, max_size=2),
)
PARTS: dict[str, st.SearchStrategy[Any]] = {
    "rootfs": rootfs,
    "python": pythons,
    "wheels": st.dictionaries(names, wheels, max_size=2),
    "engine": engines,
    "kernels": kernels,
    "runtime": runtimes,
    "model": models,
    "tiny_model": models,
    "host": hosts,
    "compose": st.dictionaries(names, hashes, max_size=2),
    "roles": st.dictionaries(st.just("cpu"), st.dictionaries(names, roles, min_size=1, max_size=2)),
    "image": images,
    "tuned": tuned,
}
# All of a lock; and two that differ in one part at most, since nearly all pairs of the former differ in every part.
locks = st.builds(Lock, **PARTS)
pairs = st.sampled_from(sorted(PARTS)).flatmap(
    lambda part: st.tuples(*[st.builds(Lock, **{part: PARTS[part]}) | st.just(Lock())] * 2)
)


def package(name: str, version: str, digit: str = "0") -> LockedPackage:
    return LockedPackage(
        name=name,
        version=version,
        architecture="amd64",
        archive="debian",
        path="pool/x.deb",
        size=1,
        sha256=digit * 64,
    )


def root_file_system(*locked: LockedPackage) -> RootfsLock:
    release = LockedRelease(suite="bookworm", date=datetime(2026, 1, 1, tzinfo=UTC), sha256="0" * 64)
    return RootfsLock(suite="bookworm", requested=("a",), release=(release,), package=locked)


def layer(digit: str, size: int, blob_size: int = 0) -> LockedLayer:
    blob = f"sha256:{digit * 64}" if blob_size else ""
    return LockedLayer(diff_id=f"sha256:{digit * 64}", size=size, blob=blob, blob_size=blob_size)


def image(digit: str, *of: LockedLayer, manifest: str = "") -> ImageLock:
    return ImageLock(inputs=digit * 64, environment="0" * 64, id=f"sha256:{digit * 64}", manifest=manifest, layer=of)
