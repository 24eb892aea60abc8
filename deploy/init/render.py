"""A proposal as deploy.toml, and in words."""

import json
import textwrap
from collections.abc import Iterable

from pydantic import BaseModel

from deploy.host.parsers.cpu_list import format_cpu_list
from deploy.init.propose import Proposal, RolePlan
from deploy.spec.model import Role, Spec
from deploy.spec.signoff import block


def to_toml(proposal: Proposal, keep: Spec, uuids: bool) -> str:
    """The text of deploy.toml.

    Args:
        proposal: what the host decides.
        keep: what a person decides (model, limits of requests, router); taken over as it is.
        uuids: name GPUs by UUID (the host's CDI description knows them), else by index.
    """
    lines = [
        "# Proposed by `deploy init` from what it saw of this host; yours to change.",
        "",
        *_explained(Spec, "profile"),
        *(f"# {remark}." for remark in proposal.remarks[:1]),
        f"profile = {_text(proposal.profile)}",
    ]
    if proposal.profile == "pd":
        reason = f"# {proposal.transport_reason}."
        lines += ["", *_explained(Spec, "transport"), reason, f"transport = {_text(proposal.transport)}"]
    lines += ["", "[model]", *_keys(keep.model)]
    lines += ["", "[image]", *_keys(keep.image)]
    if proposal.profile == "pd":
        prefill, decode = proposal.roles
        lines += [
            *_role("[prefill]", prefill, uuids),
            *_keys(keep.prefill, ("chunked_prefill_size", "extra_arguments")),
        ]
        lines += [*_role("[decode]", decode, uuids), *_keys(keep.decode, ("max_running_requests", "extra_arguments"))]
    elif proposal.profile == "replicas":
        for number, role in enumerate(proposal.roles):
            extra = keep.replica[number].extra_arguments if number < len(keep.replica) else ""
            lines += [
                *_role("[[replica]]", role, uuids),
                *_explained(Role, "extra_arguments"),
                f"extra_arguments = {_text(extra)}",
            ]
    if proposal.profile != "cpu":
        engine = keep.engine.model_copy(update={"memory_fraction": proposal.memory_fraction})
        memory = _comment(f"{str(proposal.memory)[:1].upper()}{str(proposal.memory)[1:]}.") if proposal.memory else []
        lines += ["", "[engine]", *_keys(engine, memory_fraction=memory)]
    lines += [
        "",
        "[router]",
        *_keys(keep.router),
        "",
        "[metrics]",
        *_keys(keep.metrics),
        "",
        *_explained(Spec, "variables"),
        "[variables]",
    ]
    proposed = {setting.name for setting in proposal.settings}
    for setting in proposal.settings:
        lines += [f"# {setting.reason[:1].upper()}{setting.reason[1:]}.", f"{setting.name} = {_value(setting.value)}"]
    lines += [f"{name} = {_value(value)}" for name, value in keep.variables.items() if name not in proposed]
    if keep.tuned:
        lines += ["", block(keep.tuned).rstrip()]
    return "\n".join(lines) + "\n"


def _keys(section: BaseModel, names: Iterable[str] = (), **remarks: list[str]) -> list[str]:
    """Keys of a table as the person has them, all if none is named, each with its explanation.

    Args:
        remarks: what follows the explanation of a key, in comment lines.
    """
    kind, lines = type(section), list[str]()
    for name in names or kind.model_fields:
        value = _value(getattr(section, name))
        lines += [*_explained(kind, name), *remarks.get(name, ()), f"{name} = {value}"]
    return lines


def _explained(section: type[BaseModel], name: str) -> list[str]:
    return _comment(section.model_fields[name].description or "")


def _comment(text: str) -> list[str]:
    """Sentences as comment lines."""
    return textwrap.wrap(
        text,
        120,
        initial_indent="# ",
        subsequent_indent="# ",
        break_on_hyphens=False,
    )


def _role(table: str, role: RolePlan, uuids: bool) -> list[str]:
    names = [gpu.uuid if uuids and gpu.uuid else gpu.index for gpu in role.gpus]
    indices = ", ".join(str(gpu.index) for gpu in role.gpus)
    return [
        "",
        table,
        *_explained(Role, "gpus"),
        f"# GPUs {indices} of nvidia-smi, the nearest to each other on NUMA node {role.numa_node}.",
        "gpus = [",
        *(f"    {_value(name)}," for name in names),
        "]",
        *_explained(Role, "numa_node"),
        f"numa_node = {role.numa_node}",
        *_explained(Role, "cpus"),
        "# Whole cores of that node; the rest of it is left to the system and the router.",
        f"cpus = {_text(format_cpu_list(list(role.cpus)))}",
    ]


def _text(value: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of TOML's but for the delete character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: str | int | float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return _text(value) if isinstance(value, str) else str(value)
