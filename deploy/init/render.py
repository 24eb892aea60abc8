"""A proposal as deploy.toml, and in words."""

import json

from deploy.host.parsers.cpu_list import format_cpu_list
from deploy.init.propose import Proposal, RolePlan
from deploy.spec.model import Spec


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
        f"# {proposal.remarks[0]}." if proposal.remarks else "",
        f"profile = {_text(proposal.profile)}",
    ]
    if proposal.profile == "pd":
        lines += ["", f"# {proposal.transport_reason}.", f"transport = {_text(proposal.transport)}"]
    lines += ["", "[model]", f"path = {_text(keep.model.path)}", f"name = {_text(keep.model.name)}"]
    lines += [f"repo = {_text(keep.model.repo)}", f"revision = {_text(keep.model.revision)}"]
    lines += ["", "[image]", f"registry = {_text(keep.image.registry)}"]
    lines += [f"public_key = {_text(keep.image.public_key)}"]
    if proposal.profile == "pd":
        prefill, decode = proposal.roles
        lines += _role(prefill, uuids)
        lines += [
            f"chunked_prefill_size = {keep.prefill.chunked_prefill_size}",
            f"extra_arguments = {_text(keep.prefill.extra_arguments)}",
        ]
        lines += _role(decode, uuids)
        lines += [
            f"max_running_requests = {keep.decode.max_running_requests}",
            f"extra_arguments = {_text(keep.decode.extra_arguments)}",
        ]
        lines += ["", "[engine]", f"context_length = {keep.engine.context_length}"]
        if proposal.memory:
            lines.append(f"# {memory_line(proposal)}.")
        lines += [
            f"memory_fraction = {keep.engine.memory_fraction}",
            f"speculation = {_text(keep.engine.speculation)}",
        ]
    lines += [
        "",
        "[router]",
        f"bind = {_text(keep.router.bind)}",
        f"port = {keep.router.port}",
        f"api_key_file = {_text(keep.router.api_key_file)}",
        f"extra_arguments = {_text(keep.router.extra_arguments)}",
        "",
        "[variables]",
    ]
    proposed = {setting.name for setting in proposal.settings}
    for setting in proposal.settings:
        lines += [f"# {setting.reason[:1].upper()}{setting.reason[1:]}.", f"{setting.name} = {_value(setting.value)}"]
    lines += [f"{name} = {_value(value)}" for name, value in keep.variables.items() if name not in proposed]
    return "\n".join(lines) + "\n"


def _role(role: RolePlan, uuids: bool) -> list[str]:
    names = [gpu.uuid if uuids and gpu.uuid else gpu.index for gpu in role.gpus]
    indices = ", ".join(str(gpu.index) for gpu in role.gpus)
    return [
        "",
        f"[{role.name}]",
        f"# GPUs {indices} of nvidia-smi, the nearest to each other on NUMA node {role.numa_node}.",
        "gpus = [",
        *(f"    {_value(name)}," for name in names),
        "]",
        f"numa_node = {role.numa_node}",
        "# Whole cores of that node; the rest of it is left to the system and the router.",
        f"cpus = {_text(format_cpu_list(list(role.cpus)))}",
    ]


def memory_line(proposal: Proposal) -> str:
    """The memory plan of one GPU in one line."""
    plan = proposal.memory
    if plan is None:
        return "no GPU memory to plan"
    total, weights, cache, rest = (
        f"{size / 1024**3:.0f}" for size in (plan.total, plan.weights, plan.kv_cache, plan.rest)
    )
    return (
        f"Of {total} GiB a GPU about {weights} hold weights, {cache} KV cache ({plan.tokens / 1e6:.1f} million tokens, "
        f"estimated), {rest} activations and CUDA graphs"
    )


def _text(value: str) -> str:
    """A TOML basic string; JSON's escapes are a subset of TOML's but for the delete character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: str | int | float) -> str:
    return _text(value) if isinstance(value, str) else str(value)
