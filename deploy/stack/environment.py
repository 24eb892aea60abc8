"""The env file: what deploy.toml says, as variables of the compose files."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from deploy.spec.load import SpecFile
from deploy.spec.model import Engine, Role, Spec, cdi_device
from deploy.spec.profiles import ENGINES, FRONT, PROMETHEUS, ROUTER, compose_profile

Key = tuple[str | int, ...]
# Inside the containers, for engines and router alike.
ENGINE_PORT = 30000
# Where the other pages of metrics are: NIXL's of an engine, the router's, the front's.
NIXL_PORT, ROUTER_METRICS_PORT, FRONT_METRICS_PORT = 19090, 29000, 29100
# More than any text has: Chinese as \uXXXX has 10 or so, English 5. A longer request cannot be a prompt that fits.
BYTES_A_TOKEN = 16
DRAFT_MOUNT = "/draft"


def speculation(engine: Engine) -> tuple[str, ...]:
    """Arguments of the chosen way to guess ahead.

    EAGLE's default depth of three is what SGLang 0.5.23 chooses for this model when nothing is said
    (`_auto_choose_speculative_params`), written down so that another release cannot choose otherwise unnoticed; more
    than one candidate a step is refused for it, so it verifies its guesses and the token before them, and its draft
    weights are the model's MTP layer. DSpark's block size comes from its checkpoint, and so does its folder unless
    there is another (`_handle_dspark`).
    """
    match engine.speculation:
        case "none":
            return ()
        case "eagle":
            steps = engine.speculation_steps
            return (
                "--speculative-algorithm=EAGLE",
                f"--speculative-num-steps={steps}",
                "--speculative-eagle-topk=1",
                f"--speculative-num-draft-tokens={steps + 1}",
            )
        case "dspark":
            return ("--speculative-algorithm=DSPARK",)


@dataclass(frozen=True)
class Variable:
    """One line of the env file.

    Attributes:
        key: the key of deploy.toml that decides the value, empty if something else does.
        origin: who decided it, for people: `deploy.toml:LINE`, `--option`, or a word such as `image`.
    """

    name: str
    value: str
    key: Key
    origin: str


@dataclass(frozen=True)
class Facts:
    """What the env file needs and deploy.toml does not say.

    Attributes:
        image: tag of the engine image.
        model: absolute path of the model folder on the host.
        api_key_file: absolute path of the file that is mounted as the secret, None for no key.
        limits: resource limits of this host that are lower than the compose files' defaults, by variable name.
        draft: absolute path of DSpark's draft model, None if it is in the model's folder.
        tls: absolute paths of certificate and private key, None for no TLS.
        secrets_changed: another value whenever a secret file has changed.
        metrics: absolute path of the folder with the controller's own metrics.
    """

    image: str
    model: Path
    api_key_file: Path | None
    limits: dict[str, str]
    draft: Path | None = None
    tls: tuple[Path, Path] | None = None
    secrets_changed: str = ""
    metrics: Path | None = None


def variables(spec_file: SpecFile, facts: Facts) -> list[Variable]:
    """List the variables that differ from the compose files' own defaults, in the order of the env file.

    A key that deploy.toml leaves out gives no variable: the compose file's default holds. On the cpu profile only the
    router and `[variables]` count, because model and topology are that profile's own.
    """
    spec = spec_file.spec
    found: list[Variable] = []

    def add(name: str, value: object, *key: str | int) -> None:
        if origin := spec_file.origin(*key):
            found.append(Variable(name, str(value), key, origin))

    found.append(Variable("IMAGE", facts.image, (), "image"))
    found.append(Variable("MODEL_PATH", str(facts.model), ("model", "path"), _model_origin(spec_file)))
    if facts.draft and spec.profile == "replicas":
        add("DRAFT_PATH", facts.draft, "engine", "draft_path")
    if spec.profile != "cpu":
        add("SERVED_MODEL_NAME", spec.model.name, "model", "name")
        _engine(add, spec)
        for number, (name, role) in enumerate(spec.roles.items()):
            _role(add, name, role, ("replica", number) if spec.profile == "replicas" else (name,))
    if spec.profile == "pd":
        add("TENSOR_PARALLEL_SIZE", len(spec.prefill.gpus), "prefill", "gpus")
        add("CHUNKED_PREFILL_SIZE", spec.prefill.chunked_prefill_size, "prefill", "chunked_prefill_size")
        add("MAX_RUNNING_REQUESTS", spec.decode.max_running_requests, "decode", "max_running_requests")
    profiles = [compose_profile(len(spec.roles))] if spec.profile == "replicas" and len(spec.roles) > 1 else []
    profiles += [PROMETHEUS] if spec.metrics.prometheus_image else []
    if profiles:
        add("COMPOSE_PROFILES", ",".join(profiles), "replica" if spec.profile == "replicas" else "metrics")
    if spec.profile == "replicas" and len(spec.roles) > 1:
        add("WORKER_URLS", " ".join(f"http://{name}:{ENGINE_PORT}" for name in spec.roles), "replica")
    add("BIND_ADDRESS", _bracketed(spec.router.bind), "router", "bind")
    add("PORT", spec.router.port, "router", "port")
    add("ROUTER_EXTRA_ARGUMENTS", spec.router.extra_arguments, "router", "extra_arguments")
    if facts.api_key_file:
        add("API_KEY_FILE", facts.api_key_file, "router", "api_key_file")
    if spec.router.front:
        _front(add, spec, facts)
    if spec.metrics.port:
        add("METRICS_PORT", spec.metrics.port, "metrics", "port")
        add("METRICS_FOLDER", facts.metrics or "./observability", "metrics", "port")
        add("METRICS_TARGETS", " ".join(f"{role}={url}" for role, url in _targets(spec)), "metrics", "port")
        if spec.metrics.prometheus_image:
            add("PROMETHEUS_IMAGE", spec.metrics.prometheus_image, "metrics", "prometheus_image")
            add("PROMETHEUS_PORT", spec.metrics.prometheus_port, "metrics", "prometheus_port")
    for name, value in facts.limits.items():
        if name not in spec.variables:
            found.append(Variable(name, value, (), "limit of this host"))
    for name, value in spec.variables.items():
        add(name, value, "variables", name)
    return found


def _targets(spec: Spec) -> list[tuple[str, str]]:
    """Where each role shows its metrics, inside the stack; NIXL counts on a port of its own."""
    split = spec.profile != "replicas"
    engines = ENGINES[spec.profile] if split else tuple(spec.roles)
    found = [(name, port) for name in engines for port in (ENGINE_PORT, *([NIXL_PORT] if split else []))]
    found += [(ROUTER, ROUTER_METRICS_PORT), *([(FRONT, FRONT_METRICS_PORT)] if spec.router.front else [])]
    return [(name, f"http://{name}:{port}/metrics") for name, port in found]


def _front(add: Callable[..., None], spec: Spec, facts: Facts) -> None:
    """The variables of compose.front.yaml."""
    add("REQUESTS_PER_MINUTE", spec.router.requests_per_minute, "router", "requests_per_minute")
    add("CONCURRENT_REQUESTS", spec.router.concurrent_requests, "router", "concurrent_requests")
    if facts.tls:
        certificate, key = facts.tls
        add("TLS_CERTIFICATE_FILE", certificate, "router", "tls_certificate")
        add("TLS_KEY_FILE", key, "router", "tls_key")
    if facts.secrets_changed:
        add("SECRETS_CHANGED", facts.secrets_changed, "router", "api_key_file")


def _engine(add: Callable[..., None], spec: Spec) -> None:
    """The variables of [engine]; one that says "auto" or false leaves the compose file's default."""
    engine = spec.engine
    add("CONTEXT_LENGTH", engine.context_length, "engine", "context_length")
    add("MAX_REQUEST_BYTES", BYTES_A_TOKEN * engine.context_length, "engine", "context_length")
    add("MEMORY_FRACTION", engine.memory_fraction, "engine", "memory_fraction")
    if engine.moe_backend != "auto":
        add("MOE_RUNNER_BACKEND", engine.moe_backend, "engine", "moe_backend")
    elif spec.model.variant != "mxfp4":
        add("MOE_RUNNER_BACKEND", spec.moe_backend, "model", "variant")
    if engine.nccl == "ll_ring":
        add("NCCL_PROTO", "LL", "engine", "nccl")
        add("NCCL_ALGO", "Ring", "engine", "nccl")
    if engine.pcie_ipc_all_reduce:
        add("PCIE_IPC_ALLREDUCE", 1, "engine", "pcie_ipc_all_reduce")
    if engine.speculation != "none":
        arguments = speculation(engine)
        if engine.draft_path:
            arguments = (*arguments, f"--speculative-draft-model-path={DRAFT_MOUNT}")
        add("SPECULATION_ARGUMENTS", " ".join(arguments), "engine", "speculation")


def _role(add: Callable[..., None], name: str, role: Role, key: Key) -> None:
    prefix = name.upper().replace("-", "_")
    for slot, gpu in enumerate(role.gpus):
        add(f"{prefix}_GPU_{slot}", cdi_device(gpu), *key, "gpus")
    add(f"{prefix}_NUMA_NODE", role.numa_node, *key, "numa_node")
    add(f"{prefix}_CPUS", role.cpus, *key, "cpus")
    add(f"{prefix}_EXTRA_ARGUMENTS", role.extra_arguments, *key, "extra_arguments")


def _model_origin(spec_file: SpecFile) -> str:
    if spec_file.spec.profile == "cpu":
        return "generated model"
    return spec_file.origin("model", "path") or "default of [model] path"


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def render(lines: Iterable[Variable]) -> str:
    """The env file's text, in the quoting that Compose undoes."""
    head = "# Written by `deploy up` from deploy.toml; changes here are overwritten.\n"
    return head + "".join(f"{line.name}={quote(line.value)}\n" for line in lines)


def quote(value: str) -> str:
    """Quote a value so that Compose reads back exactly these characters."""
    if re.fullmatch(r"[\w./:=,@%+-]*", value, re.ASCII):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("\n", "\\n")
    return f'"{escaped}"'
