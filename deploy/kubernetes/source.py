"""What an export is made from: deploy.toml, deploy.lock and the compose files, held against each other first."""

import re
from dataclasses import dataclass
from pathlib import Path

from deploy.errors import DeployError, WrongInput
from deploy.image.locked import locked_image
from deploy.image.registry import NoRegistry, parse_registry
from deploy.kubernetes.cluster import MODEL_FOLDER, Cluster
from deploy.kubernetes.export import change_of, model_key, peers_key
from deploy.kubernetes.roles import Role, read_roles
from deploy.lock.model import Lock, ModelLock, read_lock
from deploy.spec.load import SpecFile
from deploy.spec.profiles import ROUTER
from deploy.stack.preview import preview_without_host
from deploy.stack.roles import locked_roles

# The grammar of distribution/reference: [HOST[:PORT]/]PATH[:TAG]@DIGEST.
_COMPONENT = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
BY_DIGEST = re.compile(
    rf"(?:(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(?::\d{{1,5}})?/)?{_COMPONENT}(?:/{_COMPONENT})*"
    r"(?::\w[\w.-]{0,127})?@sha256:[0-9a-f]{64}",
    re.ASCII,
)
NOWHERE = "the image is in no registry that a cluster could pull it from"


@dataclass(frozen=True)
class Wishes:
    """What the command line says; None where deploy.toml or a default decides.

    Attributes:
        folder: that will hold the manifests, for what has changed since the export before.
    """

    folder: Path
    namespace: str
    replicas: int
    image: str | None = None
    model_folder: str | None = None
    draft_folder: str | None = None


def prepare(root: Path, spec_file: SpecFile, wishes: Wishes) -> tuple[dict[str, Role], Cluster, Lock]:
    """Read everything that the manifests follow from.

    Args:
        root: the checkout.

    Raises:
        DeployError: deploy.lock is behind, or has no digest of the image in its registry.
        NoRegistry: deploy.toml names none.
        WrongInput: the image is not named by digest, or a folder not by an absolute path.
        HostError: there is no docker compose to ask.
    """
    spec = spec_file.spec
    # What was named wrongly is said before what is behind.
    name = _image_name(spec_file, wishes.image)
    model = _absolute("model", wishes.model_folder)
    draft = _absolute("draft", wishes.draft_folder or spec.engine.draft_path)
    lock = read_lock(root)
    roles = _roles(root, spec_file, lock)
    image = wishes.image or f"{name}@{_locked_digest(root, lock)}"
    engines = [role for name, role in roles.items() if name != ROUTER]
    cpu = spec.profile == "cpu"
    cluster = Cluster(
        profile=spec.profile,
        namespace=wishes.namespace,
        replicas=wishes.replicas,
        image=image,
        model_folder=model or (spec.model.path if Path(spec.model.path).is_absolute() and not cpu else MODEL_FOLDER),
        model=model_key(served_model(spec_file, lock)),
        peers=peers_key(image, engines),
        change=change_of(wishes.folder, lock),
        draft_folder=draft or None,
    )
    return roles, cluster, lock


def served_model(spec_file: SpecFile, lock: Lock) -> ModelLock | None:
    """The model that the engines serve, None if none is locked."""
    return lock.tiny_model if spec_file.spec.profile == "cpu" else lock.model


def _roles(root: Path, spec_file: SpecFile, lock: Lock) -> dict[str, Role]:
    """Each container as Compose has it, which must be what is locked."""
    spec = spec_file.spec
    config = preview_without_host(root, spec_file)
    roles = read_roles(config, spec)
    found, locked = locked_roles(config), lock.roles.get(spec.profile, {})
    if differing := sorted(name for name in found | locked if found.get(name) != locked.get(name)):
        raise DeployError(
            "deploy.lock is behind deploy.toml and the compose files",
            f"profile {spec.profile}: other arguments or variables for {', '.join(differing)} than it locks",
            f'set profile = "{spec.profile}" in {spec_file.file.name} if it says another, then deploy lock',
        )
    return roles


def _image_name(spec_file: SpecFile, named: str | None) -> str:
    """The image that the command line names, by digest, else its name in deploy.toml's registry."""
    if named is not None:
        if not BY_DIGEST.fullmatch(named):
            raise WrongInput(
                f"{named} is not an image by digest",
                "a tag may mean another image tomorrow, and on another node today",
                "HOST/NAME@sha256:… as `deploy push` prints it",
            )
        return named
    if not (address := spec_file.spec.image.registry):
        fix = "set registry under [image] in deploy.toml, then deploy push; or name the image with --image"
        raise NoRegistry(NOWHERE, f"{spec_file.file} has none under [image]", fix)
    return parse_registry(address).name


def _locked_digest(root: Path, lock: Lock) -> str:
    """The locked image's in its registry."""
    image = locked_image(root, lock)
    if not image.manifest:
        fix = "deploy push; or name the image with --image"
        raise DeployError(NOWHERE, "deploy.lock has no digest of it there", fix)
    return image.manifest


def _absolute(what: str, path: str | None) -> str:
    if path and not Path(path).is_absolute():
        raise WrongInput(
            f"{path} is not an absolute path",
            "it is a folder of every node, which knows nothing of the folder that this command runs in",
            f"--{what}-folder /absolute/path",
        )
    return path or ""
