"""Removes what the repository left on this machine besides the stack: images, build cache, generated files."""

import shutil
from contextlib import suppress

from python_on_whales import DockerClient
from python_on_whales.exceptions import DockerException

from deploy.errors import DeployError
from deploy.host import probe
from deploy.image.inputs import IMAGE_NAME
from deploy.stack import docker_engine, generations
from deploy.stack.compose import words
from deploy.stack.state import State


def remove_all(state: State) -> list[str]:
    """Remove every engine image, the build cache if the Docker engine is ours alone, and what the state folder holds.

    Returns:
        What was removed, in words.

    Raises:
        DeployError: an image is in use.
    """
    removed: list[str] = []
    with state.lock("down"):
        if probe.docker_facts().server:
            removed += _images()
            if docker_engine.installed_here(state):
                DockerClient().buildx.prune(all=True)
                removed.append("build cache")
        generations.switch(state, None)
        kept = (state.generations, state.incidents)
        # The folder around them may be a person's.
        tiny = state.tiny_model
        models = (tiny, *tiny.parent.glob(f".{tiny.name}-*"))
        for folder in (*models, state.secrets, state.metrics, state.folder / "failed", *kept):
            if folder.exists():
                shutil.rmtree(folder)
                removed.append(str(folder))
        with suppress(OSError):
            tiny.parent.rmdir()
    return removed


def _images() -> list[str]:
    docker = DockerClient()
    images = docker.image.list(filters={"reference": f"{IMAGE_NAME}:*"})
    tags = sorted({tag for image in images for tag in image.repo_tags if tag.startswith(f"{IMAGE_NAME}:")})
    try:
        for tag in tags:
            docker.image.remove(tag)
    except DockerException as error:
        raise DeployError(
            "the engine image cannot be removed", words(error), "docker ps --all shows who uses it"
        ) from error
    return [f"image {tag}" for tag in tags]
