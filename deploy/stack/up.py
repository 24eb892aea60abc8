"""`deploy up` and `deploy down`: from a spec to an accepted stack, and back to nothing."""

import signal
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from deploy.errors import DeployError
from deploy.host import probe
from deploy.host.docker_facts import require_docker, require_gpus
from deploy.host.errors import HostError
from deploy.host.gpus import require_node
from deploy.image.build import BuildEvent, ImageReference
from deploy.image.obtain import Sources, obtain
from deploy.image.registry import Client, parse_registry
from deploy.image.signature import NotSigned, require_signature
from deploy.lock.document import FILE_NAME
from deploy.lock.model import ImageLock, read_lock
from deploy.model.folder import require_model
from deploy.model.variant import require_variant
from deploy.spec.load import SpecFile
from deploy.spec.model import Spec, cdi_device
from deploy.spec.profiles import BEHIND_ROUTER, ROUTER
from deploy.stack import phases
from deploy.stack.accept import Acceptance, accept
from deploy.stack.client import endpoint
from deploy.stack.compose import RoleState, Stack, stack_of
from deploy.stack.environment import Facts, Variable, render, variables
from deploy.stack.events import Event, Report, Running, step
from deploy.stack.exposition import write_accepted, write_roles
from deploy.stack.memory import plan_on, require_memory
from deploy.stack.preview import require_known_variables
from deploy.stack.state import State, copy_secret, read_keys, write

MEBIBYTE = 1024**2
TINY_MODEL_BYTES = 8 * MEBIBYTE
# Three processes with torch and a small KV pool each; seen: 3.2 GiB.
CPU_STACK_BYTES = 4 * 1024 * MEBIBYTE
LOOK_S = 1.0


class RoleFailed(DeployError):
    """A container died or became unhealthy while starting; `lines` are the telling ones of its log."""

    exit_code = 4

    def __init__(self, role: str, message: str, lines: list[str], log: Path) -> None:
        super().__init__(f"{role} failed to start: {message}", "\n".join(lines) or "it logged nothing", f"less {log}")
        self.role = role
        self.lines = lines


@dataclass(frozen=True)
class Result:
    """An accepted stack. `changed` is False when it ran already and nothing had to be started."""

    acceptance: Acceptance
    image: ImageReference
    changed: bool
    seconds: float


def plan(root: Path, spec_file: SpecFile, state: State, image: str) -> tuple[Stack, list[Variable]]:
    """The stack a spec describes and the variables it gives to the compose files. Nothing is written or started.

    Raises:
        SpecError: `[variables]` names one that the compose files do not know.
    """
    spec = spec_file.spec
    stack = stack_of(root, state.environment, spec)
    key = state.api_key if spec.router.api_key_file else None
    facts = Facts(
        image,
        model_folder(spec_file, state),
        key,
        probe.lowered_limits(),
        draft_folder(spec_file),
        tls=state.tls if spec.router.tls_certificate else None,
        secrets_changed=_secrets_changed(state) if spec.router.front else "",
        metrics=state.metrics.absolute(),
    )
    lines = variables(spec_file, facts)
    require_known_variables(spec_file, stack.files, lines)
    return stack, lines


def model_folder(spec_file: SpecFile, state: State) -> Path:
    """Where the served model lies: the generated one on the cpu profile, else `[model] path` beside deploy.toml."""
    if spec_file.spec.profile == "cpu":
        return state.tiny_model.absolute()
    return (spec_file.file.parent / spec_file.spec.model.path).absolute()


def draft_folder(spec_file: SpecFile) -> Path | None:
    """Where DSpark's draft model lies, None if it is in the model's folder."""
    path = spec_file.spec.engine.draft_path
    return (spec_file.file.parent / path).absolute() if path else None


def up(
    root: Path,
    spec_file: SpecFile,
    state: State,
    report: Report,
    mirror: str | None = None,
    security_mirror: str | None = None,
) -> Result:
    """Bring the stack up and return once a request has crossed it; the same stack running already is only checked.

    Whatever stops it before the first container is touched leaves a running stack alone. After that, failure or
    interruption removes everything the command started.

    Args:
        mirror: Debian archive for a build of the image; `security_mirror` likewise.

    Raises:
        HostError: this machine lacks something.
        RoleFailed: a container did not start.
        NotAccepted, RequestFailed: it started and does not serve as it must.
        NotSigned: `[image] public_key` asks for a signature that the image has not got.
        LockHeld: another deploy command is at work.
        KeyboardInterrupt: passed on after cleaning up.
    """
    begun = time.monotonic()
    with state.lock("up"):
        with step("host", report) as running:
            stack, _ = plan(root, spec_file, state, "")
            if planned := plan_on(spec_file.spec, probe.gpus()):
                require_memory(spec_file, planned[0])
            running.outcome = check_host(stack, spec_file.spec)
        # Before the image, which takes minutes: what is missing here must not wait for it.
        with step("model", report) as running:
            running.outcome = _prepare_model(spec_file, state)
        _copy_secrets(spec_file, state)
        with step("image", report) as running:
            locked = _locked_image(root)
            sources = Sources(spec_file.spec.image.registry, mirror, security_mirror)
            obtained = obtain(root, locked, sources, build_progress(running))
            image = obtained.image
            if spec_file.spec.image.public_key:
                _require_signed(spec_file, locked, image)
            running.outcome = f"{image.tag}, {image.size_bytes / 1e9:.1f} GB, {obtained.origin}"
            if (
                locked
                and locked.id
                and f"{locked.inputs:.16}" in image.tag
                and image.id not in (locked.id, locked.manifest)
            ):
                running.outcome += (
                    "; not the image that deploy.lock names (deploy verify --rebuild says where it differs)"
                )
        stack, lines = plan(root, spec_file, state, image.tag)
        before = _identities(stack)
        if locked and spec_file.spec.image.registry and image.id in (locked.id, locked.manifest):
            with step("caches", report) as running:
                running.outcome = _restore_caches(stack, spec_file, locked, image.tag, state, running)
        with _undone_on_failure(stack, before, report):
            write(state.environment, render(lines))
            config = stack.config()
            target = endpoint(config)
            with step("start", report) as running:
                stack.retire()
                for roles in _waves(config["services"], stack.engines):
                    stack.start(roles)
                    wait_healthy(stack, roles, state, report)
                changed = _identities(stack) != before
                running.outcome = "" if changed else "already running, nothing changed"
            with step("accept", report) as running:
                acceptance = accept(stack, target, running)
                running.outcome = str(acceptance)
            now = datetime.now(UTC)
            write_accepted(state, acceptance, {"profile": stack.profile, "image": image.tag}, now)
            write_roles(state, stack.roles(), now)
    return Result(acceptance, image, changed, time.monotonic() - begun)


def _restore_caches(
    stack: Stack, spec_file: SpecFile, locked: ImageLock, image: str, state: State, running: Running
) -> str:
    """Have what another host compiled. Volumes of a stack that runs are left alone: its engines use them."""
    # Here and not above: most stacks have no registry.
    from deploy.bake.artifact import gpu_kind, restore

    if stack.roles():
        return "the engines run"
    gpu = gpu_kind(spec_file.spec.profile, probe.gpus())

    def progress(done: int, total: int) -> None:
        running.progress("from the registry", done, total)

    with Client(parse_registry(spec_file.spec.image.registry)) as client:
        return restore(stack, locked, image, gpu, client, state, progress)


def _copy_secrets(spec_file: SpecFile, state: State) -> None:
    router, folder = spec_file.spec.router, spec_file.file.parent
    if router.api_key_file:
        read_keys(folder / router.api_key_file)
        copy_secret(folder / router.api_key_file, state.api_key)
    if router.tls_certificate:
        certificate, key = state.tls
        copy_secret(folder / router.tls_certificate, certificate)
        copy_secret(folder / router.tls_key, key)
    if spec_file.spec.metrics.port:
        state.metrics.mkdir(parents=True, exist_ok=True)


def _secrets_changed(state: State) -> str:
    """When a secret file last changed: Compose does not look into them, and makes no new container by itself."""
    times = [file.stat().st_mtime_ns for file in (state.api_key, *state.tls) if file.exists()]
    return str(max(times, default=0))


def _locked_image(root: Path) -> ImageLock | None:
    return read_lock(root).image if (root / FILE_NAME).exists() else None


def _require_signed(spec_file: SpecFile, locked: ImageLock | None, image: ImageReference) -> None:
    """The signature is over the locked manifest, so the image here must be the locked one too."""
    if not (locked and locked.manifest and image.id in (locked.id, locked.manifest)):
        raise NotSigned(
            "the image is not one that could be signed",
            f"a signature is over the image that deploy.lock names by its manifest, and {image.id} is not that",
            "deploy push --key cosign.key where that key is, commit deploy.lock, and take both here",
        )
    wanted = spec_file.spec.image
    require_signature(parse_registry(wanted.registry), locked.manifest, spec_file.file.parent / wanted.public_key)


def _waves(services: Iterable[str], engines: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The order of starting: what the engines lean on, the engines, the router, what stands behind it."""
    behind = tuple(name for name in BEHIND_ROUTER if name in set(services))
    others = tuple(sorted(set(services) - {*engines, ROUTER, *behind}))
    return [wave for wave in (others, engines, (ROUTER,), behind) if wave]


def down(stack: Stack, state: State, *, keep_volumes: bool = False) -> list[str]:
    """Remove the stack's containers, networks and volumes; returns what was removed, in words.

    Args:
        keep_volumes: keep the cache of compiled kernels, which costs minutes to make anew on GPUs.
    """
    with state.lock("down"):
        found = stack.leftovers()
        stack.remove(keep_volumes=stack.volumes() if keep_volumes else ())
        kept = set(stack.leftovers())
        state.environment.unlink(missing_ok=True)
        return [item for item in found if item not in kept]


def check_host(stack: Stack, spec: Spec) -> str:
    """Check that this host can run the stack, before anything is built or started.

    Raises:
        HostError: with the command that mends it.
    """
    facts = probe.docker_facts()
    require_docker(facts, cdi=bool(spec.roles))
    if spec.roles:
        present, places = probe.cdi_devices(facts.cdi_folders), probe.gpus()
        for name, role in spec.roles.items():
            devices = [cdi_device(gpu) for gpu in role.gpus]
            require_gpus(devices, present, facts.cdi_folders)
            require_node(name, devices, role.numa_node, places)
    roles = stack.roles()
    elsewhere = next((state for state in roles if state.folder and Path(state.folder) != stack.root), None)
    if elsewhere:
        raise HostError(
            f"the stack {stack.project} runs already, started from {elsewhere.folder}",
            "one Docker engine holds one stack of a name",
            f"make -C {elsewhere.folder} down, or set COMPOSE_PROJECT_NAME to another name",
        )
    if not any(spec.router.port in state.ports for state in roles):
        probe.require_port(spec.router.bind, spec.router.port)
    if spec.profile == "cpu" and not roles:
        probe.require_memory(CPU_STACK_BYTES, "the cpu profile")
    return f"Docker {facts.server}, compose {facts.compose}"


def wait_healthy(stack: Stack, roles: tuple[str, ...], state: State, report: Report) -> None:
    """Watch roles until all are healthy, reporting each one's own phase.

    Raises:
        RoleFailed: one died, restarted, vanished or became unhealthy.
    """
    begun = time.monotonic()
    seen = {role: phases.PHASES[0][0] for role in roles}
    restarts: dict[str, int] = {}
    since = datetime.now(UTC) - timedelta(hours=1)
    finished: set[str] = set()
    while finished != set(roles):
        looked = datetime.now(UTC)
        now = {container.role: container for container in stack.roles()}
        for role in roles:
            container = now.get(role)
            if container is None:
                raise RoleFailed(role, "its container was removed", [], state.folder)
            restarts.setdefault(role, container.restarts)
            if failure := _failure(container, restarts[role]):
                raise _role_failed(stack, container, failure, seen[role], state)
            if role in finished:
                continue
            if container.serving:
                finished.add(role)
                report(Event("start", "finished", "healthy", role, seconds=time.monotonic() - begun))
                continue
            reached = phases.later(seen[role], phases.phase(stack.log(container.container, since=since)))
            seen[role] = reached
            report(Event("start", "progress", reached, role))
        since = looked - timedelta(seconds=2)
        if finished != set(roles):
            time.sleep(LOOK_S)


def _failure(container: RoleState, restarts: int) -> str | None:
    if container.out_of_memory:
        return "the kernel killed it for lack of memory"
    if container.status in ("exited", "dead", "restarting", "removing"):
        return f"it ended with exit code {container.exit_code}"
    if container.restarts > restarts:
        return "it died and was started again"
    if container.health == "unhealthy":
        return "its health check fails"
    return None


def _role_failed(stack: Stack, container: RoleState, failure: str, phase: str, state: State) -> RoleFailed:
    log = phases.plain(stack.log(container.container))
    file = state.folder / "failed" / f"{container.role}.log"
    write(file, log)
    return RoleFailed(container.role, f"{failure} while {phase}", phases.relevant(log), file)


def _prepare_model(spec_file: SpecFile, state: State) -> str:
    folder = model_folder(spec_file, state)
    if spec_file.spec.profile == "cpu":
        # Here and not above: it loads numpy, which the other verbs need not wait for.
        from deploy.model.tiny import generate

        probe.require_space(folder, TINY_MODEL_BYTES, "the generated model")
        generate(folder)
    require_model(folder)
    if spec_file.spec.roles:
        require_variant(folder, spec_file.spec, draft_folder(spec_file))
    return str(folder)


def build_progress(running: Running) -> Callable[[BuildEvent], None]:
    """Show the image's build as the progress of a step."""

    def progress(event: BuildEvent) -> None:
        if event.state != "log":
            running.progress(f"{event.phase}: {event.step}", event.done, event.total)

    return progress


def _identities(stack: Stack) -> set[str]:
    return {container.container for container in stack.roles() if container.status == "running"}


@contextmanager
def _undone_on_failure(stack: Stack, before: set[str], report: Report) -> Generator[None]:
    """Remove what was started if the body fails; a stack that ran before and was not touched stays."""
    volumes = stack.volumes()
    try:
        yield
    except BaseException:
        with _no_interruption():
            now = _identities(stack)
            if not before or now != before:
                with step("clean", report) as running:
                    stack.remove(keep_volumes=volumes, at_once=True)
                    running.outcome = "removed what was started"
        raise


@contextmanager
def _no_interruption() -> Generator[None]:
    """Let a second Ctrl-C not cut the clean-up short; it is bounded in time."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
