"""The image's bill of materials, from deploy.lock alone: the same lock gives the same bytes (CycloneDX, JSON)."""

# CycloneDX's classes are made by decorators that type checkers cannot follow.
# pyright: reportCallIssue=false, reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false, reportAttributeAccessIssue=false, reportArgumentType=false

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType, Pedigree
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packageurl import PackageURL

from deploy.image.inputs import IMAGE_NAME, SOURCE_DATE_EPOCH
from deploy.image.registry import Client, Manifest
from deploy.lock.engine import PACKAGE
from deploy.lock.model import EngineLock, Lock, dump

MEDIA_TYPE = "application/vnd.cyclonedx+json"
# Our own two packages and the stand-ins: what is hashed is a folder of files (deploy.lock.tree).
TREE = f"{IMAGE_NAME}:tree"
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, f"urn:{IMAGE_NAME}")


def make_sbom(lock: Lock) -> str:
    """List everything in the image with its hash: Debian packages, wheels, patches, our own packages.

    Args:
        lock: with its parts `rootfs`, `wheels` and `image`.
    """
    inputs = lock.image.inputs if lock.image else ""
    digest = lock.image.id.removeprefix("sha256:") if lock.image else ""
    image = Component(
        name=IMAGE_NAME,
        type=ComponentType.CONTAINER,
        version=inputs[:16] or None,
        bom_ref=f"{IMAGE_NAME}@{inputs[:16]}",
        hashes=[_sha256(digest)] if digest else None,
        properties=[Property(name=f"{IMAGE_NAME}:inputs", value=inputs)],
    )
    bom = Bom(
        # Not a random one and not the time of day: they would make each of them another.
        serial_number=uuid.uuid5(NAMESPACE, dump(lock)),
        metadata=BomMetaData(component=image, timestamp=datetime.fromtimestamp(SOURCE_DATE_EPOCH, UTC)),
        components=_components(lock),
    )
    bom.register_dependency(image, bom.components)
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1) + "\n"


def _components(lock: Lock) -> Iterator[Component]:
    if rootfs := lock.rootfs:
        for package in rootfs.package:
            qualifiers = {"arch": package.architecture, "distro": rootfs.suite}
            purl = PackageURL("deb", "debian", package.name, package.version, qualifiers)
            yield _component(package.name, package.version, purl, package.sha256)
    for name, wheel in lock.wheels.items():
        pedigree = _patches(lock.engine) if name == PACKAGE and lock.engine else None
        yield _component(name, wheel.version, PackageURL("pypi", None, name, wheel.version), wheel.sha256, pedigree)
    trees = {"sm120_kernels": lock.kernels.tree} if lock.kernels else {}
    if lock.runtime:
        trees |= {"engine_runtime": lock.runtime.engine_runtime, "cpu_standins": lock.runtime.cpu_standins}
    for name, tree in trees.items():
        yield Component(name=name, version=tree[:16], bom_ref=name, properties=[Property(name=TREE, value=tree)])


def _component(name: str, version: str, purl: PackageURL, sha256: str, pedigree: Pedigree | None = None) -> Component:
    hashes = [_sha256(sha256)]
    return Component(name=name, version=version, purl=purl, bom_ref=str(purl), hashes=hashes, pedigree=pedigree)


def _patches(engine: EngineLock) -> Pedigree | None:
    notes = [f"{patch.name}: {patch.title} (sha256 {patch.sha256})" for patch in engine.patch]
    return Pedigree(notes="\n".join(["Patched:", *notes])) if notes else None


def _sha256(content: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=content)


def sbom_tag(digest: str) -> str:
    """The tag beside an image that cosign looks for: `sha256-….sbom`."""
    return f"{digest.replace(':', '-')}.sbom"


def attach(client: Client, manifest: Manifest, sbom: str) -> str:
    """Put a bill of materials beside an image, which stays as it is: an artifact whose subject is the image.

    Returns:
        The tag that it lies under.
    """
    tag = sbom_tag(manifest.digest)
    client.put_artifact(tag, MEDIA_TYPE, sbom.encode(), manifest)
    return tag
