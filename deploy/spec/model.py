"""What `deploy.toml` may say. Every default here is the one used when a key is left out."""

import ipaddress
import re
from typing import Annotated, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from deploy.spec.profiles import ENGINES, Profile

Transport = Literal["isolated", "p2p"]
Variant = Literal["mxfp4", "nvfp4"]
MoeBackend = Literal["auto", "flashinfer_mxfp4", "flashinfer_cutlass", "marlin", "humming"]
CDI_KIND = "nvidia.com/gpu"
# compose.yaml lists this many devices a role.
GPUS_PER_ROLE = 4
REPLICA_LAYOUTS = {2: 4, 4: 2}
"""How many engines at most, by the GPUs of each: compose.replicas.yaml and compose.replicas-tp4.yaml."""
MOE_BACKENDS: dict[Variant, tuple[MoeBackend, ...]] = {
    "mxfp4": ("flashinfer_mxfp4", "marlin", "humming"),
    "nvfp4": ("flashinfer_cutlass", "marlin"),
}
"""What SGLang 0.5.23 has for the experts of each checkpoint on sm_120, its default first.

Read from `Fp8Config.get_quant_method` (layers/quantization/fp8.py) and `ModelOptNvFp4FusedMoEMethod`
(modelopt_quant.py). `cutlass` means FP8 experts there and is refused for NVFP4; the TensorRT-LLM runners, which it
takes by itself for an NVFP4 checkpoint, are made for sm_100 alone.
"""

REGISTRY = r"(https?://)?([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:\d{1,5})?((/[a-z0-9]+([._-]+[a-z0-9]+)*)*)/?"

GpuName = Annotated[str, StringConstraints(pattern=r"^(GPU-[0-9a-fA-F-]+|[\w.-]+/[\w.-]+=[\w.:-]+)$")]
Gpu = Annotated[int, Field(ge=0, le=255)] | GpuName
CpuSet = Annotated[str, StringConstraints(pattern=r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$")]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
PositiveInt = Annotated[int, Field(ge=1)]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Section):
    """The folder with config.json, tokenizer and safetensors shards, and the name clients ask for.

    `repo` and `revision` say where on a hub its files come from; both empty: from nowhere but the folder. `variant` is
    the format of the experts' weights.
    """

    path: Annotated[str, StringConstraints(min_length=1)] = "model"
    name: Annotated[str, StringConstraints(pattern=r"^[\w./:-]+$")] = "deepseek-v4-flash"
    repo: Annotated[str, StringConstraints(pattern=r"^([\w.-]+/[\w.-]+)?$")] = ""
    revision: str = ""
    variant: Variant = "mxfp4"

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
    """Settings that are equal in all engines. `context_length` is prompt plus answer, in tokens.

    `draft_path` is DSpark's draft model where the model's folder does not hold it; `speculation_steps` is how many
    tokens EAGLE guesses ahead.
    """

    context_length: PositiveInt = 131072
    memory_fraction: Fraction = 0.85
    speculation: Literal["none", "eagle", "dspark"] = "none"
    draft_path: str = ""
    speculation_steps: Annotated[int, Field(ge=1, le=8)] = 3
    moe_backend: MoeBackend = "auto"
    nccl: Literal["auto", "ll_ring"] = "auto"
    pcie_ipc_all_reduce: bool = False


class Router(Section):
    """The one published port.

    `api_key_file` holds the keys that clients must send, `KEY` or `KEY NAME` a line; empty: no key. With keys HAProxy
    stands before the router; the limits are for each key, 0 is none. `tls_certificate` (with its chain) and `tls_key`
    are PEM files.
    """

    bind: str = "127.0.0.1"
    port: Port = 30000
    api_key_file: str = ""
    requests_per_minute: Annotated[int, Field(ge=0)] = 0
    concurrent_requests: Annotated[int, Field(ge=0)] = 0
    tls_certificate: str = ""
    tls_key: str = ""
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

    @model_validator(mode="after")
    def _the_front_knows_who_asks(self) -> Self:
        if bool(self.tls_certificate) != bool(self.tls_key):
            missing = "tls_key" if self.tls_certificate else "tls_certificate"
            raise _refusal(
                f"no {missing}", "a certificate is of use only with its private key", f"set router.{missing}", missing
            )
        wants = ("tls_certificate", "requests_per_minute", "concurrent_requests")
        for key in wants:
            if getattr(self, key) and not self.api_key_file:
                raise _refusal(
                    f"{key} without API keys",
                    "it is the front's, which serves nobody without a key",
                    "set router.api_key_file too",
                    key,
                )
        return self

    @property
    def front(self) -> bool:
        """Whether HAProxy stands before the router."""
        return bool(self.api_key_file)


class Metrics(Section):
    """One page with the metrics of all roles and of the controller, on loopback alone.

    `port` 0 is no page. `prometheus_image`, by digest, adds a Prometheus that reads it, on `prometheus_port` of
    loopback.
    """

    port: Annotated[int, Field(ge=0, le=65535)] = 0
    prometheus_image: Annotated[str, StringConstraints(pattern=r"^([\w./:-]+@sha256:[0-9a-f]{64})?$")] = ""
    prometheus_port: Port = 9090

    @model_validator(mode="after")
    def _prometheus_has_something_to_read(self) -> Self:
        if self.prometheus_image and not self.port:
            raise _refusal(
                "Prometheus without a page of metrics",
                "it would have nothing to read",
                "set metrics.port, for example 9400",
                "prometheus_image",
            )
        return self


class Winner(Section):
    """A setting that won, with what it was held against. The ratios are of output throughput, candidate over former."""

    setting: Annotated[str, StringConstraints(min_length=1)]
    was: str
    now: str
    ratio: Annotated[float, Field(gt=0)]
    at_least: Annotated[float, Field(gt=0)]
    pairs: PositiveInt
    answers: Annotated[float, Field(ge=0, le=1)]


class Tuned(Section):
    """What `deploy tune` wrote: who signed which settings off, where, on what, by which measurements.

    `now` of a winner is what its key must still say; `results` is the report's file and `results_sha256` its hash.
    """

    by: str
    at: str
    host: str
    gpu: str
    image: str
    workload: str
    results: str
    results_sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    winner: tuple[Winner, ...]


class Spec(Section):
    """All of `deploy.toml`."""

    profile: Profile = "pd"
    transport: Transport = "isolated"
    model: Model = Model()
    image: Image = Image()
    prefill: Prefill = Prefill()
    decode: Decode = Decode()
    replica: tuple[Role, ...] = ()
    engine: Engine = Engine()
    router: Router = Router()
    metrics: Metrics = Metrics()
    variables: dict[VariableName, str | int | float] = Field(default_factory=dict)
    tuned: Tuned | None = None

    @field_validator("replica", mode="before")
    @classmethod
    def _array_of_tables(cls, replica: object) -> object:
        if isinstance(replica, dict):
            raise _refusal("one table", "there can be several replicas", "write [[replica]] with two brackets")
        return replica

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
        checks = {
            "pd": (_equal_tensor_parallel, _four_gpus, _gpus_apart, _no_speculation, *_ENGINE_CHECKS),
            "replicas": (_some_replica, _equal_replicas, _known_layout, _gpus_apart, _isolated, *_ENGINE_CHECKS),
            "cpu": (),
        }
        for check in checks[self.profile]:
            check(self)
        return self

    def at(self, key: str) -> object:
        """The value of a dotted key, None where there is none."""
        place: object = self
        for part in key.split("."):
            place = (
                cast("dict[str, object]", place).get(part) if isinstance(place, dict) else getattr(place, part, None)
            )
        return place

    @property
    def roles(self) -> dict[str, Role]:
        """The engines that get GPUs, by the name of their service in the compose files."""
        if self.profile == "pd":
            return {"prefill": self.prefill, "decode": self.decode}
        if self.profile == "replicas":
            return dict(zip(ENGINES["replicas"], self.replica, strict=False))
        return {}

    @property
    def gpus_per_engine(self) -> int:
        """Tensor-parallel size; 0 without GPUs."""
        return next((len(role.gpus) for role in self.roles.values()), 0)

    @property
    def moe_backend(self) -> MoeBackend:
        """The one that runs the experts."""
        chosen = self.engine.moe_backend
        return MOE_BACKENDS[self.model.variant][0] if chosen == "auto" else chosen


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
    owners: dict[str, str] = {}
    for name, role in spec.roles.items():
        devices = list(map(cdi_device, role.gpus))
        if shared := sorted(set(devices) & set(owners)):
            raise _refusal(
                f"{owners[shared[0]]} and {name} both have {', '.join(shared)}",
                "each engine takes nearly all memory of its GPUs",
                "give each GPU to one engine",
                *_key(spec, name),
                "gpus",
            )
        owners |= dict.fromkeys(devices, name)


def _key(spec: Spec, name: str) -> tuple[str | int, ...]:
    """Where an engine's table stands in the file."""
    return ("replica", list(spec.roles).index(name)) if spec.profile == "replicas" else (name,)


def _some_replica(spec: Spec) -> None:
    if not spec.replica:
        raise _refusal(
            "profile replicas without a [[replica]]",
            "each [[replica]] is one engine with its GPUs",
            "deploy init proposes them for this host; or add [[replica]] with gpus = [0, 1] and numa_node = 0",
            "profile",
        )


def _equal_replicas(spec: Spec) -> None:
    for number, replica in enumerate(spec.replica[1:], 1):
        if len(replica.gpus) != spec.gpus_per_engine:
            raise _refusal(
                f"{len(replica.gpus)} GPUs here and {spec.gpus_per_engine} in the first [[replica]]",
                "the router spreads requests evenly, so that the weakest engine would set the pace",
                "give every [[replica]] the same number of GPUs",
                *("replica", number, "gpus"),
            )


def _known_layout(spec: Spec) -> None:
    size, number = spec.gpus_per_engine, len(spec.replica)
    most = REPLICA_LAYOUTS.get(size)
    if most is None:
        raise _refusal(
            f"engines of {size} GPUs",
            "one GPU does not hold the weights, and more than four never hang on one NUMA node of such a host",
            "list 2 or 4 GPUs in each [[replica]]",
            *("replica", 0, "gpus"),
        )
    if number > most:
        raise _refusal(
            f"{number} engines of {size} GPUs",
            f"the compose files have {most} engines of {size} GPUs",
            f"keep at most {most} [[replica]]",
            *("replica", most),
        )


def _isolated(spec: Spec) -> None:
    if spec.transport != "isolated":
        raise _refusal(
            f"transport {spec.transport!r} with profile replicas",
            "each engine keeps its own KV cache: nothing travels",
            'set transport = "isolated"',
            "transport",
        )


def _draft_wanted(spec: Spec) -> None:
    if spec.engine.draft_path and spec.engine.speculation != "dspark":
        raise _refusal(
            f"a draft model with speculation {spec.engine.speculation!r}",
            "only DSpark has a draft model of its own; EAGLE's is a layer of the model",
            'remove draft_path, or set engine.speculation = "dspark"',
            *("engine", "draft_path"),
        )


def _moe_backend_fits(spec: Spec) -> None:
    allowed = MOE_BACKENDS[spec.model.variant]
    if spec.moe_backend not in allowed:
        raise _refusal(
            f"{spec.moe_backend} with the {spec.model.variant} checkpoint",
            f"on this GPU SGLang runs its experts with {', '.join(allowed)}",
            f'set engine.moe_backend = "{allowed[0]}", or correct model.variant',
            *("engine", "moe_backend"),
        )


def _no_nvfp4_draft(spec: Spec) -> None:
    if spec.model.variant == "nvfp4" and spec.engine.speculation != "none":
        raise _refusal(
            f"speculation {spec.engine.speculation!r} with the nvfp4 checkpoint",
            "its draft layers stay MXFP4, and SGLang gives these to a TensorRT-LLM kernel that sm_120 has not",
            'set engine.speculation = "none", or serve the mxfp4 checkpoint',
            *("engine", "speculation"),
        )


_ENGINE_CHECKS = (_draft_wanted, _moe_backend_fits, _no_nvfp4_draft)


def _no_speculation(spec: Spec) -> None:
    reason = "speculative decoding crashes or answers wrongly with separate prefill and decode (sglang#31466, #38819)"
    fix = 'set engine.speculation = "none"'
    if spec.engine.speculation != "none":
        raise _refusal(f"speculation {spec.engine.speculation!r} with profile pd", reason, fix, "engine", "speculation")
    for name, role in (("prefill", spec.prefill), ("decode", spec.decode)):
        if re.search(r"--speculative", role.extra_arguments):
            raise _refusal("a --speculative… argument with profile pd", reason, "remove it", name, "extra_arguments")


def _refusal(what: str, why: str, fix: str, *key: str | int) -> PydanticCustomError:
    """A value that is well-formed and still refused; `key` leads from the validated section to the culprit."""
    return PydanticCustomError("refused", "{what}", {"what": what, "why": why, "fix": fix, "key": key})
