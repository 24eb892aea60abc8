"""The env file: what deploy.toml says, as variables of the compose files."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from deploy.spec.load import SpecFile
from deploy.spec.model import Role, cdi_device

Key = tuple[str | int, ...]


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
    """

    image: str
    model: Path
    api_key_file: Path | None
    limits: dict[str, str]


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
    if spec.profile == "pd":
        add("SERVED_MODEL_NAME", spec.model.name, "model", "name")
        add("TENSOR_PARALLEL_SIZE", len(spec.prefill.gpus), "prefill", "gpus")
        add("CONTEXT_LENGTH", spec.engine.context_length, "engine", "context_length")
        add("MEMORY_FRACTION", spec.engine.memory_fraction, "engine", "memory_fraction")
        for name, role in (("prefill", spec.prefill), ("decode", spec.decode)):
            _role(add, name, role)
        add("CHUNKED_PREFILL_SIZE", spec.prefill.chunked_prefill_size, "prefill", "chunked_prefill_size")
        add("MAX_RUNNING_REQUESTS", spec.decode.max_running_requests, "decode", "max_running_requests")
    add("BIND_ADDRESS", _bracketed(spec.router.bind), "router", "bind")
    add("PORT", spec.router.port, "router", "port")
    add("ROUTER_EXTRA_ARGUMENTS", spec.router.extra_arguments, "router", "extra_arguments")
    if facts.api_key_file:
        add("API_KEY_FILE", facts.api_key_file, "router", "api_key_file")
    for name, value in facts.limits.items():
        if name not in spec.variables:
            found.append(Variable(name, value, (), "limit of this host"))
    for name, value in spec.variables.items():
        add(name, value, "variables", name)
    return found


def _role(add: Callable[..., None], name: str, role: Role) -> None:
    prefix = name.upper()
    for slot, gpu in enumerate(role.gpus):
        add(f"{prefix}_GPU_{slot}", cdi_device(gpu), name, "gpus")
    add(f"{prefix}_NUMA_NODE", role.numa_node, name, "numa_node")
    add(f"{prefix}_CPUS", role.cpus, name, "cpus")
    add(f"{prefix}_EXTRA_ARGUMENTS", role.extra_arguments, name, "extra_arguments")


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
