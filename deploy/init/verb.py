"""The verb `deploy init`."""

import difflib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import typer
from pydantic import BaseModel
from rich.text import Text

from deploy.command_line import ROOT, console
from deploy.errors import DeployError, WrongInput
from deploy.host.errors import HostError
from deploy.host.report import HostReport
from deploy.init.drawing import draw
from deploy.init.propose import Proposal, propose
from deploy.init.render import to_toml
from deploy.model.folder import draft_folder, model_folder
from deploy.spec.load import SpecError, SpecFile, load, parse
from deploy.spec.model import Spec
from deploy.stack.compose import stack_of
from deploy.stack.environment import Facts, render, variables
from deploy.stack.state import State, write_all


def init(
    report: HostReport,
    spec: Path,
    *,
    state: State,
    env_file: Path | None,
    image: str,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Propose what this host should run, show it, and write it once the person at the terminal agrees.

    Args:
        report: of the host.
        spec: the deploy.toml to write; what it says about model and router is kept.
        state: of the stack that is to run.
        env_file: also write the variables for `docker compose up` by hand.
        image: tag of the engine image, for the env file.
        dry_run: write nothing.
        yes: overwrite without asking.
        as_json: print the proposal as JSON, write nothing.

    Raises:
        HostError: this host cannot serve; nothing was written.
        WrongInput: a file cannot be written where it should, or is no text; nothing was written.
        DeployError: a file is there already and nobody can be asked; nothing was written.
    """
    if env_file and _target(spec) == _target(env_file):
        raise WrongInput(f"{spec} cannot be both", "--env-file names the spec", "name another: --env-file FILE")
    for file in filter(None, (spec, env_file)):
        _require_place(file)
    present = load(spec).spec if spec.exists() else Spec()
    proposal = propose(report, present)
    text = to_toml(proposal, present, _has_uuids(report))
    obstacle = "; ".join(proposal.obstacles)
    if proposal.profile == "cpu" and spec.exists() and present.profile != "cpu":
        # A driver that is not loaded looks the same as no GPU.
        obstacle = obstacle or f"no GPU is seen here, and {spec.name} says which GPUs profile {present.profile} has"
    spec_file: SpecFile | None = None
    try:
        spec_file = parse(text, spec)
    except SpecError as error:
        obstacle = obstacle or f"{error.problems[0].message}: {error.problems[0].why}"
    if as_json:
        typer.echo(json.dumps({**_plain(proposal), "deploy_toml": text, "obstacle": obstacle}, indent=2))
    elif not (obstacle and proposal.profile == "cpu"):
        _show(report, proposal)
    if obstacle or spec_file is None:
        raise HostError(
            "this host cannot serve as it is", obstacle, "deploy doctor, or deploy up --profile cpu to try the stack"
        )
    if as_json:
        return
    files = {spec: text}
    if env_file:
        router = spec_file.spec.router
        facts = Facts(
            image,
            model_folder(spec_file, state),
            Path(router.api_key_file) if router.api_key_file else None,
            {},
            draft_folder(spec_file),
            (Path(router.tls_certificate), Path(router.tls_key)) if router.tls_certificate else None,
        )
        names = ":".join(file.name for file in stack_of(ROOT, env_file, spec_file.spec).files)
        written = render(variables(spec_file, facts)).replace("Written by `deploy up`", "Written by `deploy init`")
        files[env_file] = f"{written}\n# What `docker compose` reads.\nCOMPOSE_FILE={names}\n"
    write(files, dry_run=dry_run, yes=yes)


def write(files: Mapping[Path, str], *, dry_run: bool, yes: bool) -> None:
    """Write files, each whole or not at all; ask before replacing another one, and write none before the last answer.

    Raises:
        DeployError: a file differs and nobody is there to ask, or it changed while somebody was asked.
        WrongInput: a file is no text.
    """
    before = {path: _text(path) for path in files}
    agreed = [path for path in files if _agreed(path, before[path], files[path], dry_run=dry_run, yes=yes)]
    for path in agreed:
        if _text(path) != before[path]:
            raise DeployError(f"{path} has changed since it was shown", "nothing was written", _again())
    write_all({_target(path): (files[path], _mode(path)) for path in agreed})
    for path in agreed:
        typer.echo(f"wrote {path}", err=True)


def _target(file: Path) -> Path:
    """Where a link leads; the file itself if it is none."""
    return Path(os.path.realpath(file))


def _mode(file: Path) -> int:
    return file.stat().st_mode & 0o777 if file.exists() else 0o666 & ~_umask()


def _require_place(file: Path) -> None:
    target = _target(file)
    # What still is a link leads in a circle.
    if not file.is_file() and (file.exists() or target.is_symlink()):
        raise WrongInput(f"{file} is no regular file", "one was to be written there", "name another file")
    if target.parent.is_dir():
        return
    if target.parent.exists():
        raise WrongInput(f"{target.parent} is no folder", f"{file} was to be written into it", "name another file")
    raise WrongInput(
        f"the folder {target.parent} does not exist",
        f"{file} was to be written into it",
        shlex.join(["mkdir", "-p", str(target.parent)]),
    )


def _text(path: Path) -> str | None:
    """What the file holds; None without one."""
    try:
        return path.read_text() if path.exists() else None
    except UnicodeDecodeError as error:
        raise WrongInput(f"{path} is no text in UTF-8", str(error), "name another file") from error


def _agreed(path: Path, old: str | None, content: str, *, dry_run: bool, yes: bool) -> bool:
    """Show what would change, and ask if nobody has agreed yet."""
    if old == content:
        typer.echo(f"{path} already says this", err=True)
        return False
    if dry_run or old is None:
        difference = content if dry_run else ""
    else:
        lines = difflib.unified_diff(old.splitlines(True), content.splitlines(True), str(path), "proposed", n=1)
        difference = "".join(lines)
    typer.echo(difference, nl=False)
    if dry_run:
        return False
    if old is not None and not yes and not _said_yes(path):
        typer.echo(f"{path} stays as it is", err=True)
        return False
    return True


def _said_yes(path: Path) -> bool:
    nobody = DeployError(f"{path} is there and differs", "it is not replaced without asking", _again("--yes"))
    if not sys.stdin.isatty():
        raise nobody
    typer.echo(f"Replace {path}? [y/N]: ", nl=False, err=True)
    try:
        # Not Typer's `confirm`, to which Ctrl-C is the same as the end of the input.
        return input().strip().lower() in ("y", "yes")
    except UnicodeDecodeError:
        return False
    except EOFError:
        raise nobody from None


def _again(*options: str) -> str:
    """This command once more, with what it took from the shell."""
    taken = [
        f"{name}={shlex.quote(os.environ[name])} " for name in ("DEPLOY_SPEC", "DEPLOY_STATE") if name in os.environ
    ]
    words = sys.argv[1:]
    verb = words.index("init") + 1 if "init" in words else 0
    return "".join(taken) + shlex.join(["deploy", *words[:verb], *options, *words[verb:]])


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _has_uuids(report: HostReport) -> bool:
    """Containers can ask for GPUs by UUID: the CDI description names every one so."""
    names = report.docker.cdi_devices if report.docker else []
    return bool(report.gpus) and all(any(name.endswith(f"={gpu.uuid}") for name in names) for gpu in report.gpus)


def _plain(proposal: Proposal) -> dict[str, object]:
    def simple(value: object) -> object:
        return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)

    return json.loads(json.dumps(asdict(proposal), default=simple))


def _show(report: HostReport, proposal: Proposal) -> None:
    out = console()
    out.print(draw(report, proposal))
    for remark in proposal.remarks:
        out.print(Text(remark))
    if proposal.memory:
        out.print(Text(f"memory: {proposal.memory}"))
    if proposal.profile == "pd":
        out.print(Text(f"transport {proposal.transport}: {proposal.transport_reason}"))
    for setting in proposal.settings:
        out.print(Text(f"{setting.name}={setting.value}: {setting.reason}"))
    out.print()
