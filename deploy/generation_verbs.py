"""The verbs that change a running stack and go back: `upgrade`, `rollback`, `generations`, `drain`, `restart`."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy import completion, render
from deploy.command_line import (
    ROOT,
    SPEC,
    STATE,
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
from deploy.errors import DeployError
from deploy.host import probe
from deploy.host.docker_facts import require_docker
from deploy.lock.diff import Change, diff
from deploy.lock.document import FILE_NAME
from deploy.lock.model import Lock, read_lock
from deploy.lock.model import load as load_lock
from deploy.spec.load import load
from deploy.spec.profiles import ALL_ROLES
from deploy.stack import change, gate, generations
from deploy.stack.compose import running_stack
from deploy.stack.events import step
from deploy.stack.generations import LOCK, RENDERED
from deploy.stack.state import State
from deploy.stack.up import up

CUT = 1
LimitOption = Annotated[
    float,
    typer.Option("--limit", min=0, max=86400, help="Seconds that requests in flight may go on.", show_default="300"),
]
ROLES = f"{', '.join(ALL_ROLES)}, or an engine's URL."
RoleArgument = Annotated[str, typer.Argument(metavar="ROLE", help=ROLES, autocompletion=completion.roles)]
EngineArgument = Annotated[str, typer.Argument(metavar="ROLE", help=ROLES, autocompletion=completion.engines)]

app = verbs()
generations_app = verbs(help="List, compare and remove what was accepted before.")
app.add_typer(generations_app, name="generations", rich_help_panel=Panel.CHANGE)
out = console()
err = console(stderr=True)


@app.command(
    "upgrade",
    rich_help_panel=Panel.CHANGE,
    epilog=examples(
        "git pull && deploy upgrade    what the new deploy.lock and deploy.toml say",
        "deploy upgrade --json | jq .generation",
    ),
)
def upgrade_verb(
    spec: SpecOption = SPEC,
    state: StateOption = STATE,
    mirror: MirrorOption = None,
    security_mirror: SecurityMirrorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Bring a running stack to this deploy.lock and deploy.toml, engine by engine; one that fails is taken back.

    Each engine is drained before it is replaced. With several engines of profile replicas no request is refused; with
    one of each kind new requests wait for up to ten seconds, then get 503 with Retry-After until the engine is there.
    """
    require_docker(probe.docker_facts(), cdi=False)
    folder = State(state)
    now = generations.current(folder)
    if now is None:
        raise DeployError("nothing runs that could be upgraded", "there is no current generation", "deploy up")
    spec_file = load(spec, now.profile if now.profile == "cpu" else None)
    changes = _lock_changes(folder, now.number)
    if not as_json:
        err.print(render.changes(changes) or f"the lock is that of generation {now.number}", soft_wrap=True)
    with render.steps(err) as report:
        result = up(ROOT, spec_file, folder, report, mirror, security_mirror, verb="upgrade")
    if as_json:
        shown = {"from": now.number, "generation": result.generation, "changed": result.changed}
        print_json(shown | {"acceptance": result.acceptance.as_dict(), "seconds": round(result.seconds, 1)})
    elif result.generation == now.number:
        out.print(f"generation {now.number} is up to date")
    else:
        out.print(
            f"Upgraded in {result.seconds:.0f} s from generation {now.number} to {result.generation}; "
            "back again: deploy rollback",
            soft_wrap=True,
        )


@app.command(
    "rollback",
    rich_help_panel=Panel.CHANGE,
    epilog=examples("deploy rollback               to the generation before", "deploy rollback 4"),
)
def rollback_verb(
    number: Annotated[
        int | None,
        typer.Argument(
            metavar="[N]",
            help="Generation.",
            show_default="the one before the current; without a current one the newest",
            autocompletion=completion.numbers,
        ),
    ] = None,
    spec: SpecOption = SPEC,
    state: StateOption = STATE,
    as_json: JsonOption = False,
) -> None:
    """Go back to an earlier generation with what is on this host; needs no network.

    deploy.toml and deploy.lock stay as they are; it says if they are not that generation's.
    """
    require_docker(probe.docker_facts(), cdi=False)
    folder = State(state)
    before = generations.current_number(folder)
    with render.steps(err) as report:
        done = change.rollback(ROOT, folder, number, report)
    if number is None and before is None:
        err.print("there was no current generation: this is the newest")
    own = generations.folder(folder, done.generation.number)
    for file, kept in ((spec, own / generations.SPEC), (ROOT / FILE_NAME, own / LOCK)):
        if not generations.same_text(file, kept):
            look = shlex.join(["diff", str(kept), str(file)])
            err.print(f"{file.name} differs, and the next `deploy up` goes by it: {look}", markup=False, soft_wrap=True)
    if as_json:
        shown = {"generation": done.generation.number, "changed": done.changed, "seconds": round(done.seconds, 1)}
        print_json(shown | {"acceptance": done.acceptance.as_dict()})
    else:
        out.print(f"Generation {done.generation.number} serves on {done.acceptance.url} after {done.seconds:.0f} s")


@generations_app.callback(
    invoke_without_command=True,
    epilog=examples("deploy generations", "deploy generations diff 3 4", "deploy generations prune --keep 2"),
)
def generations_verb(context: typer.Context, state: StateOption = STATE, as_json: JsonOption = False) -> None:
    """List, compare and remove what was accepted before."""
    if context.invoked_subcommand is None:
        list_verb(state, as_json)


@generations_app.command("list", epilog=examples("deploy generations list --json | jq '.[-1]'"))
def list_verb(state: StateOption = STATE, as_json: JsonOption = False) -> None:
    """List the generations, oldest first; * is the current one."""
    folder = State(state)
    now = generations.current_number(folder)
    rows: list[list[str]] = []
    shown: list[dict[str, Any]] = []
    for number in generations.numbers(folder):
        try:
            found = generations.read(folder, number)
            generations.check(folder, found)
        except generations.Damaged as error:
            rows.append(["*" if number == now else "", str(number), "", "", "", f"damaged: {error.why}"])
            shown.append({"number": number, "current": number == now, "damaged": error.why})
            continue
        rows.append(["*" if number == now else "", str(number), found.time, found.verb, found.profile, found.image])
        shown.append(found.model_dump(mode="json") | {"current": number == now})
    if as_json:
        print_json(shown)
    elif rows:
        out.print(render.table(["", "generation", "accepted", "by", "profile", "image"], rows))
    else:
        out.print("no generation: deploy up")


@generations_app.command("diff", epilog=examples("deploy generations diff 3 4"))
def diff_verb(
    before: Annotated[int, typer.Argument(metavar="A", help="A generation.", autocompletion=completion.numbers)],
    after: Annotated[int, typer.Argument(metavar="B", help="Another.", autocompletion=completion.numbers)],
    state: StateOption = STATE,
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two generations: the locks, and every value that the containers are started with."""
    folder = State(state)
    one, two = (generations.read(folder, number) for number in (before, after))
    for generation in (one, two):
        generations.check(folder, generation)
    changes = diff(_lock(folder, one.number), _lock(folder, two.number)).changes
    rendered: list[Any] = [
        json.loads((generations.folder(folder, generation.number) / RENDERED).read_text()) for generation in (one, two)
    ]
    values = generations.differences(*rendered)
    if as_json:
        print_json({"lock": [vars(item) for item in changes], "compose": [list(value) for value in values]})
        return
    if changes:
        out.print(render.changes(changes), soft_wrap=True)
    for path, was, becomes in values:
        out.print(f"{path}: {was or '(absent)'} -> {becomes or '(absent)'}", markup=False, soft_wrap=True)
    if not changes and not values:
        out.print(f"{before} and {after} start the same containers")


@generations_app.command("prune", epilog=examples("deploy generations prune --keep 2"))
def prune_verb(
    keep: Annotated[int, typer.Option("--keep", min=1, help="How many of the newest stay.")] = 5,
    state: StateOption = STATE,
    as_json: JsonOption = False,
) -> None:
    """Remove old generations; the current one and the one before it always stay. Images stay: `docker image rm`."""
    folder = State(state)
    with folder.lock("generations prune"):
        gone = generations.prune(folder, keep)
    if as_json:
        print_json({"removed": gone})
    else:
        out.print(f"removed {', '.join(map(str, gone))}" if gone else "nothing to remove")


@app.command(
    "drain",
    rich_help_panel=Panel.CHANGE,
    epilog=examples(
        "deploy drain engine-2              its requests finish, new ones go to the others",
        "deploy drain decode --limit 60     wait no longer than a minute",
        "deploy drain engine-2 --undo       send it requests again",
    ),
)
def drain_verb(
    role: EngineArgument,
    state: StateOption = STATE,
    limit: LimitOption = change.DRAIN_LIMIT_S,
    undo: Annotated[bool, typer.Option("--undo", help="Send it requests again.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Send no new requests to an engine and wait until those in flight have ended. Exit code 1 at the limit.

    It stays drained, over restarts of the router too, until --undo, `deploy restart` or `deploy up`. Without another
    engine of its kind new requests wait for ten seconds, then get 503 with Retry-After.
    """
    require_docker(probe.docker_facts(), cdi=False)
    folder, name = State(state), _engine(role)
    with folder.lock("drain"), render.steps(err) as report:
        change.heal(ROOT, folder, report)
        stack = running_stack(ROOT, folder.environment)
        change.require_role(stack, name)
        with step("drain", report) as running:
            if undo:
                gate.restore(stack, [name])
                left = 0
                running.outcome = f"{name} gets requests again"
            else:
                left = gate.drain(stack, [name], limit, running.progress)
                running.outcome = f"{left} requests still in flight" if left else f"{name} has nothing left to do"
    if as_json:
        print_json({"role": name, "drained": not undo, "in_flight": left})
    if left:
        raise typer.Exit(CUT)


@app.command(
    "restart",
    rich_help_panel=Panel.CHANGE,
    epilog=examples("deploy restart engine-2", "deploy restart router", "deploy restart decode --limit 60"),
)
def restart_verb(
    role: RoleArgument,
    state: StateOption = STATE,
    limit: LimitOption = change.DRAIN_LIMIT_S,
    as_json: JsonOption = False,
) -> None:
    """Restart one role once its requests have ended, and send it requests again. Exit code 1 if the limit cut some."""
    require_docker(probe.docker_facts(), cdi=False)
    name = role if role == "router" else _engine(role)
    with render.steps(err) as report:
        cut = change.restart(ROOT, State(state), name, limit, report)
    if as_json:
        print_json({"role": name, "cut": cut})
    if cut:
        raise typer.Exit(CUT)


def _engine(role: str) -> str:
    """The engine that a person means by its name or its URL."""
    name = role.partition("://")[2].partition(":")[0] or role
    if name == "router":
        raise DeployError("the router cannot be drained", "it is the one that drains", "deploy restart router")
    if name not in ALL_ROLES:
        raise typer.BadParameter(f"one of {', '.join(ALL_ROLES)}", param_hint="ROLE")
    return name


def _lock(folder: State, number: int) -> Lock:
    file: Path = generations.folder(folder, number) / LOCK
    return load_lock(file.read_text(), str(file)) if file.exists() else Lock()


def _lock_changes(folder: State, number: int) -> list[Change]:
    after = read_lock(ROOT) if (ROOT / FILE_NAME).exists() else Lock()
    return list(diff(_lock(folder, number), after).changes)
