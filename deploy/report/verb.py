"""The verb `deploy report`."""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import typer
from python_on_whales.exceptions import DockerException

from deploy.doctor.finding import Needs
from deploy.doctor.render import to_json
from deploy.doctor.run import all_checks, run_checks
from deploy.errors import DeployError
from deploy.host.report import HostReport
from deploy.report.archive import contents, known_identities, last_lines, pack, save
from deploy.report.redact import Redactor
from deploy.spec.profiles import COMPOSE_FILES
from deploy.stack.compose import running_stack
from deploy.stack.state import State

_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW", re.IGNORECASE)
LOCKS = ("deploy.lock", "uv.lock", *COMPOSE_FILES, "Dockerfile")


def report(root: Path, spec: Path, state: State, host: HostReport, needs: Needs, output: Path | None) -> Path:
    """Write one redacted archive for a bug report: host, findings, configuration, lock, last logs.

    Args:
        root: the repository.
        spec: deploy.toml.
        state: of the stack.
        host: report of the host.
        needs: what the host is to run.
        output: the archive; None for a name with the time in the current folder.

    Returns:
        The archive's path. What could not be collected is named in it, with the reason.

    Raises:
        DeployError: the file exists.
    """
    name = f"deploy-report-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    path = output or Path(f"{name}.tar.gz")
    texts = collect(root, spec, state, host, needs)
    redactor = Redactor(known_identities(host, _keys(state), str(Path.home()), os.environ.get("USER", "")))
    files = contents(texts, redactor)
    try:
        save(pack(files, name), path)
    except FileExistsError as error:
        raise DeployError(f"{path} is there already", "a report replaces nothing", "choose another --output") from error
    for file in sorted(files):
        typer.echo(f"  {file}", err=True)
    counts = ", ".join(f"{number} {kind}" for kind, number in redactor.counts().items()) or "nothing"
    typer.echo(f"replaced: {counts}\nread it before you send it: tar -xzOf {path} | less", err=True)
    return path


def collect(root: Path, spec: Path, state: State, host: HostReport, needs: Needs) -> dict[str, str]:
    """The texts of a report by file name, not redacted yet."""
    findings = run_checks(host, needs)
    texts = {
        "host.json": host.model_dump_json(indent=2) + "\n",
        "findings.json": to_json(host, findings, len(all_checks())) + "\n",
        "locks.txt": "".join(f"{_digest(root / file)}  {file}\n" for file in LOCKS),
    }
    missing: list[str] = []

    def add(name: str, make: Callable[[], str]) -> None:
        try:
            texts[name] = make()
        except (DeployError, DockerException, OSError, ValueError) as error:
            missing.append(f"{name}: {str(error).strip() or type(error).__name__}\n")

    add("deploy.toml", spec.read_text)
    add("deploy.lock", (root / "deploy.lock").read_text)
    add("stack.env", state.environment.read_text)
    if host.docker and host.docker.server:
        stack = running_stack(root, state.environment)
        add("compose-effective.json", lambda: json.dumps(stack.config(), indent=2) + "\n")
        roles = {entry.role: entry for entry in stack.roles()}
        add("roles.json", lambda: json.dumps({role: entry.as_dict() for role, entry in roles.items()}, indent=2) + "\n")
        for role in dict.fromkeys((*stack.expected, *roles)):
            if entry := roles.get(role):
                add(f"logs/{role}.log", lambda entry=entry: last_lines(stack.log(entry.container, tail=4000)))
            else:
                missing.append(f"logs/{role}.log: no such container\n")
    else:
        missing.append("everything from Docker: no engine answers\n")
    texts["missing.txt"] = "".join(missing) or "nothing\n"
    return texts


def _keys(state: State) -> list[str]:
    """Secrets this machine has at hand: the API key, and variables that are named like secrets."""
    keys = [value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= 8]
    with contextlib.suppress(OSError):
        keys += [word for line in state.api_key.read_text().splitlines() for word in line.split()[:1]]
    return keys


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return "(missing)"
