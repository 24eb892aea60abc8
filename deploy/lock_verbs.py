"""The verbs about deploy.lock: `lock`, `diff`, `verify`. `cli.py` mounts them.

What a verb needs is imported in it: `diff` and `lock --check` are called often and shall not wait for the rest.
"""

import sys
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.command_line import (
    ROOT,
    SPEC,
    STATE,
    CertificatesOption,
    JsonOption,
    MirrorOption,
    Panel,
    SecurityMirrorOption,
    SpecOption,
    StateOption,
    console,
    examples,
    print_json,
    verbs,
)

if TYPE_CHECKING:
    from deploy.lock.resolve import Disagreement

FAILED = 1
RUNNING = "running"


class PartName(StrEnum):
    """Parts of the lock that do not simply follow from the repository's files."""

    rootfs = "rootfs"
    engine = "engine"
    model = "model"
    image = "image"


app = verbs()
out = console()
err = console(stderr=True)


@app.command(
    "lock",
    rich_help_panel=Panel.LOCK,
    epilog=examples(
        "deploy lock                         bring deploy.lock in line with the repository and deploy.toml",
        "deploy lock --check                 only say where it is behind (exit code 1), for CI",
        "deploy lock --update rootfs         the newest Debian packages of the release",
        "deploy lock --update model          after the model's files have changed",
        "deploy lock --update image          the image's layers, after deploy build",
    ),
)
def lock_verb(
    update: Annotated[
        list[PartName] | None,
        typer.Option("--update", metavar="PART", help="Resolve anew: rootfs, engine, model or image."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit code 1 and a list if behind.")] = False,
    spec: SpecOption = SPEC,
    mirror: MirrorOption = None,
    security_mirror: SecurityMirrorOption = None,
    keyring: Annotated[
        Path | None, typer.Option("--keyring", help="Keys of the archive's release files.", show_default="Debian's")
    ] = None,
    certificates: CertificatesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write every input of the stack by hash into deploy.lock.

    What follows from the repository is derived anew. Debian packages, SGLang's wheel and the model's files stay as
    they are locked until what they depend on has changed, so that it works without network.
    """
    from deploy import render
    from deploy.lock.debian import DEBIAN_KEYRING
    from deploy.lock.resolve import Sources, check_lock, update_lock
    from deploy.spec.load import load

    spec_file = load(spec)
    if check:
        if update:
            raise typer.BadParameter("--check changes nothing, --update does", param_hint="--update")
        found = check_lock(ROOT, spec_file)
        _show_disagreements(found, as_json)
        raise typer.Exit(FAILED if found else 0)
    sources = Sources(mirror, security_mirror, keyring or DEBIAN_KEYRING, certificates)
    with render.transfer(err) as progress:
        updated = update_lock(ROOT, spec_file, [part.value for part in update or []], sources, progress)
    if as_json:
        unresolved = [asdict(item) for item in updated.unresolved]
        print_json({"changes": [asdict(change) for change in updated.changes], "unresolved": unresolved})
        return
    out.print(render.changes(updated.changes) or "deploy.lock is up to date", soft_wrap=True)
    for item in updated.unresolved:
        err.print(f"not locked: {item.part}: {item.what}\n  fix: {item.fix}", markup=False, soft_wrap=True)


@app.command(
    "diff",
    rich_help_panel=Panel.LOCK,
    epilog=examples(
        "deploy diff                         the last commit's lock and this one",
        "deploy diff v1.2 main               two git revisions",
        "deploy diff old/deploy.lock         a lock file and this one",
        "deploy diff deploy.lock running     this lock and the containers that run",
        "deploy diff v1.2 --json | jq .transfer.size",
    ),
)
def diff_verb(
    before: Annotated[
        str, typer.Argument(metavar="[A]", help="Lock file, git revision or `running`.", show_default="HEAD")
    ] = "HEAD",
    after: Annotated[str, typer.Argument(metavar="[B]", help="The same.", show_default="deploy.lock")] = "deploy.lock",
    state: StateOption = STATE,
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two locks, or a lock and what runs, and what a host must fetch to get from A to B."""
    from deploy import render
    from deploy.lock.diff import diff
    from deploy.lock.source import named_lock

    if (before, after).count(RUNNING) == 2:
        raise typer.BadParameter("at most one of the two", param_hint=RUNNING)
    one, two = (None if name == RUNNING else named_lock(ROOT, name) for name in (before, after))
    if one is None or two is None:
        from deploy.stack.compose import running_stack
        from deploy.stack.state import State
        from deploy.stack.verify import running_lock

        stack = running_stack(ROOT, State(state).environment)
        locked, running = running_lock(stack, next(lock for lock in (one, two) if lock))
        one, two = (running, locked) if one is None else (locked, running)
    found = diff(one, two)
    if as_json:
        print_json(found.as_dict())
        return
    out.print(render.changes(found.changes) or f"{before} and {after} are the same", soft_wrap=True)
    if found.transfer and found.changes:
        out.print(render.transferred(found.transfer), soft_wrap=True)


@app.command(
    "verify",
    rich_help_panel=Panel.LOCK,
    epilog=examples(
        "deploy verify                       does what runs equal deploy.lock?",
        "deploy verify --full                every byte of the model too",
        "deploy verify --json | jq '.drifts[]'",
        "deploy verify --rebuild             build the image again from nothing: is it the locked one?",
    ),
)
def verify_verb(
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Build the image again in an engine of its own and compare (minutes).")
    ] = False,
    spec: SpecOption = SPEC,
    state: StateOption = STATE,
    full: Annotated[bool, typer.Option("--full", help="Hash every byte of the model, not samples.")] = False,
    mirror: MirrorOption = None,
    security_mirror: SecurityMirrorOption = None,
    certificates: CertificatesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold what runs against deploy.lock. Exit code 0 only if all agrees, else one line for each drift.

    Compared are each container's image, the files it sees, its arguments and variables, the engines' own account of
    their arguments, the hooks, the model's files, and the versions of Docker and of the NVIDIA driver. Where nothing
    runs, each role of the profile that was accepted last, or that deploy.toml names, is a drift.

    With --rebuild nothing needs to run: the image is built from clean caches, as root, with 13 GB of disk, and each of
    its layers compared; where one differs, its files are named.
    """
    if rebuild:
        _verify_rebuild(state, mirror, security_mirror, certificates, as_json)
        return
    from deploy import render
    from deploy.host import probe
    from deploy.host.docker_facts import require_docker
    from deploy.lock.model import read_lock
    from deploy.stack.compose import running_stack
    from deploy.stack.state import State
    from deploy.stack.verify import meant_profile, verify

    require_docker(probe.docker_facts(), cdi=False)
    lock = read_lock(ROOT)
    folder = State(state)
    stack = running_stack(ROOT, folder.environment)
    if not stack.roles():
        stack = replace(stack, profile=meant_profile(folder, spec))
    with render.transfer(err) as progress:
        found = verify(stack, lock, folder, full=full, progress=lambda done, total: progress("model", done, total))
    if as_json:
        print_json(found.as_dict())
    else:
        for drift in found.drifts:
            sys.stdout.write(f"{drift}\n")
        for role, counts in found.compiled.items():
            err.print(f"{role}: {counts.words()}", markup=False)
        roles, how = ", ".join(found.roles) or "no container", "byte by byte" if full else "by size, time and samples"
        verdict = f"{len(found.drifts)} drifts" if found.drifts else "all as locked"
        err.print(f"{verdict}: {roles}; {found.files} model files {how}; {found.seconds:.1f} s", markup=False)
    if found.drifts:
        raise typer.Exit(FAILED)


def _verify_rebuild(
    state: Path, mirror: str | None, security_mirror: str | None, certificates: Path | None, as_json: bool
) -> None:
    from deploy import render
    from deploy.image.locked import locked_image
    from deploy.image.rebuild import rebuild
    from deploy.image.transfer import require_built
    from deploy.lock.model import read_lock
    from deploy.stack.events import step
    from deploy.stack.up import build_progress

    locked = require_built(locked_image(ROOT, read_lock(ROOT)))
    with render.steps(err) as report, step("image", report) as running:
        found = rebuild(
            ROOT,
            locked,
            state.absolute() / "rebuild",
            progress=build_progress(running),
            mirror=mirror,
            security_mirror=security_mirror,
            certificates=certificates,
        )
        running.outcome = "the same" if found.same else "another image"
    if as_json:
        print_json({**asdict(found), "same": found.same})
    elif found.same:
        out.print(f"{found.found}: built again from nothing, {found.layers} layers, all as locked", soft_wrap=True)
    else:
        out.print(f"image: expected {found.expected}, found {found.found}", soft_wrap=True)
        if layer := found.difference:
            out.print(f"layer {layer.place}: expected {layer.expected}, found {layer.found}", soft_wrap=True)
            for line in layer.files or (layer.why_no_files,):
                out.print(f"  {line}", markup=False, soft_wrap=True)
        else:
            out.print("  every layer is as locked; the image's configuration differs")
    if not found.same:
        raise typer.Exit(FAILED)


def _show_disagreements(found: "list[Disagreement]", as_json: bool) -> None:
    if as_json:
        print_json({"agrees": not found, "disagreements": [asdict(item) for item in found]})
        return
    from deploy import render

    for item in found:
        sys.stdout.write(f"{item.part}: {render.short(item.what)}\n")
    if found:
        fixes = ", or ".join(dict.fromkeys(item.fix for item in found))
        err.print(f"deploy.lock is behind in {len(found)} points; fix: {fixes}", markup=False, soft_wrap=True)
    else:
        err.print("deploy.lock agrees with the repository and deploy.toml")
