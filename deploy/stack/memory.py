"""The memory plan of the engines on this host, before anything is started."""

from collections.abc import Iterable

from deploy.host.report import Gpu
from deploy.spec.load import Problem, SpecError, SpecFile
from deploy.spec.memory import ASSUMED_MIB, MemoryPlan, least_fraction, plan_memory
from deploy.spec.model import CDI_KIND, Spec, cdi_device
from deploy.spec.positions import Position

MOST_FRACTION = 0.95
"""Beyond this no room remains for activations and CUDA graphs."""


def plan_on(spec: Spec, gpus: Iterable[Gpu]) -> tuple[MemoryPlan, str] | None:
    """Divide the memory of the smallest GPU that the spec names.

    Args:
        gpus: what the driver shows here.

    Returns:
        The plan, and where the GPU's size comes from; None if the profile has no GPUs.
    """
    if not spec.roles:
        return None
    sizes = {f"{CDI_KIND}={name}": gpu.memory_mib for gpu in gpus for name in (str(gpu.index), gpu.uuid) if name}
    wanted = [sizes.get(cdi_device(gpu)) for role in spec.roles.values() for gpu in role.gpus]
    known = [size for size in wanted if size]
    if known:
        return plan_memory(min(known), spec), "the smallest of these GPUs, as the driver says"
    return plan_memory(ASSUMED_MIB, spec), "96 GB assumed: the driver shows none of these GPUs here"


def require_memory(spec_file: SpecFile, plan: MemoryPlan) -> None:
    """Refuse what SGLang would refuse after minutes of loading.

    Raises:
        SpecError: weights and sliding windows leave no room for a KV cache.
    """
    if plan.fits:
        return
    spec = spec_file.spec
    fraction = least_fraction(plan, spec.engine.context_length)
    wider = "give each engine four GPUs" if spec.gpus_per_engine < 4 else "use larger GPUs"
    raise SpecError(
        spec_file.file,
        [
            Problem(
                spec_file.positions.get(("engine", "memory_fraction"))
                or spec_file.positions.get(("profile",))
                or Position(1, 1),
                "engine.memory_fraction",
                f"engine.memory_fraction: {spec.engine.memory_fraction} leaves no room for the KV cache",
                str(plan),
                f"set memory_fraction = {fraction:.2f}, or lower MAX_RUNNING_REQUESTS"
                if fraction <= MOST_FRACTION
                else f"lower MAX_RUNNING_REQUESTS, or {wider}",
            )
        ],
    )
