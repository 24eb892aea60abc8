"""The verbs that look at what runs: `deploy trace`, `deploy metrics`."""

import sys
from typing import Annotated, Any

import typer

from deploy import render
from deploy.command_line import ROOT, STATE, JsonOption, Panel, StateOption, console, examples, print_json, verbs
from deploy.errors import DeployError, WrongInput
from deploy.host import probe
from deploy.host.docker_facts import require_docker
from deploy.spec.profiles import EXPORTER
from deploy.stack.compose import Stack, running_stack
from deploy.stack.state import State
from deploy.stack.trace import REQUEST_ID, Trace, trace

# Inside the stack.
EXPORTER_PORT = 9400

app = verbs()
out = console()


@app.command(
    "trace",
    rich_help_panel=Panel.LOOK,
    epilog=examples(
        "deploy trace order-66                 what the client or the front called it",
        "deploy trace order-66 --since 10m --json | jq .steps",
    ),
)
def trace_verb(
    request_id: Annotated[str, typer.Argument(help="X-Request-Id of the answer.", show_default=False)],
    state: StateOption = STATE,
    since: Annotated[str, typer.Option("--since", help="Logs not older than this.")] = "24h",
    as_json: JsonOption = False,
) -> None:
    """Follow one request through the logs of all roles, front to decode. Exit code 1 if there is nothing of it."""
    if not REQUEST_ID.fullmatch(request_id):
        raise typer.BadParameter("letters, digits and . _ - alone, 128 at most", param_hint="REQUEST_ID")
    stack = _running(state)
    found = trace({role.role: stack.stamped_log(role.container, since) for role in stack.roles()}, request_id)
    if as_json:
        print_json(found.as_dict())
    elif found.steps:
        _show(found)
    if not found.steps:
        raise DeployError(
            f"no log holds a request {request_id}",
            f"Docker keeps the last 250 MB of each container's log, and this looked at {since} of it",
            "take the id from the X-Request-Id of an answer; deploy trace ID --since 72h",
        )


@app.command(
    "metrics", rich_help_panel=Panel.LOOK, epilog=examples("deploy metrics", "deploy metrics | grep ^deploy_role")
)
def metrics_verb(state: StateOption = STATE) -> None:
    """Print the page with the metrics of all roles, as Prometheus would get it now."""
    stack = _running(state)
    if EXPORTER not in stack.expected:
        raise WrongInput(
            "this stack has no page of metrics",
            "it was started without one",
            "set metrics.port in deploy.toml, deploy up",
        )
    sys.stdout.write(stack.metrics(EXPORTER, EXPORTER_PORT))


def _running(state: StateOption) -> Stack:
    require_docker(probe.docker_facts(), cdi=False)
    folder = State(state)
    stack = running_stack(ROOT, folder.environment)
    if not stack.roles():
        raise folder.nothing_runs("there is no container of this stack")
    return stack


def _show(found: Trace) -> None:
    rows = [
        [
            step.at[11:23],
            step.role,
            step.event,
            "  ".join(f"{key}={in_words(key, it)}" for key, it in step.details.items()),
        ]
        for step in found.steps
    ]
    if out.is_terminal:
        out.print(render.table(["time (UTC)", "role", "event", "details"], rows))
        return
    for row in rows:
        sys.stdout.write("\t".join(row) + "\n")


def in_words(name: str, value: Any) -> str:
    """A detail for people: the engines log seconds, the router microseconds, and reasons with what matched."""
    match name, value:
        case (("e2e_latency" | "queue_time"), int() | float()):
            return f"{value * 1000:.1f}ms"
        case "latency", str() if value.isdecimal():
            return f"{int(value) / 1000:.1f}ms"
        case "finish_reason", {"type": "stop" | "length" as reason}:
            return reason
        case _:
            return str(value)
