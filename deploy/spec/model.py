"""What `deploy.toml` may say. Every default here is the one used when a key is left out.

A key's description is the comment above it in a deploy.toml; a key without one shares that of the key before.
"""

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
Gpus = Annotated[
    tuple[Gpu, ...],
    Field(
        description='By index (as in nvidia-smi), by UUID ("GPU-…") or by CDI device name. UUIDs survive a change of '
        "slots."
    ),
]
NumaNode = Annotated[int, Field(ge=0, description="The NUMA node that all of them hang on (nvidia-smi topo -m).")]
CpuSet = Annotated[str, StringConstraints(pattern=r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$")]
Fraction = Annotated[float, Field(gt=0, lt=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
PositiveInt = Annotated[int, Field(ge=1)]
VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Z0-9_]*$")]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(Section):
    """What is served."""

    path: Annotated[str, StringConstraints(min_length=1)] = Field(
        default="model", description="Folder with config.json, the tokenizer and every safetensors shard."
    )
    name: Annotated[str, StringConstraints(pattern=r"^[\w./:-]+$")] = Field(
        default="deepseek-v4-flash", description='The name that clients put into "model".'
    )
    repo: Annotated[str, StringConstraints(pattern=r"^([\w.-]+/[\w.-]+)?$")] = Field(
        default="",
        description='Where on the hub its files come from, "OWNER/NAME" and the commit\'s 40 digits. Empty: only the '
        "folder counts.",
    )
    revision: str = ""
    variant: Variant = Field(
        default="mxfp4",
        description='How its experts are stored: "mxfp4" (as DeepSeek publishes it) or "nvfp4" (as NVIDIA converted '
        "it).",
    )

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
    """The part of the host that one engine gets."""

    gpus: Gpus
    numa_node: NumaNode
    cpus: CpuSet = Field(default="", description='CPU cores of that node, for example "0-31,64-95". Empty: all.')
    extra_arguments: str = Field(default="", description="Appended to the engine's command line as it is.")

    @field_validator("gpus")
    @classmethod
    def _all_different(cls, gpus: tuple[Gpu, ...]) -> tuple[Gpu, ...]:
        if len(set(map(cdi_device, gpus))) != len(gpus):
            raise _refusal("a GPU is listed twice", "each rank needs a GPU of its own", "list each GPU once")
        return gpus


class Image(Section):
    """Where the engine's image comes from."""

    registry: Annotated[str, StringConstraints(pattern=f"^({REGISTRY})?$")] = Field(
        default="",
        description='Registry that holds the engine\'s image, "HOST[:PORT][/PATH]"; http:// before it for one without '
        "TLS. `deploy up` takes the image from this host, else from there if it is the locked one, else builds it. "
        "Empty: no registry.",
    )
    public_key: str = Field(
        default="",
        description="cosign's public key file. With one, an image without that key's signature is refused. Empty: none "
        "is asked for.",
    )

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
    """The engine that reads prompts."""

    gpus: Gpus = (0, 1, 2, 3)
    numa_node: NumaNode = 0
    chunked_prefill_size: PositiveInt = Field(
        default=8192,
        description="Long prompts are cut into pieces of this many tokens, which bounds the memory for activations.",
    )


class Decode(Role):
    """The engine that writes answers."""

    gpus: Gpus = (4, 5, 6, 7)
    numa_node: NumaNode = 1
    max_running_requests: PositiveInt = Field(
        default=64, description="Requests decoded together at most; also the largest CUDA graph."
    )


class Engine(Section):
    """Settings that are equal in all engines."""

    context_length: PositiveInt = Field(
        default=131072,
        description="Longest prompt plus answer, in tokens. Equal in all engines, like everything in this table.",
    )
    memory_fraction: Fraction = Field(
        default=0.85,
        description="Share of GPU memory for weights and KV cache; the rest is for activations and CUDA graphs. "
        "Engines of two GPUs want 0.9: `deploy config` shows what remains.",
    )
    speculation: Literal["none", "eagle", "dspark"] = Field(
        default="none",
        description='Only "none" with profile pd: the pinned SGLang cannot speculate with separate roles. With '
        'replicas also "eagle" (the model\'s own MTP layer guesses speculation_steps tokens ahead) and "dspark" (a '
        "draft model guesses a block).",
    )
    draft_path: str = Field(
        default="", description="Folder of DSpark's draft model. Empty: it is in the model's folder."
    )
    speculation_steps: Annotated[int, Field(ge=1, le=8)] = Field(
        default=3, description='How many tokens "eagle" guesses ahead, 1 to 8.'
    )
    moe_backend: MoeBackend = Field(
        default="auto",
        description='What runs the experts. "auto": flashinfer_mxfp4 for mxfp4 (also marlin, humming), '
        "flashinfer_cutlass for nvfp4 (also marlin).",
    )
    nccl: Literal["auto", "ll_ring"] = Field(
        default="auto",
        description='"ll_ring": NCCL\'s LL protocol on rings alone. "auto": NCCL chooses among LL and Simple, rings '
        "and trees.",
    )
    pcie_ipc_all_reduce: bool = Field(
        default=False,
        description="true: SGLang's all-reduce over PCIe without NCCL; faster for small messages, hangs on some boards "
        "across host bridges.",
    )


class Router(Section):
    """The one published port."""

    bind: str = Field(default="127.0.0.1", description="Anything but a loopback address needs API keys.")
    port: Port = Field(default=30000, description="Port of the one endpoint.")
    api_key_file: str = Field(
        default="",
        description='File with the keys that clients send as "Authorization: Bearer KEY": `KEY` or `KEY NAME` a line. '
        "Empty: no key. With keys HAProxy stands before the router (docs/security.md).",
    )
    requests_per_minute: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Of each key, over the last minute and at one moment; more gets 429. 0: no limit."
    )
    concurrent_requests: Annotated[int, Field(ge=0)] = 0
    tls_certificate: str = Field(
        default="", description="PEM files, the certificate with its chain; both or none. Needs api_key_file."
    )
    tls_key: str = ""
    extra_arguments: str = Field(default="", description="Appended to the router's command line as it is.")

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
    """One page with the metrics of all roles and of the controller, on loopback alone."""

    port: Annotated[int, Field(ge=0, le=65535)] = Field(
        default=0,
        description="Port on loopback of one page with the metrics of all roles, for Prometheus "
        "(docs/observability.md). 0: no page.",
    )
    prometheus_image: Annotated[str, StringConstraints(pattern=r"^([\w./:-]+@sha256:[0-9a-f]{64})?$")] = Field(
        default="",
        description='"NAME@sha256:…": also a Prometheus that reads it and knows the alerts, on prometheus_port of '
        "loopback.",
    )
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

    profile: Profile = Field(
        default="pd",
        description='"pd": prefill and decode on eight GPUs. "replicas": one to four engines that each do both, on two '
        'GPUs or more; a [[replica]] each. "cpu": the three services of pd with a tiny generated model and no GPU; of '
        "this file only [image], [router] and [variables] count then.",
    )
    transport: Transport = Field(
        default="isolated",
        description='How the KV cache travels from prefill to decode: "isolated" (each container sees its own GPUs '
        'only) or "p2p" (both see all GPUs, so that UCX can copy from GPU to GPU).',
    )
    model: Model = Model()
    image: Image = Image()
    prefill: Prefill = Prefill()
    decode: Decode = Decode()
    replica: tuple[Role, ...] = ()
    engine: Engine = Engine()
    router: Router = Router()
    metrics: Metrics = Metrics()
    variables: dict[VariableName, str | int | float] = Field(
        default_factory=dict,
        description='Any other variable of compose.yaml, for example NCCL_DEBUG = "INFO". Variables of the shell are '
        "ignored.",
    )
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
