"""The verbs of `deploy`: each parses its arguments, calls one function and shows what it returned."""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.live import Live

from deploy import (
    bake_verbs,
    completion,
    export_verbs,
    gap_verbs,
    generation_verbs,
    host_verbs,
    image_verbs,
    lock_verbs,
    model_verbs,
    observe_verbs,
    patches_verbs,
    plan_verbs,
    profile_verbs,
    render,
    scale_verbs,
    tune_verbs,
    watch_verbs,
)
from deploy.command_line import (
    ROOT,
    SPEC,
    STATE,
    CertificatesOption,
    JsonOption,
    MirrorOption,
    Panel,
    ProfileName,
    ProfileOption,
    Program,
    SecurityMirrorOption,
    SpecOption,
    StateOption,
    console,
    examples,
    print_json,
    verbs,
)
from deploy.entry import run
from deploy.errors import DeployError
from deploy.host import probe
from deploy.host.docker_facts import require_docker
from deploy.host.probe_host import LocalMachine
from deploy.image.build import ensure_image
from deploy.image.inputs import image_tag
from deploy.spec.load import load
from deploy.spec.model import Profile
from deploy.spec.profiles import ALL_ENGINES
from deploy.stack import cleanup, docker_engine
from deploy.stack.client import Endpoint, endpoint, stream
from deploy.stack.compose import running_stack
from deploy.stack.events import step
from deploy.stack.exposition import write_roles
from deploy.stack.memory import plan_on, require_memory
from deploy.stack.phases import plain
from deploy.stack.preview import preview
from deploy.stack.state import State
from deploy.stack.status import Status, running_endpoint, status, uptime
from deploy.stack.up import Result, build_progress, down, plan, up
from deploy.status import live as engine_view
from deploy.version import VersionOption
from loadtest.cli import DEFAULT_URL, bench

NOT_SERVING = 4
HEALTH_CHECK = re.compile(r'"rid": ?"HEALTH_CHECK_')
"""In what SGLang logs of a request: it is one of its own health check."""
NEXT = ('chat "Hello"', "status --watch", "logs --follow", "bench -c 1,16", "down")
EXIT_CODES = """\b
Exit codes:
  0    done
  1    failed
  2    wrong command line or deploy.toml
  3    this machine cannot do it (Docker, GPU, port, disk, memory, model folder)
  4    a role failed to start, or the stack does not serve
  5    another deploy command is at work
  130  interrupted; what was begun has been undone"""


class RoleName(StrEnum):
    prefill = "prefill"
    decode = "decode"
    engine = "engine"
    engine_2 = "engine-2"
    engine_3 = "engine-3"
    engine_4 = "engine-4"
    router = "router"
    front = "front"
    exporter = "exporter"
    prometheus = "prometheus"


app = verbs(
    name="deploy",
    cls=Program,
    help="DeepSeek-V4-Flash in containers, from deploy.toml to an accepted endpoint.",
    epilog=examples(
        "deploy doctor            what is wrong with this host",
        "deploy init              propose deploy.toml",
        "deploy up                start what it says, and return once it has served a request",
        'deploy chat "Hello"',
    )
    + "\n\n"
    + EXIT_CODES,
    no_args_is_help=True,
)
docker_app = verbs(
    help="Start a Docker engine where there is none, and stop it again.",
    epilog=examples("deploy docker start", "deploy docker run -- make test-unit"),
    no_args_is_help=True,
)
app.add_typer(docker_app, name="docker", rich_help_panel=Panel.HOST)
app.add_typer(bench, name="bench", rich_help_panel=Panel.TUNE)
app.add_typer(patches_verbs.app, name="patches", rich_help_panel=Panel.LOCK)
app.add_typer(export_verbs.app, name="export", rich_help_panel=Panel.LOCK)
app.add_typer(gap_verbs.app)
app.add_typer(bake_verbs.app, name="bake", rich_help_panel=Panel.LOCK)
app.add_typer(generation_verbs.app)
app.add_typer(watch_verbs.app)
app.add_typer(host_verbs.app)
app.add_typer(image_verbs.app)
app.add_typer(lock_verbs.app)
app.add_typer(profile_verbs.app)
app.add_typer(plan_verbs.app)
app.add_typer(observe_verbs.app)
app.add_typer(scale_verbs.app)
app.add_typer(tune_verbs.app)
app.add_typer(model_verbs.app, name="model", rich_help_panel=Panel.LOCK)


@app.callback()
def _defaults(context: typer.Context, version: VersionOption = False) -> None:
    """What the load test takes from the running stack unless it is told otherwise."""
    context.default_map = {
        "bench": {
            "url": lambda: _served().url,
            "api_key_file": lambda: _served().api_key_file,
            "ca_file": lambda: _served().certificate,
        }
    }


@functools.cache
def _served() -> Endpoint:
    folder = State(Path(os.environ.get("DEPLOY_STATE") or STATE))
    if not folder.environment.exists():
        return Endpoint(DEFAULT_URL, "")
    return endpoint(running_stack(ROOT, folder.environment).config())


out = console()
err = console(stderr=True)


@app.command(
    "up",
    rich_help_panel=Panel.CHANGE,
    epilog=examples(
        "deploy up                     what deploy.toml says",
        "deploy up --profile cpu       the same three services without GPUs",
        "deploy up --json | jq .acceptance",
    ),
)
def up_verb(
    spec: SpecOption = SPEC,
    state: StateOption = STATE,
    profile: ProfileOption = None,
    mirror: MirrorOption = None,
    security_mirror: SecurityMirrorOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the host, build the image if needed, start the stack, and return once it has served a request."""
    spec_file = load(spec, _profile(profile))
    with render.steps(err) as report:
        result = up(ROOT, spec_file, State(state), report, mirror, security_mirror)
    if as_json:
        print_json(_up_json(result))
    else:
        _show_up(result)


@app.command(
    "down",
    rich_help_panel=Panel.CHANGE,
    epilog=examples(
        "deploy down                   containers, networks and volumes",
        "deploy down --keep-cache      but not the compiled kernels (minutes of the next start on GPUs)",
        "deploy down --all             image, generated model and build cache too",
    ),
)
def down_verb(
    state: StateOption = STATE,
    keep_cache: Annotated[bool, typer.Option("--keep-cache", help="Keep the volume with compiled kernels.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also the image, the generated model, the state.")] = False,
) -> None:
    """Stop the stack and remove what `up` made. Requests in flight may finish first."""
    folder = State(state)
    if everything and docker_engine.was_started_by_hand(folder):
        # The machine was restarted since: what is to be removed lies in an engine that does not run.
        docker_engine.ensure(folder, may_install=False, say=_say)
    facts = probe.docker_facts()
    if everything and not facts.server and not facts.forbidden and not folder.environment.exists():
        _say("no Docker engine answers, and nothing was started from here: only files are removed")
        removed = []
    else:
        require_docker(facts, cdi=False)
        with render.steps(err) as report, step("stop", report) as running:
            running.progress("requests in flight may finish")
            removed = down(running_stack(ROOT, folder.environment), folder, keep_volumes=keep_cache)
    if everything:
        with render.steps(err) as report, step("clean", report) as running:
            running.progress("images, build cache, files")
            removed += cleanup.remove_all(folder)
    for item in removed:
        out.print(f"removed {item}", markup=False, soft_wrap=True)
    if not removed:
        out.print("nothing to remove")


@app.command(
    "status",
    rich_help_panel=Panel.LOOK,
    epilog=examples(
        "deploy status", "deploy status --watch", "deploy status --json | jq -r '.roles[] | .role, .health'"
    ),
)
def status_verb(
    state: StateOption = STATE,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again every second until Ctrl-C.")] = False,
    url: Annotated[bool, typer.Option("--url", help="Print only the URL.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the containers, their health and the URL. Exit code 4 unless all of it serves."""
    require_docker(probe.docker_facts(), cdi=False)

    folder = State(state)
    stack = running_stack(ROOT, folder.environment)
    if watch:
        _watch(folder, as_json)
    seen = status(stack)
    write_roles(folder, seen.roles, datetime.now(UTC))
    if url:
        if seen.url:
            out.print(seen.url)
    elif as_json:
        print_json(seen.as_dict())
    else:
        out.print(_status_view(seen, folder))
    if not seen.serving:
        raise typer.Exit(NOT_SERVING)


@app.command(
    "logs",
    rich_help_panel=Panel.LOOK,
    epilog=examples("deploy logs", "deploy logs decode --follow", "deploy logs engine-2 router --tail 50 --since 10m"),
)
def logs_verb(
    roles: Annotated[
        list[RoleName] | None,
        typer.Argument(help="Only these.", show_default="all", autocompletion=completion.roles),
    ] = None,
    state: StateOption = STATE,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    tail: Annotated[str, typer.Option("--tail", "-n", help="Lines of each role to begin with, or all.")] = "200",
    since: Annotated[str | None, typer.Option("--since", help="Not older than, for example 10m or 2h.")] = None,
    probes: Annotated[bool, typer.Option("--probes", help="The health checks' requests too.")] = False,
) -> None:
    """Show what the roles log, role by role; with --follow as it comes."""
    require_docker(probe.docker_facts(), cdi=False)
    folder = State(state)
    stack = running_stack(ROOT, folder.environment)
    if not stack.roles():
        raise folder.nothing_runs("there is no container of this stack")
    if missing := [role.value for role in roles or [] if role.value not in stack.expected]:
        raise DeployError(
            f"there is no {', '.join(missing)} in this stack",
            f"profile {stack.profile} has {', '.join(stack.expected)}",
            "deploy logs",
        )
    if tail != "all" and not tail.isdecimal():
        raise typer.BadParameter("a number or all", param_hint="--tail")
    if since and not re.fullmatch(r"(\d+(\.\d+)?[smhd])+|\d{4}-\d\d-\d\d(T.+)?|\d+", since):
        raise typer.BadParameter("a time such as 10m, 2h or 2026-01-31T12:00:00", param_hint="--since")
    names = [role.value for role in roles or []]
    lines: Any = stack.docker.compose.logs(names, tail=tail, since=since, follow=follow, stream=True)
    left_out = 0
    try:
        for _, line in lines:
            text = line.decode(errors="replace")
            if not probes and HEALTH_CHECK.search(text):
                left_out += 1
                continue
            # Compose starts each line by clearing the one below the cursor; the router colours its log even in a pipe.
            sys.stdout.write(text.removeprefix("\x1b[2K") if out.is_terminal else plain(text))
            sys.stdout.flush()
    finally:
        if left_out:
            err.print(f"without {left_out} lines of health checks: --probes shows them", soft_wrap=True)


@app.command(
    "chat",
    rich_help_panel=Panel.LOOK,
    epilog=examples(
        'deploy chat "Why is the sky blue?"',
        "deploy chat --max-tokens 2000 < question.txt",
        "deploy chat --json hello | jq .answer_tokens",
    ),
)
def chat_verb(
    question: Annotated[
        str | None, typer.Argument(help="Read from standard input if missing.", show_default=False)
    ] = None,
    state: StateOption = STATE,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="The longest answer.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", "-t", min=0, max=2, help="0: always the same.")] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Ask one question and stream the answer."""
    if question is None and sys.stdin.isatty():
        err.print("the question, then Ctrl-D:")
    text = sys.stdin.read() if question is None else question
    if not text.strip():
        raise typer.BadParameter("the question is empty", param_hint="QUESTION")
    require_docker(probe.docker_facts(), cdi=False)
    folder = State(state)
    stack = running_stack(ROOT, folder.environment)
    target = running_endpoint(stack, tuple(stack.roles()))
    if target is None:
        raise folder.nothing_runs("there is no router of this stack")
    begun, first, pieces = time.monotonic(), 0.0, list[str]()
    answer = stream(target, text, max_tokens=max_tokens, temperature=temperature)
    while True:
        try:
            piece = next(answer)
        except StopIteration as end:
            usage = end.value
            break
        first = first or time.monotonic() - begun
        pieces.append(piece)
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()
    seconds = time.monotonic() - begun
    if as_json:
        print_json(
            {
                "answer": "".join(pieces),
                "prompt_tokens": usage.prompt,
                "answer_tokens": usage.completion,
                "first_token_s": round(first, 3),
                "seconds": round(seconds, 3),
            }
        )
    else:
        sys.stdout.write("\n")
        err.print(
            f"{usage.prompt} prompt tokens, {usage.completion} answer tokens, first after {first:.2f} s, "
            f"{usage.completion / seconds:.1f} tok/s",
            style="dim",
        )


@app.command(
    "build",
    rich_help_panel=Panel.LOCK,
    epilog=examples("deploy build", "deploy build --mirror https://example.org/debian --json"),
)
def build_verb(
    mirror: MirrorOption = None,
    security_mirror: SecurityMirrorOption = None,
    certificates: CertificatesOption = None,
    wheel_cache: Annotated[bool, typer.Option("--wheel-cache", help="Keep the wheels (10 GB) for next time.")] = False,
    rebuild: Annotated[bool, typer.Option("--rebuild", help="Even if the image is there; use no cached step.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build the engine image that the repository's files decide, unless it is here already."""
    require_docker(probe.docker_facts(), cdi=False)
    with render.steps(err) as report, step("image", report) as running:
        image = ensure_image(
            ROOT,
            progress=build_progress(running),
            mirror=mirror,
            security_mirror=security_mirror,
            certificates=certificates,
            wheel_cache=wheel_cache,
            rebuild=rebuild,
        )
        running.outcome = "built" if image.built else "already here"
    if as_json:
        print_json(asdict(image))
    else:
        out.print(f"{image.tag}  {image.id}  {image.size_bytes / 1e9:.1f} GB", soft_wrap=True)


@app.command(
    "config",
    rich_help_panel=Panel.LOOK,
    epilog=examples(
        "deploy config                 Compose's own view, then each argument with its origin",
        "deploy config --arguments     only the arguments and variables",
        "deploy config --profile cpu --json",
    ),
)
def config_verb(
    spec: SpecOption = SPEC,
    state: StateOption = STATE,
    profile: ProfileOption = None,
    arguments: Annotated[bool, typer.Option("--arguments", help="Only arguments and variables.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show the effective compose configuration, the origin of each argument, and the memory plan. Changes nothing."""
    spec_file = load(spec, _profile(profile))
    stack, lines = plan(ROOT, spec_file, State(state), image_tag(ROOT))
    memory = plan_on(spec_file.spec, probe.gpus() if spec_file.spec.roles else ())
    if memory:
        require_memory(spec_file, memory[0])
    config, found = preview(stack, lines)
    if as_json:
        shown = {"plan": asdict(memory[0]), "size_from": memory[1]} if memory else None
        print_json({"compose": config, "settings": [asdict(setting) for setting in found], "memory": shown})
        return
    if not arguments:
        sys.stdout.write(str(yaml.safe_dump(config, sort_keys=False)))  # pyright: ignore[reportUnknownMemberType]
    rows = [[item.service, _setting(item.name, item.value), item.origin] for item in found]
    if memory:
        rows.append(["each engine", str(memory[0]), memory[1]])
    if out.is_terminal:
        out.print(render.table(["service", "argument or variable", "origin"], rows))
    else:
        for row in rows:
            sys.stdout.write("\t".join(row) + "\n")


@docker_app.command("start", epilog=examples("deploy docker start", "INSTALL_DOCKER=no deploy docker start"))
def docker_start(
    state: StateOption = STATE,
    install: Annotated[str, typer.Option(envvar="INSTALL_DOCKER", help="yes or no.")] = "yes",
) -> None:
    """Make sure that a Docker engine answers: start it, install it before if there is none. Says what it changes."""
    started = docker_engine.ensure(State(state), may_install=_yes(install), say=_say)
    require_docker(probe.docker_facts(), cdi=False)
    if not started:
        _say(f"Docker engine {probe.docker_facts().server} answers; nothing to do")


@docker_app.command("stop", epilog=examples("deploy down --all && deploy docker stop"))
def docker_stop(state: StateOption = STATE) -> None:
    """Stop the engine that `deploy docker start` started by hand; any other engine stays as it is."""
    if not docker_engine.stop(State(state), _say):
        _say("no Docker engine was started by hand from here")


@docker_app.command(
    "run",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog=examples("deploy docker run -- pytest tests/docker"),
)
def docker_run(
    context: typer.Context,
    state: StateOption = STATE,
    install: Annotated[str, typer.Option(envvar="INSTALL_DOCKER", help="yes or no.")] = "yes",
) -> None:
    """Run a command with a Docker engine at hand, and stop the engine afterwards if this started it."""
    if not context.args:
        raise typer.BadParameter("give a command after --")
    folder = State(state)
    started = docker_engine.ensure(folder, may_install=_yes(install), say=_say)
    try:
        code = subprocess.run(context.args).returncode
    except FileNotFoundError as error:
        raise DeployError(f"cannot run {shlex.join(context.args)}", str(error), "check the command after --") from error
    finally:
        if started:
            docker_engine.stop(folder, _say)
    raise typer.Exit(code)


def _profile(profile: ProfileName | None) -> Profile | None:
    return None if profile is None else profile.value


def _yes(answer: str) -> bool:
    if answer.lower() not in ("yes", "no"):
        raise typer.BadParameter("yes or no", param_hint="INSTALL_DOCKER")
    return answer.lower() == "yes"


def _say(text: str) -> None:
    err.print(text, markup=False, soft_wrap=True)


def _setting(name: str, value: str) -> str:
    return f"{name}={value}" if name else value


def _up_json(result: Result) -> dict[str, Any]:
    return {
        "acceptance": result.acceptance.as_dict(),
        "image": asdict(result.image),
        "changed": result.changed,
        "seconds": round(result.seconds, 1),
        "generation": result.generation,
    }


def _program() -> str:
    """How to call this program from here: by its name where the shell finds it, else by its path."""
    return "deploy" if shutil.which("deploy") else os.path.relpath(sys.argv[0])


def _show_up(result: Result) -> None:
    accepted = result.acceptance
    key = ' -H "Authorization: Bearer $(cat API_KEY_FILE)"' if accepted.needs_key else ""
    body = json.dumps({"model": accepted.model, "messages": [{"role": "user", "content": "Hello"}]})
    lines = [
        f"Accepted in {result.seconds:.0f} s: {accepted.url} serves {accepted.model} (generation {result.generation})",
        "",
        f"  curl {accepted.url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'",
        "",
        "Next: " + "   ".join(f"{_program()} {verb}" for verb in NEXT),
    ]
    out.print("\n".join(lines), markup=False, soft_wrap=True)


def _status_view(seen: Status, folder: State) -> Any:
    colours = {"healthy": "green", "unhealthy": "red", "exited": "red", "starting": "yellow", "running": "green"}
    rows = [
        [
            state.role,
            state.status if state.status != "exited" else f"exited {state.exit_code}",
            state.health,
            seen.phases.get(state.role, ""),
            uptime(state),
            str(state.restarts),
            state.image,
        ]
        for state in seen.roles
    ]
    if not rows:
        nothing = folder.nothing_runs("there is no container of this stack")
        return f"{nothing.message}: {nothing.why}\n  fix: {nothing.fix}"
    head = f"{seen.url}: {'ready' if seen.ready else 'not ready'}" if seen.url else "no router"
    table = render.table(["role", "state", "health", "phase", "up", "restarts", "image"], rows, colours)
    return render.stacked(head, table, *(f"{role} {counts.words()}" for role, counts in seen.compiled.items()))


def _watch(folder: State, as_json: bool) -> None:
    """Show the status again and again until Ctrl-C, which is the way to end it and no failure."""
    engines = engine_view.Live(LocalMachine())

    def look() -> tuple[Status, list[engine_view.RoleView]]:
        stack = running_stack(ROOT, folder.environment)
        seen = status(stack, ask=False)
        running = any(state.role in ALL_ENGINES and state.status == "running" for state in seen.roles)
        return seen, engines.look(stack) if running else []

    try:
        if as_json or not out.is_terminal:
            while True:
                seen, views = look()
                data = seen.as_dict() | {"engines": [view.as_dict() for view in views]}
                sys.stdout.write((json.dumps(data, default=str) if as_json else _plain(seen, views)) + "\n")
                sys.stdout.flush()
                time.sleep(1)
        with Live(console=out, auto_refresh=False, screen=False) as live:
            while True:
                seen, views = look()
                shown = [_status_view(seen, folder), *(["", engine_view.draw(views)] if views else [])]
                live.update(render.stacked(*shown), refresh=True)
                time.sleep(1)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def _plain(seen: Status, views: list[engine_view.RoleView]) -> str:
    roles = " ".join(f"{state.role}={state.health or state.status}" for state in seen.roles)
    speeds = " ".join(f"{view.role}={view.tokens_per_second or 0:.1f}tok/s" for view in views)
    return f"{time.strftime('%H:%M:%S')} {'serving' if seen.serving else 'not serving'} {roles} {speeds}".rstrip()


def main() -> None:
    """Run the command line."""
    run(app)


if __name__ == "__main__":
    main()
