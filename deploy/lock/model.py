"""What deploy.lock says: one model for the whole, one for each part, and nothing that is not locked."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_serializer,
    model_validator,
)

from deploy.errors import DeployError
from deploy.lock.debian import RootfsLock
from deploy.lock.document import FILE_NAME, parse, render, replace_text
from deploy.validation import first_mistake

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# As Docker and the OCI specification write a content's address.
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Revision = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]


def _inside(path: str) -> str:
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise ValueError("names no file inside the folder")
    return path


InnerPath = Annotated[str, AfterValidator(_inside)]
_Value = TypeVar("_Value")


def _by_name(mapping: dict[str, _Value]) -> dict[str, _Value]:
    return dict(sorted(mapping.items()))


# In the order of the names, so that the same content gives the same text.
Named = Annotated[dict[str, _Value], AfterValidator(_by_name)]
Part = Literal[
    "rootfs", "python", "wheels", "engine", "kernels", "runtime", "model", "tiny_model", "host", "compose", "roles",
    "image", "tuned",
]  # fmt: skip
PARTS: tuple[Part, ...] = get_args(Part)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PythonLock(_Table):
    """The interpreter, by the Debian package that brings it, and the program that installs the wheels.

    Attributes:
        package: a package of the part `rootfs`, which has its hash.
        uv_lock: sha256 of uv.lock.
    """

    package: str
    version: str
    uv: str
    uv_sha256: Sha256
    uv_lock: Sha256


class LockedWheel(_Table):
    """The wheel of a package that the image installs; in the lock one line, `FILE#sha256=HASH`."""

    file: Annotated[str, StringConstraints(pattern=r"^[^-\s#]+-[^-\s#]+-[^\s#]+\.whl$")]
    sha256: Sha256

    @model_validator(mode="before")
    @classmethod
    def _read(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        file, _, sha256 = value.partition("#sha256=")
        return {"file": file, "sha256": sha256}

    @model_serializer
    def _write(self) -> str:
        return f"{self.file}#sha256={self.sha256}"

    @property
    def version(self) -> str:
        """From the file's name, whose second field it is (packaging.python.org, binary distribution format)."""
        return self.file.split("-")[1]


class LockedPatch(_Table):
    """One patch of the series. `files` are below site-packages."""

    name: str
    title: str
    sha256: Sha256
    files: tuple[InnerPath, ...]


class EngineLock(_Table):
    """SGLang as locked and as patched.

    Attributes:
        wheel: sha256 of SGLang's wheel.
        tree: hash of its files (`deploy.lock.tree`).
        patched_tree: the same after the whole patch series.
        patched: sha256 of each file that the series touches, after it; a removed file has none.
    """

    wheel: Sha256
    tree: Sha256
    patched_tree: Sha256
    patch: tuple[LockedPatch, ...] = ()
    patched: Annotated[dict[InnerPath, Sha256], AfterValidator(_by_name)] = Field(default_factory=dict)


class LockedHook(_Table):
    """A function of SGLang that the plug-in replaces.

    Attributes:
        target: its dotted path.
        op: the kernel that takes its place.
        switch: the environment variable that turns it on.
        upstream_sha256: of the source of the function it was written against.
    """

    target: str
    op: str
    switch: str
    upstream_sha256: Sha256


class KernelsLock(_Table):
    """The kernels' package: hash of its files, and its hooks."""

    tree: Sha256
    hook: tuple[LockedHook, ...] = ()


class RuntimeLock(_Table):
    """Hashes of the files that run around SGLang."""

    engine_runtime: Sha256
    cpu_standins: Sha256


class LockedFile(_Table):
    """One file of a model.

    Attributes:
        path: below the model's folder.
        size: bytes.
        sha256: of the whole file.
        sample: of a few blocks at fixed places (`deploy.model.hashing`), which is checked in no time; empty if the
            file was locked without reading it.
    """

    path: InnerPath
    size: int = Field(ge=0)
    sha256: Sha256
    sample: Sha256 | Literal[""] = ""


class ModelLock(_Table):
    """The files of a model. `repo` and `revision` are empty for one that comes from no hub."""

    repo: str = ""
    revision: Revision | Literal[""] = ""
    file: tuple[LockedFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.file)


class HostLock(_Table):
    """The least versions a host needs."""

    driver: str
    docker_engine: str
    docker_compose: str


class LockedRole(_Table):
    """What one container is started with, after deploy.toml and the compose files.

    Attributes:
        sha256: over the two others; what a person compares.
        arguments: of the engine or router, in order.
        environment: what is set beyond the image's own.
    """

    sha256: Sha256
    arguments: tuple[str, ...]
    environment: Named[str]


class LockedLayer(_Table):
    """One layer of the image.

    Attributes:
        diff_id: digest of the unpacked layer.
        size: its files in bytes, unpacked, as Docker counts them.
        blob: digest of the layer as a registry holds it; empty until the image was pushed.
        blob_size: bytes that a host without it has to fetch; 0 until then.
    """

    diff_id: Digest
    size: int = Field(ge=0)
    blob: Digest | Literal[""] = ""
    blob_size: int = Field(default=0, ge=0)


class LockedCache(_Table):
    """What the engines of one host compiled beyond the image, as a registry holds it (`deploy bake`).

    Attributes:
        gpu: the kind of GPU that it is for, or `cpu`.
        manifest: of the artifact.
        blob: its one layer, a compressed tar.
        size: of that, in bytes.
    """

    gpu: str = Field(pattern=r"^(sm_[0-9]{2,3}|cpu)$")
    manifest: Digest
    blob: Digest
    size: int = Field(ge=0)


class ImageLock(_Table):
    """The engine image: what decides it and, once it was built, what came out.

    Attributes:
        inputs: hash of everything that went in (`deploy.image.inputs`).
        environment: of what the large layers are made from.
        id: the image's configuration digest; empty until it was built.
        manifest: digest by which a registry holds it; empty until it was pushed.
        layer: from the lowest.
        cache: what was compiled beyond it, by kind of GPU.
    """

    inputs: Sha256
    environment: Sha256
    id: Digest | Literal[""] = ""
    manifest: Digest | Literal[""] = ""
    layer: tuple[LockedLayer, ...] = ()
    cache: tuple[LockedCache, ...] = ()

    @model_validator(mode="after")
    def _built_or_not(self) -> Self:
        if bool(self.id) != bool(self.layer):
            raise ValueError("an image has an id and layers, or neither")
        return self


class TunedLock(_Table):
    """What `deploy tune` signed off in deploy.toml.

    Attributes:
        results_sha256: of the report with every trial.
        setting: each key with the value that won.
    """

    by: str
    at: str
    host: str
    gpu: str
    image: str
    results_sha256: Sha256
    setting: Named[str]


class Lock(_Table):
    """All of deploy.lock. A part that was never made is None or empty."""

    version: Literal[1] = 1
    rootfs: RootfsLock | None = None
    python: PythonLock | None = None
    wheels: Named[LockedWheel] = Field(default_factory=dict)
    engine: EngineLock | None = None
    kernels: KernelsLock | None = None
    runtime: RuntimeLock | None = None
    model: ModelLock | None = None
    tiny_model: ModelLock | None = None
    host: HostLock | None = None
    compose: Named[Sha256] = Field(default_factory=dict)
    roles: Named[Named[LockedRole]] = Field(default_factory=dict)
    image: ImageLock | None = None
    tuned: TunedLock | None = None


def read_lock(repository: Path) -> Lock:
    """Read the repository's deploy.lock.

    Raises:
        DeployError: it is missing or damaged.
    """
    path = repository / FILE_NAME
    try:
        return load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DeployError(f"{FILE_NAME} is missing", f"no file {path}", "make it with `deploy lock`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DeployError(f"{FILE_NAME} cannot be read", str(error), f"git checkout {FILE_NAME}") from error


def write_lock(repository: Path, lock: Lock) -> None:
    """Replace the repository's deploy.lock in one step."""
    replace_text(repository / FILE_NAME, dump(lock))


def load(text: str, source: str = FILE_NAME) -> Lock:
    """Read a lock.

    Args:
        source: the file or revision that the text comes from, for messages.

    Raises:
        DeployError: it is not TOML, or not a lock that this version understands.
    """
    document = parse(text, source)
    try:
        return Lock.model_validate(document)
    except ValidationError as error:
        raise DeployError(
            f"{source} is not a lock that this version of deploy reads",
            first_mistake(error),
            f"restore it with `git checkout {FILE_NAME}`, or make it again with `deploy lock`",
        ) from error


def dump(lock: Lock) -> str:
    """Write a lock as text; the same lock gives the same bytes."""
    return render({"version": lock.version, **lock.model_dump(mode="json", exclude_defaults=True)})
