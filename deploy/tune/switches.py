"""The settings that can be tried: which switches there are. Their values come from whoever owns them.

A key's values are those that the spec's own model allows; a variable's come from the default in the compose files; a
hook's from the plug-in's table. What a combination may not be, the spec's reader says (`refusal`).
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import tomlkit
from pydantic import BaseModel
from sm120_kernels.plugin.table import HOOKS, OFF, ON

from deploy.errors import WrongInput
from deploy.host.report import Gpu
from deploy.init.propose import REPLICA_MEMORY_FRACTION
from deploy.spec.load import SpecError, SpecFile, parse
from deploy.spec.model import GPUS_PER_ROLE, MOE_BACKENDS, REPLICA_LAYOUTS, Role, Spec
from deploy.stack.compose import stack_of
from deploy.stack.environment import Facts, variables
from deploy.stack.memory import plan_on, require_memory
from deploy.stack.preview import require_known_variables
from deploy.tune.experiment import Comparison, Edits, Value

CHOICES = ("transport", "engine.speculation", "engine.pcie_ipc_all_reduce", "engine.moe_backend", "engine.nccl")
"""Keys of deploy.toml with a closed list of values."""
SIZES = ("engine.speculation_steps", "prefill.chunked_prefill_size")
"""Keys that are a number: half and twice of it are tried, one step for the depth."""
FLAGS = ("DIRECT_SWA_KV", "FP8_WO_A_GEMM", "MULTI_STREAM_OVERLAP", "JIT_DEEPGEMM", "DEEPGEMM_HC_PRENORM")
"""Variables of compose.yaml that are 0 or 1. They are set for all engines alike; DIRECT_SWA_KV must be."""
LISTS = ("NCCL_PROTO", "NCCL_ALGO")
"""Variables whose default is a list that NCCL chooses from: each element alone is tried."""
P2P_LEVELS = ("LOC", "PIX", "PXB", "PHB", "SYS")
"""NCCL_P2P_LEVEL, farthest last (NCCL's manual; NVL needs NVLink, which these hosts lack)."""
SIZE_VARIABLES = ("CHUNKED_PREFILL_SIZE",)
CPU_SIZE_VARIABLES = ("CHUNKED_PREFILL_SIZE", "OMP_NUM_THREADS")
"""Variables of compose.cpu.yaml that decide how fast it is."""


class WrongSetting(WrongInput):
    """`--try` or `--only` names something that there is not."""


def comparisons(spec_file: SpecFile, files: Sequence[Path]) -> list[Comparison]:
    """Every setting of every switch that differs from what deploy.toml says, in the order in which to try them.

    The largest changes come first; a switch that others need comes before them.

    Args:
        files: the compose files of the profile.
    """
    spec = spec_file.spec
    text = "\n".join(file.read_text() for file in files)
    if spec.profile == "cpu":
        return _size_variables(spec, text, CPU_SIZE_VARIABLES)
    found = _profiles(spec)
    for key in CHOICES:
        found += [_of(key, value) for value in choices(spec, key) if value != spec.at(key)]
    for name in FLAGS:
        found += [_of(f"variables.{name}", _other(_variable(spec, text, name)))]
    for op in dict.fromkeys(hook.op for hook in HOOKS):
        name = f"SM120_{op.upper()}"
        found += [_of(f"variables.{name}", _other(_variable(spec, text, name)), op)]
    for key in SIZES:
        if spec.profile == "pd" or not key.startswith("prefill."):
            found += _sizes(key, int(str(spec.at(key))), int(str(Spec().at(key))))
    if spec.profile == "replicas":
        found += _size_variables(spec, text, SIZE_VARIABLES)
    for name in LISTS:
        present, whole = _variable(spec, text, name), _default(text, name)
        found += [_of(f"variables.{name}", one) for one in (whole, *whole.split(",")) if one != present]
    present = _variable(spec, text, "NCCL_P2P_LEVEL")
    return found + [_of("variables.NCCL_P2P_LEVEL", level) for level in P2P_LEVELS if level != present]


def tried(texts: Iterable[str]) -> list[Comparison]:
    """Settings from the command line, `KEY=VALUE[|VALUE…]`; the values are TOML, or words.

    Raises:
        WrongSetting: no key.
    """
    found: list[Comparison] = []
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
            raise WrongSetting(f"--try {text}", "expected KEY=VALUE, or KEY=VALUE|VALUE", "deploy tune --help")
        found += [_of(key, _literal(value)) for value in values.split("|")]
    return found


def chosen(found: Sequence[Comparison], only: Sequence[str]) -> list[Comparison]:
    """Those of the named switches: a key, its last part, or a hook's op, in any case.

    Raises:
        WrongSetting: a name that no switch has.
    """
    if not only:
        return list(found)
    kept = {one.name for one in found for name in only if name.lower() in _names(one)}
    for name in only:
        if not any(name.lower() in _names(one) for one in found):
            known = ", ".join(dict.fromkeys(one.switch for one in found)) or "none"
            raise WrongSetting(f"there is no switch {name} here", f"there is {known}", "deploy tune --dry-run")
    return [one for one in found if one.name in kept]


def apply(text: str, edits: Edits) -> str:
    """deploy.toml with other values; comments and everything else stay as they are. Raises WrongSetting."""
    document = tomlkit.parse(text)
    top: dict[str, Value] = {}
    for key, value in edits.items():
        *tables, name = key.split(".")
        place: Any = document
        for table in tables:
            if table not in place:
                place[table] = tomlkit.table()
            place = place[table]
            if not _is_table(place):
                raise WrongSetting(
                    f"deploy.toml has no place for {key}", f"{table} holds a value", "deploy tune --dry-run"
                )
        if value is None:
            place.pop(name, None)
        elif isinstance(value, list) and isinstance(value[0], dict):
            place.pop(name, None)
            place[name] = tomlkit.aot()
            for item in cast("list[dict[str, Any]]", value):
                place[name].append(tomlkit.item(item))
        elif tables or name in place:
            place[name] = value
        else:
            top[name] = value
    # A new key of the top level must stand before the first table.
    return (tomlkit.dumps(top) if top else "") + tomlkit.dumps(document)


def edited(spec_file: SpecFile, text: str, edits: Edits) -> SpecFile:
    """The spec with other values.

    Args:
        text: of deploy.toml.

    Raises:
        SpecError: they are refused.
    """
    forced = spec_file.spec.profile if "profile" in spec_file.overridden and "profile" not in edits else None
    return parse(apply(text, edits), spec_file.file, forced)


def refusal(root: Path, spec_file: SpecFile, text: str, edits: Edits, holds: Edits, gpus: Sequence[Gpu] = ()) -> str:
    """Why these values cannot be tried, empty if they can: the spec's own reader refuses them, or they change nothing.

    Args:
        root: the repository, whose compose files must know the variables.
        text: of deploy.toml.
        holds: what they are compared with.
        gpus: of this host, for the memory plan.
    """
    try:
        now, then = (_effect(root, edited(spec_file, text, values), gpus) for values in (holds, edits))
    except SpecError as error:
        return f"{error.problems[0].message}: {error.problems[0].why}"
    except WrongSetting as error:
        return f"{error.message}: {error.why}"
    return "it changes nothing here" if now == then else ""


def _is_table(value: object) -> bool:
    return isinstance(value, dict)


def _effect(root: Path, spec_file: SpecFile, gpus: Sequence[Gpu]) -> tuple[list[str], dict[str, str]]:
    """The compose files that follow from a spec, and the variables that are not their defaults."""
    if planned := plan_on(spec_file.spec, gpus):
        require_memory(spec_file, planned[0])
    files = stack_of(root, Path("/dev/null"), spec_file.spec).files
    lines = variables(spec_file, Facts("", Path("/model"), None, {}))
    require_known_variables(spec_file, files, lines)
    defaults = "\n".join(file.read_text() for file in files)
    given = {line.name: line.value for line in lines}
    changed = {name: value for name, value in given.items() if value != _found(defaults, name)}
    return [file.name for file in files], changed


def choices(spec: Spec, key: str) -> tuple[Value, ...]:
    """The values that the spec's model allows for a key; of the experts' back ends those that are another than now."""
    if key == "engine.moe_backend":
        return tuple(value for value in MOE_BACKENDS[spec.model.variant] if value != spec.moe_backend)
    annotation: Any = _field(key).annotation
    return (False, True) if annotation is bool else get_args(annotation)


def _profiles(spec: Spec) -> list[Comparison]:
    """The same GPUs as engines of another kind."""
    if spec.profile == "pd":
        layouts = [size for size in REPLICA_LAYOUTS if size <= GPUS_PER_ROLE]
        return [_as_replicas(spec, size) for size in sorted(layouts, reverse=True)]
    gpus = [gpu for role in spec.replica for gpu in role.gpus]
    if len(gpus) != 2 * GPUS_PER_ROLE:
        return []
    nodes = {node: [r for r in spec.replica if r.numa_node == node] for node in {r.numa_node for r in spec.replica}}
    halves = [[gpu for role in roles for gpu in role.gpus] for _, roles in sorted(nodes.items())]
    if [len(half) for half in halves] != [GPUS_PER_ROLE] * 2:
        return []
    edits: dict[str, Value] = {"profile": "pd"}
    for name, (node, roles), half in zip(("prefill", "decode"), sorted(nodes.items()), halves, strict=True):
        edits[f"{name}.gpus"] = cast("Value", half)
        edits[f"{name}.numa_node"] = node
        edits[f"{name}.cpus"] = ",".join(role.cpus for role in roles if role.cpus)
    return [Comparison(name="profile=pd", switch="profile", edits=edits)]


def _as_replicas(spec: Spec, size: int) -> Comparison:
    def engine(role: Role, place: int) -> dict[str, object]:
        return {"gpus": list(role.gpus[place : place + size]), "numa_node": role.numa_node, "cpus": role.cpus}

    roles = (spec.prefill, spec.decode)
    tables = [engine(role, place) for role in roles for place in range(0, len(role.gpus), size)]
    edits: dict[str, Value] = {"profile": "replicas", "transport": "isolated", "replica": tables}
    if size == min(REPLICA_LAYOUTS):
        edits["engine.memory_fraction"] = REPLICA_MEMORY_FRACTION
    return Comparison(name=f"profile=replicas of {size} GPUs", switch="profile", edits=edits)


def _sizes(key: str, present: int, default: int, *, written: type[int] | type[str] = int) -> list[Comparison]:
    """A number's neighbours; only the default where it is another."""
    if present != default:
        wanted = [default]
    elif present < 8:
        wanted = [present - 1, present + 1]
    else:
        wanted = [present // 2, present * 2]
    return [_of(key, written(value)) for value in wanted if value >= 1]


def _size_variables(spec: Spec, text: str, names: Iterable[str]) -> list[Comparison]:
    return [
        one
        for name in names
        for one in _sizes(f"variables.{name}", int(_variable(spec, text, name)), int(_default(text, name)), written=str)
    ]


def _of(key: str, value: Value, op: str = "") -> Comparison:
    shown = f"{str(value).lower()}" if isinstance(value, bool) else str(value)
    return Comparison(name=f"{key}={shown}", switch=op or key, edits={key: value}, op=op)


def _other(value: str) -> str:
    return OFF[1] if value in ON else ON[0]


def _names(one: Comparison) -> set[str]:
    key = next(iter(one.edits))
    return {name.lower() for name in (one.switch, key, key.rpartition(".")[2], one.op) if name}


def _literal(word: str) -> Value:
    """A value as TOML writes it; anything else is text."""
    try:
        return cast("Value", tomlkit.parse(f"value = {word}").unwrap()["value"])
    except Exception:
        return word


def _field(key: str) -> Any:
    section: type[BaseModel] = Spec
    *tables, name = key.split(".")
    for table in tables:
        section = cast("type[BaseModel]", section.model_fields[table].annotation)
    return section.model_fields[name]


def _variable(spec: Spec, text: str, name: str) -> str:
    """A variable's value: the spec's, else the compose files' default."""
    return str(spec.variables.get(name, _default(text, name)))


def _default(text: str, name: str) -> str:
    """The default of a variable, empty if there is none."""
    return _found(text, name) or ""


def _found(text: str, name: str) -> str | None:
    """The default of a variable in compose files; of several the last one's."""
    found = re.findall(rf"\$\{{{re.escape(name)}:-([^}}]*)\}}", text)
    return str(found[-1]) if found else None
