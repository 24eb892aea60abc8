"""What differs between two locks, in a person's words."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from deploy.lock.model import ImageLock, KernelsLock, Lock, LockedRole, ModelLock
from deploy.lock.options import options

Section = Literal[
    "package", "request", "release", "python", "wheel", "patch", "engine", "kernels", "hook", "runtime", "model",
    "tiny_model", "host", "compose", "argument", "environment", "role", "image", "layer", "cache", "tuned",
]  # fmt: skip
SHORT = 12


@dataclass(frozen=True)
class Fact:
    """One locked value.

    Attributes:
        shown: as a person knows it, for example a version.
        digest: hash of what it stands for, shown when the first does not tell two apart.
        exact: all that counts, shown when nothing else tells.
    """

    shown: str
    digest: str = ""
    exact: str = ""

    def words(self, precision: int) -> str:
        """The fact in words: 0 short, 1 with the digest, 2 all of it."""
        return (self.shown, f"{self.shown} {self.digest[:SHORT]}", self.exact or self.shown)[precision]


Facts = dict[tuple[Section, str], Fact]


@dataclass(frozen=True)
class Change:
    """One difference; `before` or `after` is None for what was added or removed."""

    section: Section
    name: str
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Transfer:
    """What a host that has the first image must fetch for the second.

    Attributes:
        layers: how many it lacks.
        size: bytes.
        compressed: the bytes are those of the registry; otherwise unpacked ones, which are more.
    """

    layers: int
    size: int
    compressed: bool


@dataclass(frozen=True)
class Difference:
    """All that differs; `transfer` is None unless both images were built."""

    changes: tuple[Change, ...]
    transfer: Transfer | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "changes": [asdict(change) for change in self.changes],
            "transfer": asdict(self.transfer) if self.transfer else None,
        }


def diff(before: Lock, after: Lock) -> Difference:
    """Compare two locks: it is empty exactly if they are equal."""
    return Difference(compare(facts(before), facts(after)), transfer(before.image, after.image))


def compare(before: Facts, after: Facts, sections: Iterable[Section] | None = None) -> tuple[Change, ...]:
    """List the facts that differ, in the order of the sections.

    Args:
        sections: only these.
    """
    wanted = set(sections) if sections is not None else None
    changes: list[Change] = []
    for key in dict.fromkeys([*before, *after]):
        one, two = before.get(key), after.get(key)
        if one == two or (wanted is not None and key[0] not in wanted):
            continue
        precision = 0
        while one and two and precision < 2 and one.words(precision) == two.words(precision):
            precision += 1
        changes.append(Change(*key, one and one.words(precision), two and two.words(precision)))
    explained = {change.name.split(" --")[0].split(" $")[0] for change in changes if change.section != "role"}
    # A role's own hash says nothing once its arguments or variables have said what changed.
    changes = [change for change in changes if change.section != "role" or change.name not in explained]
    order: dict[str, int] = {section: place for place, section in enumerate(Section.__args__)}
    return tuple(sorted(changes, key=lambda change: (order[change.section], change.name)))


def transfer(before: ImageLock | None, after: ImageLock | None) -> Transfer | None:
    """Count the layers of the second image that the first lacks."""
    if not (before and after and before.layer and after.layer):
        return None
    present = {layer.diff_id for layer in before.layer}
    missing = [layer for layer in after.layer if layer.diff_id not in present]
    compressed = all(layer.blob for layer in missing)
    return Transfer(len(missing), sum(layer.blob_size if compressed else layer.size for layer in missing), compressed)


def facts(lock: Lock) -> Facts:
    """Take a lock apart into its values."""
    found: Facts = {}

    def add(section: Section, name: str, shown: object, digest: str = "", exact: str = "") -> None:
        found[section, name] = Fact(str(shown), digest, exact)

    if rootfs := lock.rootfs:
        add("request", "suite", rootfs.suite)
        add("request", "packages", " ".join(rootfs.requested))
        for release in rootfs.release:
            add("release", release.suite, release.date.isoformat(), release.sha256)
        for package in rootfs.package:
            add("package", package.name, package.version, package.sha256, package.model_dump_json())
    if python := lock.python:
        for name, value in python.model_dump().items():
            add("python", name, value)
    for name, wheel in lock.wheels.items():
        add("wheel", name, wheel.version, wheel.sha256, f"{wheel.file} {wheel.sha256}")
    if engine := lock.engine:
        for place, patch in enumerate(engine.patch):
            add("patch", patch.name, patch.title, patch.sha256, f"place {place}: {patch.model_dump_json()}")
        add("engine", "wheel", engine.wheel)
        add("engine", "files", engine.tree)
        add("engine", "files after patches", engine.patched_tree)
        for path, sha256 in engine.patched.items():
            add("engine", f"patched {path}", sha256)
    if lock.kernels:
        found |= kernel_facts(lock.kernels)
    if runtime := lock.runtime:
        add("runtime", "engine_runtime", runtime.engine_runtime)
        add("runtime", "cpu_standins", runtime.cpu_standins)
    if lock.model:
        found |= _model_facts("model", lock.model)
    if lock.tiny_model:
        found |= _model_facts("tiny_model", lock.tiny_model)
    if host := lock.host:
        for name, value in host.model_dump().items():
            add("host", name, value)
    for name, sha256 in lock.compose.items():
        add("compose", name, sha256)
    for profile, roles in lock.roles.items():
        for name, role in roles.items():
            found |= role_facts(f"{profile} {name}", role)
    if lock.image:
        found |= image_facts(lock.image)
    if lock.tuned:
        for name, value in lock.tuned.model_dump(exclude={"setting"}).items():
            add("tuned", name, value)
        for key, value in lock.tuned.setting.items():
            add("tuned", f"setting {key}", value)
    return found


def kernel_facts(kernels: KernelsLock) -> Facts:
    """The kernels' files and hooks."""
    found: Facts = {("kernels", "files"): Fact(kernels.tree)}
    for place, hook in enumerate(kernels.hook):
        found["hook", hook.target] = Fact(hook.op, hook.upstream_sha256, f"place {place}: {hook.model_dump_json()}")
    return found


def role_facts(name: str, role: LockedRole) -> Facts:
    """Each option and variable of a role; `name` is profile and role."""
    found: Facts = {}
    for option, values in options(role.arguments).items():
        label = f"{name} {option}".rstrip()
        found["argument", label] = Fact(" ".join(values) or "set", "", repr(values))
    for variable, value in role.environment.items():
        found["environment", f"{name} ${variable}"] = Fact(value)
    found["role", name] = Fact(role.sha256, "", role.model_dump_json())
    return found


def image_facts(image: ImageLock) -> Facts:
    """The image's hashes and layers."""
    found: Facts = {}
    for name, value in (
        ("inputs", image.inputs),
        ("environment", image.environment),
        ("id", image.id),
        ("manifest", image.manifest),
    ):
        if value:
            found["image", name] = Fact(value)
    for place, layer in enumerate(image.layer):
        found["layer", str(place)] = Fact(f"{layer.diff_id} {layer.size} bytes", layer.blob, layer.model_dump_json())
    for cache in image.cache:
        found["cache", cache.gpu] = Fact(f"{cache.manifest} {cache.size} bytes", cache.blob, cache.model_dump_json())
    return found


def _model_facts(section: Literal["model", "tiny_model"], model: ModelLock) -> Facts:
    found: Facts = {(section, "size"): Fact(f"{len(model.file)} files, {model.size} bytes")}
    for name, value in (("repo", model.repo), ("revision", model.revision)):
        if value:
            found[section, name] = Fact(value)
    for file in model.file:
        found[section, f"file {file.path}"] = Fact(f"{file.size} bytes", file.sha256, file.model_dump_json())
    return found


def by_section(changes: Iterable[Change]) -> Mapping[Section, list[Change]]:
    """Group changes for display."""
    found: dict[Section, list[Change]] = {}
    for change in changes:
        found.setdefault(change.section, []).append(change)
    return found
