"""The verbs that look at the host: `doctor`, `init`, `report`. `cli.py` mounts them."""

from pathlib import Path
from typing import Annotated, NoReturn

import typer

from deploy.command_line import (
    ROOT,
    SPEC,
    STATE,
    JsonOption,
    Panel,
    ProfileName,
    ProfileOption,
    SpecOption,
    StateOption,
    console,
    examples,
)
from deploy.doctor.checks.common import find_gpu, wants_gpus
from deploy.doctor.finding import Needs, Severity, needs_of
from deploy.doctor.render import json_of, script_of, text_of, to_json, to_script, to_text
from deploy.doctor.run import all_checks, run_checks
from deploy.errors import DeployError
from deploy.host.errors import HostError
from deploy.host.probe_active import CONTAINER_SECONDS, ActiveProbe, has_image
from deploy.host.probe_host import LIMIT_SECONDS, LocalMachine, probe
from deploy.host.report import ActiveTests, HostReport, UnreadableReport
from deploy.host.report import load as load_report
from deploy.host.report import save as save_report
from deploy.image.build import IMAGE_BYTES
from deploy.image.inputs import image_tag
from deploy.init.verb import init
from deploy.lock.model import read_lock
from deploy.model.folder import model_folder
from deploy.report.verb import report
from deploy.spec.load import load
from deploy.stack.state import State

ERRORS_FOUND = 3


app = typer.Typer()
err = console(stderr=True)

SavedOption = Annotated[
    Path | None, typer.Option("--host-report", metavar="FILE", help="A saved report instead of this host.")
]
LimitOption = Annotated[
    float, typer.Option("--limit", min=0.1, max=600, help="Seconds that each look at the host may take.")
]


@app.command(
    "doctor",
    rich_help_panel=Panel.HOST,
    epilog=examples(
        "deploy doctor                          what is wrong here, in at most 3 seconds",
        "sudo deploy doctor                     also what only root sees: ACS, the kernel log",
        "deploy doctor --probe                  also try GPUs, all-reduce and KV transfer for real (minutes)",
        "deploy doctor --json | jq .findings    for programs",
        "deploy doctor --fix-script > fix.sh    every command that mends something; read it, then run it",
        "deploy doctor --save host.json         keep what was seen ...",
        "deploy doctor --host-report host.json  ... and look at it on another machine",
        "deploy doctor --kubernetes             what the cluster of the current kubeconfig lacks",
        "deploy doctor --kubernetes --nodes nodes.json   ... or one that `kubectl get nodes -o json` printed",
    )
    + "\n\n\b\nExit code 3 if an error is among the findings, 0 if none is.",
)
def doctor_verb(
    spec: SpecOption = SPEC,
    profile: ProfileOption = None,
    active: Annotated[bool, typer.Option("--probe", help="Run active tests in the engine's image.")] = False,
    as_json: JsonOption = False,
    fix_script: Annotated[bool, typer.Option("--fix-script", help="Print a shell script of all fixes.")] = False,
    saved: SavedOption = None,
    save_to: Annotated[Path | None, typer.Option("--save", metavar="FILE", help="Write the host report.")] = None,
    least: Annotated[
        Severity, typer.Option("--least", help="Show only what is at least this severe, and not what was not seen.")
    ] = Severity.NOTE,
    limit: LimitOption = LIMIT_SECONDS,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="Look at a cluster instead of this host.")] = False,
    nodes: Annotated[
        Path | None, typer.Option("--nodes", metavar="FILE", help="The cluster in what kubectl printed before.")
    ] = None,
    kubeconfig: Annotated[
        Path | None, typer.Option("--kubeconfig", metavar="FILE", help="For kubectl.", show_default="kubectl's own")
    ] = None,
    context: Annotated[
        str | None, typer.Option("--context", metavar="NAME", help="For kubectl.", show_default="the current one")
    ] = None,
) -> None:
    """Find out what is wrong with this host, why it matters and which command mends it. Changes nothing.

    With --kubernetes the same about a cluster (docs/kubernetes.md).
    """
    if kubernetes:
        if active or saved or save_to:
            raise typer.BadParameter("a cluster is neither tested nor saved", param_hint="--kubernetes")
        _cluster(spec, profile, nodes, kubeconfig, context, as_json=as_json, fix_script=fix_script, least=least)
    if nodes or kubeconfig or context:
        raise typer.BadParameter("it goes with --kubernetes", param_hint="--nodes, --kubeconfig, --context")
    if active and saved:
        raise typer.BadParameter("a saved report cannot be tested; it keeps the results of its own --probe")
    needs = _needs(spec, profile)
    seen = _host(saved, limit, needs)
    if not saved:
        needs = _with_image(needs, seen, limit)
    if active:
        seen = seen.model_copy(update={"active": _active(seen, needs)})
    if save_to:
        save_report(seen, save_to)
    findings, checks = run_checks(seen, needs), len(all_checks())
    if as_json:
        typer.echo(to_json(seen, findings, checks))
    elif fix_script:
        typer.echo(to_script(seen, findings))
    else:
        console().print(to_text(seen, findings, checks, least))
    raise typer.Exit(ERRORS_FOUND if any(finding.severity == Severity.ERROR for finding in findings) else 0)


@app.command(
    "init",
    rich_help_panel=Panel.HOST,
    epilog=examples(
        "deploy init                            show the layout, ask, write deploy.toml",
        "deploy init --dry-run                  only show it",
        "deploy init --env-file .env            also the variables for `docker compose up` by hand",
        "deploy init --host-report host.json --spec host.toml   for another machine",
    ),
)
def init_verb(
    spec: SpecOption = SPEC,
    state: StateOption = STATE,
    env_file: Annotated[
        Path | None, typer.Option("--env-file", metavar="FILE", dir_okay=False, help="Also write this.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written; write nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Replace files without asking.")] = False,
    as_json: JsonOption = False,
    saved: SavedOption = None,
    limit: LimitOption = LIMIT_SECONDS,
) -> None:
    """Propose what this host should run: roles, GPUs, CPUs, memory, settings, each with its reason.

    With fewer than eight GPUs, or where deploy.toml says profile replicas already, it proposes replicas.
    """
    seen = _host(saved, limit, Needs())
    image = image_tag(ROOT)
    init(seen, spec, state=State(state), env_file=env_file, image=image, dry_run=dry_run, yes=yes, as_json=as_json)


@app.command(
    "report",
    rich_help_panel=Panel.HOST,
    epilog=examples(
        "deploy report                          deploy-report-TIME.tar.gz in this folder",
        "deploy report --output bug.tar.gz && tar -xzOf bug.tar.gz | less",
    ),
)
def report_verb(
    spec: SpecOption = SPEC,
    state: StateOption = STATE,
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="The archive to make.")] = None,
    saved: SavedOption = None,
    limit: LimitOption = LIMIT_SECONDS,
) -> None:
    """Collect one archive for a bug report. Keys, serials, UUIDs, names, addresses and home paths are replaced."""
    try:
        needs = _needs(spec, None)
    except DeployError:
        # A broken deploy.toml is no reason to have no bug report; the file itself is in it.
        needs = Needs()
    seen = _host(saved, limit, needs)
    typer.echo(report(ROOT, spec, State(state), seen, needs, output))


def _cluster(
    spec: Path,
    profile: ProfileName | None,
    nodes: Path | None,
    kubeconfig: Path | None,
    context: str | None,
    *,
    as_json: bool,
    fix_script: bool,
    least: Severity,
) -> NoReturn:
    """The same for a cluster."""
    from deploy.doctor import cluster as checks
    from deploy.host import probe_cluster
    from deploy.kubernetes.needs import cluster_needs, look_up_image

    spec_file = load(spec, profile.value if profile else None)
    lock = read_lock(ROOT)
    needs = cluster_needs(spec_file, lock)
    if nodes:
        seen = probe_cluster.read_saved(nodes)
    else:
        machine = LocalMachine(probe_cluster.LIMIT_SECONDS)
        seen = look_up_image(probe_cluster.probe_cluster(machine, kubeconfig, context), spec_file, lock)
    findings, number = checks.run_checks(seen, needs), len(checks.CHECKS)
    if as_json:
        typer.echo(json_of({"cluster": seen.name}, seen.taken_at, findings, seen.unseen, number))
    elif fix_script:
        typer.echo(script_of(seen.name, seen.taken_at, findings))
    else:
        console().print(text_of(checks.headline(seen), findings, seen.unseen, number, least))
    raise typer.Exit(ERRORS_FOUND if any(finding.severity == Severity.ERROR for finding in findings) else 0)


def _needs(spec: Path, profile: ProfileName | None) -> Needs:
    """What deploy.toml asks of the host; nothing in particular without one."""
    if not spec.exists() and profile is None:
        return Needs()
    spec_file = load(spec, profile.value if profile else None)
    generated = spec_file.spec.profile == "cpu"
    return needs_of(spec_file.spec, None if generated else str(model_folder(spec_file, State(STATE))), 0)


def _host(saved: Path | None, limit: float, needs: Needs) -> HostReport:
    if saved is None:
        return probe(LocalMachine(limit), limit, needs.model_folder)
    try:
        return load_report(saved)
    except UnreadableReport as error:
        raise typer.BadParameter(str(error), param_hint="--host-report") from error


def _with_image(needs: Needs, seen: HostReport, limit: float) -> Needs:
    """The room that the image still needs: none once it is there."""
    there = bool(seen.docker and seen.docker.server) and has_image(LocalMachine(limit), image_tag(ROOT))
    return needs.model_copy(update={"image_bytes": 0 if there else IMAGE_BYTES})


def _active(seen: HostReport, needs: Needs) -> ActiveTests:
    """Run the active tests.

    Raises:
        HostError: the image is not here, or no engine answers.
    """
    image = image_tag(ROOT)
    machine = LocalMachine(CONTAINER_SECONDS)
    if not has_image(machine, image):
        raise HostError("active tests need the engine's image", f"this host has no {image}", "deploy build")
    gpus = [gpu for gpu in seen.gpus if not gpu.mig] if wants_gpus(seen, needs) else []
    firsts = [gpu for role in needs.roles if role.gpus and (gpu := find_gpu(seen, role.gpus[0]))]
    pair = firsts if gpus and len(firsts) == 2 else [*gpus[:1], *gpus[1:][-1:]]
    return ActiveProbe(machine, image, gpus, pair, lambda line: err.print(line, style="dim")).run()
