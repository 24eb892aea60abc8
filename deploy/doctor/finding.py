"""Findings, and what the checks need to know besides the host."""

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict

from deploy.spec.model import Spec
from deploy.spec.profiles import Profile


class Severity(StrEnum):
    """How bad it is. `error`: serving fails or answers wrongly. `warning`: slow or fragile. `note`: good to know."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"

    @property
    def rank(self) -> int:
        """0 is the worst."""
        return list(Severity).index(self)


class Problem(BaseModel):
    """What one check found.

    `commands` mend it, in order; `fix` says it in words or says what no command can do; `look` is a command that
    shows more and changes nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    severity: Severity
    seen: str
    why: str
    fix: str = ""
    commands: tuple[str, ...] = ()
    look: str = ""
    link: str = ""


class Finding(Problem):
    """A problem with the check that found it."""

    id: str
    group: str


class RoleNeeds(BaseModel):
    """What deploy.toml gives one role; GPUs by index, UUID or CDI name, all on one NUMA node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    gpus: tuple[int | str, ...]
    numa_node: int
    cpus: str = ""


class Needs(BaseModel):
    """What this host is to run. Left out: whatever fits the hardware.

    `image_bytes` is 0 once the image is there.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    profile: Profile | None = None
    transport: Literal["isolated", "p2p"] = "isolated"
    roles: tuple[RoleNeeds, ...] = ()
    bind: str = "127.0.0.1"
    port: int = 30000
    model_folder: str | None = None
    image_bytes: int = 0
    memlock: int = -1
    nofile: int = 1048576


def needs_of(spec: Spec, model_folder: str | None, image_bytes: int) -> Needs:
    """What a deploy.toml asks of the host.

    Args:
        model_folder: absolute path of the model, None if it is generated.
        image_bytes: room that building the image takes, 0 if it is there.
    """
    return Needs(
        profile=spec.profile,
        transport=spec.transport,
        roles=tuple(
            RoleNeeds(name=name, gpus=role.gpus, numa_node=role.numa_node, cpus=role.cpus)
            for name, role in spec.roles.items()
        ),
        bind=spec.router.bind,
        port=spec.router.port,
        model_folder=model_folder,
        image_bytes=image_bytes,
        memlock=int(spec.variables.get("MEMLOCK", -1)),
        nofile=int(spec.variables.get("NOFILE", 1048576)),
    )


def error(seen: str, why: str, fix: str = "", *commands: str, look: str = "", link: str = "") -> Problem:
    """A problem that stops serving."""
    return Problem(severity=Severity.ERROR, seen=seen, why=why, fix=fix, commands=commands, look=look, link=link)


def warning(seen: str, why: str, fix: str = "", *commands: str, look: str = "", link: str = "") -> Problem:
    """A problem that makes serving slow or fragile."""
    return Problem(severity=Severity.WARNING, seen=seen, why=why, fix=fix, commands=commands, look=look, link=link)


def note(seen: str, why: str, fix: str = "", *commands: str, look: str = "", link: str = "") -> Problem:
    """Something worth knowing."""
    return Problem(severity=Severity.NOTE, seen=seen, why=why, fix=fix, commands=commands, look=look, link=link)
