"""`deploy watch`: looks after the running stack."""

import json
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from python_on_whales.exceptions import DockerException

from deploy import render
from deploy.command_line import ROOT, STATE, JsonOption, Panel, StateOption, console, examples, verbs
from deploy.host import probe
from deploy.host.docker_facts import require_docker
from deploy.stack.compose import words
from deploy.stack.state import State
from deploy.stack.watch import Incident, watch

app = verbs()
err = console(stderr=True)


@app.command(
    "watch",
    rich_help_panel=Panel.CHANGE,
    epilog=examples(
        "deploy watch                        until Ctrl-C",
        "deploy watch --once                 one look, for a timer",
        "deploy watch --json >> watch.log    a line for each incident",
    ),
)
def watch_verb(
    state: StateOption = STATE,
    interval: Annotated[float, typer.Option("--interval", min=1, max=3600, help="Seconds between two looks.")] = 5,
    once: Annotated[bool, typer.Option("--once", help="Look once.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Restart a role that is stuck, stop one that dies again and again, and keep the logs around each incident.

    Runs beside other deploy commands and leaves the stack to them while they change it. Incidents are kept in the
    state folder under incidents/, the newest fifty.
    """
    require_docker(probe.docker_facts(), cdi=False)

    def told(incident: Incident, folder: Path) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        if as_json:
            line = json.dumps({"time": now, **asdict(incident), "record": str(folder)})
        else:
            line = f"{now} {incident.role} {incident.kind}: {incident.what}; {incident.remedy}; {folder}"
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def trouble(error: Exception) -> None:
        what = words(error) if isinstance(error, DockerException) else str(error)
        err.print(f"this look failed: {what}", markup=False, soft_wrap=True)

    try:
        with render.steps(err) as report:
            watch(ROOT, State(state), interval, report, told, trouble, once)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
