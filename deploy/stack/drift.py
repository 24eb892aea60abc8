"""Does what runs equal deploy.lock? Pure comparisons; `observe` looks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from sm120_kernels.plugin.table import ON

from deploy.host.docker_facts import parse_version
from deploy.lock.model import ImageLock, KernelsLock, Lock, LockedRole
from deploy.lock.options import contradictions, options, words
from deploy.lock.tree import tree_hash
from deploy.spec.profiles import ALL_ENGINES
from deploy.stack.observe import Inside, Observed


@dataclass(frozen=True)
class Drift:
    """One thing that is not as locked.

    Attributes:
        where: the role, `host` or `model`.
        what: the thing, in words.
    """

    where: str
    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: expected {self.expected}, found {self.found}"


def role_drifts(lock: Lock, profile: str, observed: Iterable[Observed], states: Mapping[str, str]) -> list[Drift]:
    """Compare the containers with the lock.

    Args:
        profile: whose roles are expected.
        observed: what runs.
        states: Docker's word for every container there is, by role.
    """
    expected = lock.roles.get(profile)
    if expected is None:
        return [Drift("stack", "profile", f"one of {', '.join(lock.roles) or 'none'}", profile)]
    seen = {item.role: item for item in observed}
    drifts: list[Drift] = []
    for role, locked in expected.items():
        item = seen.get(role)
        if item is None:
            drifts.append(Drift(role, "container", "running", states.get(role, "none")))
            continue
        drifts += image_drifts(role, lock.image, item.image)
        drifts += started_drifts(role, locked, item.started)
        if item.inside is None:
            drifts.append(Drift(role, "files inside", "readable", item.blind))
            continue
        drifts += file_drifts(role, lock, item.inside)
        if role in ALL_ENGINES:
            drifts += report_drifts(role, locked, item.inside)
            if lock.kernels:
                drifts += hook_drifts(role, lock.kernels, locked.environment, item.inside)
    drifts += [Drift(role, "container", "none", "running") for role in seen if role not in expected]
    return drifts


def image_drifts(role: str, image: ImageLock | None, found: str) -> list[Drift]:
    """Compare a container's image. Docker calls it by its configuration or, with containerd's store, its manifest."""
    known = [digest for digest in (image.id, image.manifest) if digest] if image else []
    if found in known:
        return []
    return [Drift(role, "image", " or ".join(known) or "none is locked (deploy lock after deploy build)", found)]


def started_drifts(role: str, locked: LockedRole, found: LockedRole) -> list[Drift]:
    """Compare the arguments and variables that a container was started with."""
    drifts = _mapping_drifts(role, "argument", _joined(locked.arguments), _joined(found.arguments))
    if not drifts and locked.arguments != found.arguments:
        drifts.append(Drift(role, "arguments", " ".join(locked.arguments), " ".join(found.arguments)))
    return drifts + _mapping_drifts(role, "variable", locked.environment, found.environment)


def file_drifts(role: str, lock: Lock, inside: Inside) -> list[Drift]:
    """Compare the files that a container sees: each patched one, and the whole of SGLang and of our own packages."""
    drifts: list[Drift] = []
    trees = {name: tree_hash(files) for name, files in inside.files.items()}
    expected: dict[str, str] = {}
    if lock.engine:
        expected["sglang"] = lock.engine.patched_tree
        for path, sha256 in lock.engine.patched.items():
            package, _, inner = path.partition("/")
            found = inside.files.get(package, {}).get(inner, "no such file")
            if found != sha256:
                drifts.append(Drift(role, f"patched file {path}", sha256, found))
    if lock.kernels:
        expected["sm120_kernels"] = lock.kernels.tree
    if lock.runtime:
        expected |= {"engine_runtime": lock.runtime.engine_runtime, "cpu_standins": lock.runtime.cpu_standins}
    for name, sha256 in expected.items():
        if trees.get(name) != sha256:
            drifts.append(Drift(role, f"files of {name}", sha256, trees.get(name, "none")))
    return drifts


def hook_drifts(role: str, kernels: KernelsLock, environment: Mapping[str, str], inside: Inside) -> list[Drift]:
    """Compare the functions of SGLang that the plug-in says it replaced with those whose switch is on."""
    drifts: list[Drift] = []
    for hook in kernels.hook:
        expected, found = environment.get(hook.switch) in ON, hook.target in inside.hooks
        if expected != found:
            words = {True: f"replaced by {hook.op}", False: "not replaced"}
            drifts.append(Drift(role, f"hook {hook.target}", words[expected], words[found]))
    return drifts


def report_drifts(role: str, locked: LockedRole, inside: Inside) -> list[Drift]:
    """Compare each locked option with the value that the engine itself reports for it."""
    report = inside.report
    if report is None:
        return [Drift(role, "server's report", "an answer", inside.silence)]
    return [
        Drift(role, f"server's {wrong.key}", wrong.expected, wrong.found)
        for wrong in contradictions(locked.arguments, report)
    ]


def version_drifts(what: str, least: str, found: str | None) -> list[Drift]:
    """Compare a version of this host with the least that is locked; None stands for a program that is not there."""
    if found and parse_version(found) >= parse_version(least):
        return []
    return [Drift("host", what, f"{least} or newer", found or "none")]


def _mapping_drifts(role: str, what: str, locked: Mapping[str, str], found: Mapping[str, str]) -> list[Drift]:
    return [
        Drift(role, f"{what} {name}".rstrip(), locked.get(name, "not set"), found.get(name, "not set"))
        for name in sorted(locked.keys() | found.keys())
        if locked.get(name) != found.get(name)
    ]


def _joined(arguments: tuple[str, ...]) -> dict[str, str]:
    return {option: words(values) for option, values in options(arguments).items()}
