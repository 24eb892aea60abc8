"""The verb `deploy doctor`."""

from pathlib import Path

import typer
from rich.console import Console

from deploy.doctor.finding import Needs, Severity
from deploy.doctor.render import to_json, to_script, to_text
from deploy.doctor.run import all_checks, run_checks
from deploy.host.probe_host import LIMIT_SECONDS, LocalMachine, probe
from deploy.host.report import HostReport, UnreadableReport, load, save

EXAMPLES = """
\b
Examples:
  deploy doctor                          what is wrong here, in at most 3 seconds
  sudo deploy doctor                     also what only root sees: ACS, kernel log
  deploy doctor --json | jq .findings    for programs
  deploy doctor --fix-script > fix.sh    every command that mends something; read it, then run it
  deploy doctor --save host.json         keep what was seen …
  deploy doctor --host-report host.json  … and look at it on another machine

Exit status: 0 no error found, 1 errors found, 2 wrong use.
"""


def host_report(saved: Path | None, limit: float, model_folder: str | None) -> HostReport:
    """The saved report, or a fresh look at this host.

    Raises:
        typer.Exit: with status 2 if the file is no report; the reason goes to stderr.
    """
    if saved is None:
        return probe(LocalMachine(limit), limit, model_folder)
    try:
        return load(saved)
    except UnreadableReport as error:
        Console(stderr=True).print(f"[red]error:[/] not a host report: {error}", highlight=False)
        raise typer.Exit(2) from error


def doctor(
    needs: Needs,
    *,
    as_json: bool = False,
    fix_script: bool = False,
    saved: Path | None = None,
    save_to: Path | None = None,
    limit: float = LIMIT_SECONDS,
) -> None:
    """Find out what is wrong with this host, why it matters and which command mends it.

    Args:
        needs: what the host is to run.
        as_json: print findings as JSON.
        fix_script: print a shell script of all fixes.
        saved: check this saved report instead of this host.
        save_to: write the host report here.
        limit: seconds each command of the probe may take.

    Raises:
        typer.Exit: 1 if there are errors among the findings, else 0; 2 if `saved` is no report.
    """
    report = host_report(saved, limit, needs.model_folder)
    if save_to:
        save(report, save_to)
    findings, checks = run_checks(report, needs), len(all_checks())
    if as_json:
        typer.echo(to_json(report, findings, checks))
    elif fix_script:
        typer.echo(to_script(report, findings))
    else:
        Console(highlight=False).print(to_text(report, findings, checks))
    raise typer.Exit(1 if any(finding.severity == Severity.ERROR for finding in findings) else 0)
