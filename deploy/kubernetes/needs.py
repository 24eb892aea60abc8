"""What a copy of the system asks of a host in a cluster, from deploy.toml and deploy.lock alone."""

from deploy.doctor.cluster import ClusterNeeds
from deploy.errors import DeployError
from deploy.host.cluster import ClusterReport
from deploy.host.gpus import MINIMUM_DRIVER
from deploy.host.report import Unseen
from deploy.image.registry import Client, parse_registry
from deploy.kubernetes.cluster import MODEL_LABEL
from deploy.kubernetes.export import model_key
from deploy.kubernetes.pods import CPUS_PER_RANK, RANK_BYTES
from deploy.kubernetes.source import served_model
from deploy.lock.model import Lock
from deploy.spec.load import SpecFile

# Of /tmp and /dev/shm nothing is taken before it is written, so a host need not have them.
ENGINES_WITHOUT_GPU = 2


def cluster_needs(spec_file: SpecFile, lock: Lock) -> ClusterNeeds:
    """What one host must have for one copy."""
    spec = spec_file.spec
    ranks = sum(len(role.gpus) for role in spec.roles.values()) or ENGINES_WITHOUT_GPU
    layers = lock.image.layer if lock.image else ()
    return ClusterNeeds(
        profile=spec.profile,
        gpus=sum(len(role.gpus) for role in spec.roles.values()),
        processors=ranks * CPUS_PER_RANK,
        memory=ranks * RANK_BYTES,
        driver=lock.host.driver if lock.host else ".".join(map(str, MINIMUM_DRIVER)),
        image=lock.image.manifest if lock.image else "",
        image_bytes=sum(layer.size for layer in layers),
        model_label=(MODEL_LABEL, model_key(served_model(spec_file, lock))),
    )


def look_up_image(report: ClusterReport, spec_file: SpecFile, lock: Lock) -> ClusterReport:
    """Ask the registry, from here, for the image that the nodes would pull."""
    address, digest = spec_file.spec.image.registry, lock.image.manifest if lock.image else ""
    if not address or not digest:
        return report
    try:
        there = Client(parse_registry(address)).known(digest) is not None
    except DeployError as failure:
        unseen = Unseen(what="the image in its registry", why=failure.message, how="deploy pull")
        return report.model_copy(update={"unseen": (*report.unseen, unseen)})
    return report.model_copy(update={"image_in_registry": there})
