"""`deploy up` and `deploy down`: from a spec to an accepted stack, and back to nothing."""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

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
from deploy.model.folder import draft_folder, model_folder, require_model
from deploy.model.variant import require_variant
from deploy.spec.load import SpecFile
from deploy.spec.model import Spec, cdi_device
from deploy.stack import change, generations, journal
from deploy.stack.accept import Acceptance, accept
from deploy.stack.client import endpoint
from deploy.stack.compose import Stack, stack_of
from deploy.stack.environment import Facts, Variable, render, variables
from deploy.stack.events import Report, Running, step
from deploy.stack.exposition import write_accepted
from deploy.stack.generations import COMPOSE, ENVIRONMENT, LOCK, RENDERED, SPEC, Candidate
from deploy.stack.memory import plan_on, require_memory
from deploy.stack.preview import require_known_variables
from deploy.stack.state import State, copy_secret, read_keys

MEBIBYTE = 1024**2
TINY_MODEL_BYTES = 8 * MEBIBYTE
# Three processes with torch and a small KV pool each; seen: 3.2 GiB.
CPU_STACK_BYTES = 4 * 1024 * MEBIBYTE


@dataclass(frozen=True)
class Result:
    """An accepted stack. `changed` is False when it ran already and nothing had to be started."""

    acceptance: Acceptance
    image: ImageReference
    changed: bool
    seconds: float
    generation: int


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


def up(
    root: Path,
    spec_file: SpecFile,
    state: State,
    report: Report,
    mirror: str | None = None,
    security_mirror: str | None = None,
    verb: str = "up",
) -> Result:
    """Bring the stack up and return once a request has crossed it; the same stack running already is only checked.

    A running stack is changed without dropping requests as far as there are other engines. Whatever stops this before
    the first container is touched leaves a running stack alone. After that, failure or interruption brings the current
    generation back, or removes everything if there was none.

    Args:
        mirror: Debian archive for a build of the image; `security_mirror` likewise.
        verb: under which name this is recorded.

    Raises:
        HostError: this machine lacks something.
        RoleFailed: a container did not start.
        NotAccepted, RequestFailed: it started and does not serve as it must.
        NotSigned: `[image] public_key` asks for a signature that the image has not got.
        LockHeld: another deploy command is at work.
        KeyboardInterrupt: passed on after cleaning up.
    """
    begun = time.monotonic()
    with state.lock(verb):
        change.heal(root, state, report)
        image = prepare(root, spec_file, state, report, mirror, security_mirror)
        stack, candidate = candidate_of(root, spec_file, state, image, spec_file.file.read_bytes())
        with change.journaled(root, state, verb, report):
            generations.write_candidate(state, candidate)
            with step("start", report) as running:
                changed = change.start(stack, state, report)
                running.outcome = "" if changed else "already running, nothing changed"
            with step("accept", report) as running:
                acceptance = accept(stack, endpoint(stack.config()), running)
                running.outcome = str(acceptance)
            write_accepted(state, stack, acceptance, image.tag)
            generation = generations.accept_candidate(state, candidate, verb, acceptance.as_dict())
    return Result(acceptance, image, changed, time.monotonic() - begun, generation.number)


def prepare(
    root: Path,
    spec_file: SpecFile,
    state: State,
    report: Report,
    mirror: str | None = None,
    security_mirror: str | None = None,
) -> ImageReference:
    """Check the host and have everything here that the stack is started from. No container is touched.

    Raises:
        HostError: this machine lacks something.
        NotSigned: `[image] public_key` asks for a signature that the image has not got.
    """
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
            running.outcome += "; not the image that deploy.lock names (deploy verify --rebuild says where it differs)"
    found, _ = plan(root, spec_file, state, image.tag)
    if locked and spec_file.spec.image.registry and image.id in (locked.id, locked.manifest):
        with step("caches", report) as running:
            running.outcome = _restore_caches(found, spec_file, locked, image.tag, state, running)
    return image


def candidate_of(
    root: Path, spec_file: SpecFile, state: State, image: ImageReference, text: bytes
) -> tuple[Stack, Candidate]:
    """The stack of a spec as it is started from the candidate's files, and these files. Nothing is written.

    Args:
        text: of deploy.toml.
    """
    found, lines = plan(root, spec_file, state, image.tag)
    candidate = _candidate(root, text, found, render(lines), image)
    return replace(found, environment=state.candidate / ENVIRONMENT, kept=state.candidate / COMPOSE), candidate


def _candidate(root: Path, text: bytes, stack: Stack, environment: str, image: ImageReference) -> Candidate:
    """Everything that decides what the stack is, as it is now."""
    with tempfile.NamedTemporaryFile("w", suffix=".env") as file:
        file.write(environment)
        file.flush()
        rendered = replace(stack, environment=Path(file.name)).config()
    files = {f"{COMPOSE}/{path.name}": path.read_bytes() for path in sorted(root.glob("compose*.yaml"))}
    files |= {ENVIRONMENT: environment.encode(), RENDERED: (json.dumps(rendered, indent=2) + "\n").encode()}
    files[SPEC] = text
    if (root / FILE_NAME).exists():
        files[LOCK] = (root / FILE_NAME).read_bytes()
    return Candidate(
        *(stack.profile, stack.transport, stack.gpus_per_engine, image.tag, image.id, files),
        front=stack.front,
        metrics_page=stack.metrics_page,
    )


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
        return restore(stack.project, locked, image, gpu, client, state, progress)


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


def down(stack: Stack, state: State, *, keep_volumes: bool = False) -> list[str]:
    """Remove the stack's containers, networks and volumes; returns what was removed, in words.

    Args:
        keep_volumes: keep the cache of compiled kernels, which costs minutes to make anew on GPUs.
    """
    with state.lock("down"):
        journal.begin(state, "down")
        found = stack.leftovers()
        stack.remove(keep_volumes=stack.volumes() if keep_volumes else ())
        kept = set(stack.leftovers())
        generations.switch(state, None)
        generations.sweep(state)
        journal.end(state)
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
