"""Checks of the Docker Engine and of how it hands out GPUs."""

from collections.abc import Iterator

from deploy.doctor.check import check
from deploy.doctor.checks.common import wants_gpus
from deploy.doctor.finding import Needs, Problem, error, note, warning
from deploy.host.docker_facts import INSTALL, JOIN_GROUP, MINIMUM_COMPOSE, MINIMUM_ENGINE, forbids
from deploy.host.parsers.docker import parse_version
from deploy.host.report import HostReport
from deploy.spec.model import CDI_KIND

GROUP = "Docker"
CDI_GENERATE = "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
RELOAD_LINK = "https://github.com/NVIDIA/nvidia-container-toolkit/issues/48"


@check("docker.answers", GROUP)
def answers(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """There is no Docker, or its daemon does not answer."""
    docker = report.docker
    if docker is None and report.system.container:
        yield note(f"no Docker inside this {report.system.container} container", "roles are started from the host")
    elif docker is None:
        yield error("Docker is not installed", "every role runs in a container", "", INSTALL)
    elif docker.server is None:
        said = docker.error or "no reason given"
        if forbids(said):
            yield error(
                f"this user may not talk to Docker: {said}",
                "every command of deploy does",
                "join the group and log in again (members of it can become root)",
                JOIN_GROUP,
            )
        else:
            yield error(f"no Docker Engine answers: {said}", "every role runs in a container", "", INSTALL)


@check("docker.version", GROUP)
def version(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Engine or plug-ins too old or missing."""
    docker = report.docker
    if docker is None or docker.server is None:
        return
    if parse_version(docker.server) < MINIMUM_ENGINE:
        yield error(
            f"Docker Engine {docker.server}",
            f"GPUs by CDI and the health checks' start interval need {_dotted(MINIMUM_ENGINE)} or newer",
            "install the current engine; deploy never replaces one that is there",
            link="https://docs.docker.com/engine/install/",
        )
    compose = docker.plugins.get("compose")
    if compose is None or parse_version(compose) < MINIMUM_COMPOSE:
        yield error(
            f"Docker Compose {compose}" if compose else "Docker Compose is not installed",
            f"the compose files need {_dotted(MINIMUM_COMPOSE)} or newer",
            "",
            "sudo apt-get install docker-compose-plugin",
        )
    if "buildx" not in docker.plugins and needs.image_bytes:
        yield error(
            "Docker buildx is not installed",
            "the image is built with it",
            "",
            "sudo apt-get install docker-buildx-plugin",
        )


@check("docker.cdi", GROUP)
def cdi(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Containers cannot get GPUs by CDI name."""
    docker = report.docker
    if docker is None or docker.server is None or not wants_gpus(report, needs):
        return
    if docker.cdi_enabled is False:
        yield error(
            f"CDI is off in Docker Engine {docker.server}",
            "the containers get their GPUs as CDI devices",
            'put {"features": {"cdi": true}} into /etc/docker/daemon.json and restart the engine',
            "sudo systemctl restart docker",
        )
    known = {name for name in docker.cdi_devices if name.startswith(f"{CDI_KIND}=")}
    if not known:
        toolkit = () if report.system.container_toolkit else ("sudo apt-get install nvidia-container-toolkit",)
        yield error(
            f"no CDI device of kind {CDI_KIND} is described in {', '.join(docker.cdi_spec_dirs) or '/etc/cdi'}",
            "Docker cannot hand GPUs to containers",
            "" if report.system.container_toolkit else "the NVIDIA container toolkit is not installed either",
            *toolkit,
            CDI_GENERATE,
        )
        return
    missing = [gpu for gpu in report.gpus if not {f"{CDI_KIND}={gpu.index}", f"{CDI_KIND}={gpu.uuid}"} & known]
    by_uuid = {name.partition("=")[2] for name in known if "=GPU-" in name}
    gone = [] if report.lost_gpus else sorted(by_uuid - {gpu.uuid for gpu in report.gpus})
    if report.gpus and (missing or gone):
        what = f"lacks GPUs {', '.join(str(gpu.index) for gpu in missing)}" if missing else f"names {len(gone)} others"
        yield error(
            f"the CDI description is out of date: it {what}",
            "containers get the wrong GPUs or do not start",
            "",
            CDI_GENERATE,
        )
    elif report.gpus and not by_uuid and needs.profile in ("pd", "replicas"):
        yield note(
            "the CDI description names GPUs by index only",
            "an index changes when a card is added or fails; a UUID does not",
            "",
            "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml --device-name-strategy=index "
            "--device-name-strategy=uuid",
            link="https://github.com/gpustack/gpustack/issues/6041",
        )


@check("docker.reload", GROUP)
def reload(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """A reload of systemd takes GPUs away from running containers."""
    docker = report.docker
    at_risk = docker is not None and docker.cgroup_driver == "systemd" and report.system.dev_char_links is False
    if at_risk and report.gpus and wants_gpus(report, needs):
        yield warning(
            "/dev/char has no links to the GPUs' devices and Docker's cgroup driver is systemd",
            "after `systemctl daemon-reload` running containers lose their GPUs ('Failed to initialize NVML')",
            "",
            "sudo nvidia-ctk system create-dev-char-symlinks --create-all",
            link=RELOAD_LINK,
        )


@check("docker.storage", GROUP)
def storage(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """A storage driver that copies whole images."""
    if report.docker and report.docker.storage_driver in {"vfs", "devicemapper"}:
        yield warning(
            f"Docker stores images with {report.docker.storage_driver}",
            "each layer of the 11 GB image is copied whole",
            'set "storage-driver": "overlay2" in /etc/docker/daemon.json (images must be built again)',
        )


@check("docker.live_restore", GROUP)
def live_restore(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """An update of Docker stops the service."""
    if report.docker and report.docker.live_restore is False and report.gpus and wants_gpus(report, needs):
        yield note(
            "live-restore is off",
            "restarting or updating the Docker daemon stops all roles, and loading the model takes minutes",
            'put {"live-restore": true} into /etc/docker/daemon.json',
            "sudo systemctl reload docker",
        )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
