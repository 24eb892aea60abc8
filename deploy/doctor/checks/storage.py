"""Checks of the disks that hold the image and the model."""

from collections.abc import Iterator

from deploy.doctor.check import check
from deploy.doctor.checks.common import gibibytes
from deploy.doctor.finding import Needs, Problem, error, note, warning
from deploy.host.parsers.disks import filesystem_of
from deploy.host.report import HostReport

GROUP = "Disks"
MODEL_BYTES = 160 * 10**9
"""Weights of DeepSeek-V4-Flash, about."""
SLOW_READ = 1e9
"""Bytes per second below which loading the model takes minutes of disk time alone."""


@check("disk.image", GROUP)
def image(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """No room for the image where Docker keeps its data."""
    root = report.docker.root if report.docker else None
    filesystem = filesystem_of(root, report.filesystems or []) if root else None
    if filesystem and filesystem.free < needs.image_bytes:
        yield error(
            f"{gibibytes(filesystem.free)} are free under {root}",
            f"building the image needs {gibibytes(needs.image_bytes)}",
            "free space, or move Docker's data with data-root in /etc/docker/daemon.json",
            look="docker system df",
        )


@check("disk.weights", GROUP)
def weights(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """Where deploy.toml has the model there are no weights."""
    if needs.model_folder and report.model_shards == 0:
        yield error(
            f"no .safetensors file is seen in {needs.model_folder}",
            "the engines read their weights from there: .safetensors files, config.json, tokenizer",
            "set path under [model] in deploy.toml, or bring what deploy.lock names: deploy model fetch",
        )


@check("disk.model", GROUP)
def model(report: HostReport, needs: Needs) -> Iterator[Problem]:
    """The model lies on a slow disk."""
    if needs.model_folder is None or needs.profile == "cpu":
        return
    filesystem = filesystem_of(needs.model_folder, report.filesystems or [])
    if filesystem and filesystem.rotational:
        yield warning(
            f"the model lies on a rotating disk ({filesystem.source}, {filesystem.mount})",
            f"reading {MODEL_BYTES // 10**9} GB at 200 MB/s takes 13 minutes, at every start without page cache",
            "move it to an NVMe disk and set model.path in deploy.toml",
        )
    for read in report.disk_reads:
        if read.path.startswith(needs.model_folder) and read.bytes_per_second < SLOW_READ:
            yield note(
                f"the model's disk reads {read.bytes_per_second / 1e6:.0f} MB/s",
                f"{MODEL_BYTES // 10**9} GB take {MODEL_BYTES / read.bytes_per_second / 60:.0f} minutes of the start",
                "ENGINE_START_PERIOD must be longer than that",
            )
