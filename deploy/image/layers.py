"""What a built image consists of, as the local Docker engine knows it."""

import json
import subprocess
from typing import Any

from python_on_whales import DockerClient

from deploy.errors import DeployError
from deploy.lock.model import LockedLayer

# Steps that only change the image's configuration; every other step makes a layer.
CONFIGURATION = ("ARG", "CMD", "ENTRYPOINT", "ENV", "EXPOSE", "HEALTHCHECK", "LABEL", "STOPSIGNAL", "USER", "WORKDIR")


def read_layers(image: str) -> tuple[LockedLayer, ...]:
    """The layers of an image in the local Docker engine, from the lowest.

    Raises:
        DeployError: Docker's list of layers and its history of the image do not fit together.
    """
    docker = DockerClient()
    diff_ids = docker.image.inspect(image).root_fs.layers or []
    command = ["docker", "history", "--no-trunc", "--human=false", "--format", "{{json .}}", image]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    sizes = parse_history(done.stdout)
    if len(sizes) != len(diff_ids):
        raise DeployError(
            f"the layers of {image} cannot be told apart",
            f"it has {len(diff_ids)} layers and a history of {len(sizes)} {done.stderr.strip()}",
            "build it here: deploy build --rebuild",
        )
    return tuple(LockedLayer(diff_id=diff_id, size=size) for diff_id, size in zip(diff_ids, sizes, strict=True))


def parse_history(text: str) -> list[int]:
    """Sizes in bytes of an image's layers, from the lowest, from lines of `docker history --format '{{json .}}'`."""
    steps: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [
        int(step["Size"])
        for step in reversed(steps)
        if str(step["CreatedBy"]).removeprefix("/bin/sh -c #(nop) ").split(maxsplit=1)[0] not in CONFIGURATION
    ]
