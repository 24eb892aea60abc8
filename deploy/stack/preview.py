"""What a spec would give, without starting anything."""

import difflib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from python_on_whales.exceptions import DockerException

from deploy.errors import DeployError
from deploy.host.docker_facts import INSTALL
from deploy.host.errors import HostError
from deploy.spec.load import Problem, SpecError, SpecFile
from deploy.spec.positions import Position
from deploy.stack.compose import Stack, stack_of, words
from deploy.stack.environment import Facts, Variable, render, variables
from deploy.stack.origins import Setting, settings, variable_names


def preview(stack: Stack, lines: list[Variable]) -> tuple[dict[str, Any], list[Setting]]:
    """The effective compose configuration with these variables, and the origin of each argument."""
    with tempfile.NamedTemporaryFile("w", suffix=".env") as file:
        file.write(render(lines))
        file.flush()
        config = replace(stack, environment=Path(file.name)).config()
    return config, settings(config, stack.files, lines)


def preview_without_host(root: Path, spec_file: SpecFile) -> dict[str, Any]:
    """The effective compose configuration with nothing of this host in it: what a lock and an export are made from.

    Raises:
        HostError: there is no docker compose to ask.
        DeployError: Compose refuses its files.
    """
    if not shutil.which("docker"):
        raise HostError("there is no docker compose", "it says what the compose files come to", INSTALL)
    stack = stack_of(root, Path(os.devnull), spec_file.spec)
    lines = variables(spec_file, Facts(image="", model=Path("/model"), api_key_file=None, limits={}))
    require_known_variables(spec_file, stack.files, lines)
    try:
        return preview(stack, lines)[0]
    except DockerException as error:
        raise DeployError(
            "the compose files cannot be read", words(error), "restore them from git, or correct what it names"
        ) from error


def require_known_variables(spec_file: SpecFile, files: list[Path], lines: list[Variable]) -> None:
    """Check the names under `[variables]` against those the compose files have.

    Raises:
        SpecError: a name that no compose file asks for, or that another key of deploy.toml decides.
    """
    known = variable_names(files)
    owners = {line.name: line for line in lines if line.key and line.key[0] != "variables"}
    problems: list[Problem] = []
    for name in spec_file.spec.variables:
        position = spec_file.positions.get(("variables", name), Position(1, 1))
        if owner := owners.get(name):
            key = ".".join(map(str, owner.key))
            why, fix = f"{key} decides it ({owner.origin})", f"change {key} and remove {name} here"
            problems.append(Problem(position, f"variables.{name}", f"variables.{name}: set twice", why, fix))
        elif name not in known:
            guess = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {guess[0]}?" if guess else f"known: {', '.join(sorted(known))}"
            why = f"{' and '.join(file.name for file in files)} have no such variable"
            problems.append(Problem(position, f"variables.{name}", f"variables.{name}: unknown variable", why, fix))
    if problems:
        raise SpecError(spec_file.file, problems)
