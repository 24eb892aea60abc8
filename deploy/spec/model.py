"""What `deploy.toml` may say. Every default here is the one used when a key is left out."""

import ipaddress
import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

Profile = Literal["pd", "cpu", "replicas"]
Transport = Literal["isolated", "p2p"]
CDI_KIND = "nvidia.com/gpu"
# compose.yaml lists this many devices a role.
GPUS_PER_ROLE = 4

REGISTRY = r"(https?://)?([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:\d{1,5})?((/[a-z0-9]+([._-]+[a-z0-9]+)*)*)/?"

GpuName = Annotated[str, StringConstraints(pattern=r"^(GPU-[0-9a-fA-F-]+|[\w.-]+/[\w.-]+=[\w.:-]+)$")]
Gpu = Annotated[int, Field(ge=0, le=255)] | GpuName
CpuSet = Annotated[str, StringConstraints(pattern=r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$")]
Fraction = Annotated[float, Field(gt=0, lt=1)]
PositiveInt = Annotated[int, Field(ge=1)]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Section):
    """The folder with config.json, tokenizer and safetensors shards, and the name clients ask for.

    `repo` and `revision` say where on a hub its files come from; both empty: from nowhere but the folder.
    """

    path: Annotated[str, StringConstraints(min_length=1)] = "model"
    name: Annotated[str, StringConstraints(pattern=r"^[\w./:-]+$")] = "deepseek-v4-flash"
    repo: Annotated[str, StringConstraints(pattern=r"^([\w.-]+/[\w.-]+)?$")] = ""
    revision: str = ""

    @model_validator(mode="after")
    def _one_revision(self) -> Self:
        if self.repo and not re.fullmatch(r"[0-9a-f]{40}", self.revision):
            raise _refusal(
                f"{self.revision!r} is not a revision",
                "a branch or tag moves, so that two hosts could get different weights",
                "the commit's 40 hexadecimal digits, as the hub shows them under Files",
                "revision",
            )
        if self.revision and not self.repo:
            raise _refusal("a revision without a repository", "it names no files", "set model.repo too", "revision")
        return self


class Role(Section):
    """The part of the host that one engine gets.

    `gpus` are indices as in nvidia-smi, UUIDs or CDI device names; `numa_node` is the node they all hang on; `cpus` is
    a cpuset such as "0-31,64-95" (empty: all).
    """

    gpus: tuple[Gpu, ...]
    numa_node: Annotated[int, Field(ge=0)]
    cpus: CpuSet = ""
    extra_arguments: str = ""

    @field_validator("gpus")
    @classmethod
    def _all_different(cls, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        if len(set(map(cdi_device, gpus))) != len(gpus):
            raise _refusal("a GPU is listed twice", "each rank needs a GPU of its own", "list each GPU once")
        return gpus


class Image(Section):
    """The registry that holds the engine's image, `[http://]HOST[:PORT][/PATH]`; empty: it is built here.

    `public_key` is a cosign public key file; with one, an image is run only if it carries that key's signature.
    """

    registry: Annotated[str, StringConstraints(pattern=f"^({REGISTRY})?$")] = ""
    public_key: str = ""

    @model_validator(mode="after")
    def _signatures_lie_in_the_registry(self) -> Self:
        if self.public_key and not self.registry:
            raise _refusal(
                "a public key without a registry",
                "signatures lie beside the image in its registry",
                "set image.registry too",
                "public_key",
            )
        return self


class Prefill(Role):
    """The engine that reads prompts. `chunked_prefill_size` is in tokens."""

    gpus: tuple[Gpu, ...] = (0, 1, 2, 3)
    numa_node: Annotated[int, Field(ge=0)] = 0
    chunked_prefill_size: PositiveInt = 8192


class Decode(Role):
    """The engine that writes answers. `max_running_requests` is also the largest CUDA graph."""

    gpus: tuple[Gpu, ...] = (4, 5, 6, 7)
    numa_node: Annotated[int, Field(ge=0)] = 1
    max_running_requests: PositiveInt = 64


class Engine(Section):
    """Settings that are equal in both roles. `context_length` is prompt plus answer, in tokens."""

    context_length: PositiveInt = 131072
    memory_fraction: Fraction = 0.85
    speculation: Literal["none", "eagle", "dspark"] = "none"


class Router(Section):
    """The one published port. `api_key_file` holds the key that clients must send; empty: no key."""

    bind: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] = 30000
    api_key_file: str = ""
    extra_arguments: str = ""

    @field_validator("bind")
    @classmethod
    def _address(cls, bind: str) -> str:
        try:
            ipaddress.ip_address(bind)
        except ValueError as error:
            raise _refusal(
                f"{bind!r} is not an IP address", "Docker publishes a port on an address", 'for example "127.0.0.1"'
            ) from error
        return bind

    @model_validator(mode="after")
    def _key_when_public(self) -> Self:
        if not ipaddress.ip_address(self.bind).is_loopback and not self.api_key_file:
            raise _refusal(
                f"{self.bind} is reachable from other machines and no API key is set",
                "whoever reaches the port could use the model (Docker's published ports bypass ufw)",
                'set router.api_key_file, or bind to "127.0.0.1"',
                "bind",
            )
        return self


class Spec(Section):
    """All of `deploy.toml`."""

    profile: Profile = "pd"
    transport: Transport = "isolated"
    model: Model = Model()
    image: Image = Image()
    prefill: Prefill = Prefill()
    decode: Decode = Decode()
    engine: Engine = Engine()
    router: Router = Router()
    variables: dict[VariableName, str | int | float] = Field(default_factory=dict)

    @field_validator("profile")
    @classmethod
    def _profile_exists(cls, profile: Profile) -> Profile:
        if profile == "replicas":
            raise _refusal(
                "the replicas profile (aggregated engines with speculative decoding) is not available",
                "this version serves prefill and decode in separate containers only",
                'use "pd" on the 8-GPU host or "cpu" on a machine without GPUs',
            )
        return profile

    @field_validator("variables")
    @classmethod
    def _no_expandable_segments(cls, variables: dict[str, str | int | float]) -> dict[str, str | int | float]:
        for name, value in variables.items():
            if "ALLOC_CONF" in name or "expandable_segments" in str(value):
                raise _refusal(
                    "the CUDA allocator's configuration cannot be set",
                    "expandable_segments cuts KV transfers over NIXL to a fraction of a percent of their speed",
                    f"remove {name}",
                    name,
                )
        return variables

    @model_validator(mode="after")
    def _topology(self) -> Self:
        if self.profile == "pd":
            for check in (_equal_tensor_parallel, _four_gpus, _gpus_apart, _no_speculation):
                check(self)
        return self


def cdi_device(gpu: Gpu) -> str:
    """The CDI name of a GPU given by index, UUID or CDI name."""
    return gpu if isinstance(gpu, str) and "=" in gpu else f"{CDI_KIND}={gpu}"


def _equal_tensor_parallel(spec: Spec) -> None:
    prefill, decode = len(spec.prefill.gpus), len(spec.decode.gpus)
    if prefill != decode:
        raise _refusal(
            f"prefill has {prefill} GPUs and decode {decode}",
            "the KV transfer cannot re-shard this model's cache between unequal tensor-parallel sizes",
            "give both roles the same number of GPUs",
            "decode",
            "gpus",
        )


def _four_gpus(spec: Spec) -> None:
    if len(spec.prefill.gpus) != GPUS_PER_ROLE:
        raise _refusal(
            f"{len(spec.prefill.gpus)} GPUs a role",
            f"compose.yaml gives each role {GPUS_PER_ROLE} devices",
            f"list {GPUS_PER_ROLE} GPUs for each role",
            "prefill",
            "gpus",
        )


def _gpus_apart(spec: Spec) -> None:
    shared = sorted(set(map(cdi_device, spec.prefill.gpus)) & set(map(cdi_device, spec.decode.gpus)))
    if shared:
        raise _refusal(
            f"prefill and decode both have {', '.join(shared)}",
            "each engine takes nearly all memory of its GPUs",
            "give each GPU to one role",
            "decode",
            "gpus",
        )


def _no_speculation(spec: Spec) -> None:
    reason = "speculative decoding crashes or answers wrongly with separate prefill and decode (sglang#31466, #38819)"
    fix = 'set engine.speculation = "none"'
    if spec.engine.speculation != "none":
        raise _refusal(f"speculation {spec.engine.speculation!r} with profile pd", reason, fix, "engine", "speculation")
    for name, role in (("prefill", spec.prefill), ("decode", spec.decode)):
        if re.search(r"--speculative", role.extra_arguments):
            raise _refusal("a --speculative… argument with profile pd", reason, "remove it", name, "extra_arguments")


def _refusal(what: str, why: str, fix: str, *key: str) -> PydanticCustomError:
    """A value that is well-formed and still refused; `key` leads from the validated section to the culprit."""
    return PydanticCustomError("refused", "{what}", {"what": what, "why": why, "fix": fix, "key": key})
