"""The verbs `bake` and `bake modules`: what one host compiled, for all others. `cli.py` mounts them."""

import os
from dataclasses import asdict
from typing import Annotated

import psutil
import typer

from deploy import render
from deploy.bake import modules
from deploy.bake.artifact import Baked, bake, gpu_kind, image_manifest, with_cache
from deploy.bake.warm import Round, limits, warm
from deploy.command_line import (
    ROOT,
    SPEC,
    STATE,
    JsonOption,
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
from deploy.image.named_registry import registry_client
from deploy.image.transfer import require_built, tag_of
from deploy.lock.document import FILE_NAME
from deploy.lock.model import ImageLock, read_lock, write_lock
from deploy.stack.client import RequestFailed
from deploy.stack.compose import Stack, running_stack
from deploy.stack.events import step
from deploy.stack.state import State
from deploy.stack.status import running_endpoint

app = verbs(invoke_without_command=True)
out = console()
err = console(stderr=True)


ToOption = Annotated[
    str | None,
    typer.Option("--to", metavar="REGISTRY", help="HOST[:PORT][/PATH].", show_default="[image] registry"),
]


@app.callback(
    epilog=examples(
        "deploy bake                            warm the running stack up, push what it compiled",
        "deploy bake --no-warm                  push what it has compiled so far",
        "deploy bake --to registry.lan:5000     to another registry than deploy.toml's",
        "deploy bake && git add deploy.lock     the other hosts' `deploy up` fetches it",
        "deploy bake --json | jq .warmed",
        "deploy bake modules                    before there is a GPU host: what nvcc compiles for minutes",
    ),
)
def bake_verb(
    context: typer.Context,
    to: ToOption = None,
    warm_up: Annotated[bool, typer.Option("--warm/--no-warm", help="Send requests of all sizes first.")] = True,
    spec: SpecOption = SPEC,
    state: StateOption = STATE,
    as_json: JsonOption = False,
) -> None:
    """Keep what the engines of this host compiled beyond the image, so that no other host compiles it.

    The stack must serve. Requests of every length and batch size make it compile the rest; then its cache goes into
    the registry beside the image, for this kind of GPU, and deploy.lock names it. `deploy up` on another host fetches
    what deploy.lock names, verified, before the engines start.
    """
    if context.invoked_subcommand:
        sources = [context.get_parameter_source(name) for name in context.params]
        if any(source and source.name == "COMMANDLINE" for source in sources):
            raise typer.BadParameter(f"options of `{context.invoked_subcommand}` go after it")
        return
    require_docker(probe.docker_facts(), cdi=False)
    lock = read_lock(ROOT)
    image = require_built(lock.image)
    folder = State(state)
    with registry_client(to, spec) as client, folder.lock("bake"), render.steps(err) as report:
        # It refuses before anything that takes long.
        image_manifest(image, client)
        stack = running_stack(ROOT, folder.environment)
        _require_locked_image(stack, image, folder)
        gpu = gpu_kind(stack.profile, probe.gpus())
        rounds: list[Round] = []
        if warm_up:
            target = running_endpoint(stack, tuple(stack.roles()))
            if target is None or not target.ready():
                raise RequestFailed("the stack does not serve", "its router is not ready", "deploy status")
            with step("warm", report) as running:
                longest, most = limits(stack.config())
                for found in warm(stack, target, longest, most, running.progress):
                    rounds.append(found)
                running.outcome = "; ".join(f"{found.requests} requests, {found.total} compiled" for found in rounds)
        with step("push", report) as running:

            def harvested(done: int, total: int) -> None:
                running.progress("packing", done, total)

            baked = bake(stack.project, image, tag_of(image), gpu, client, harvested)
            running.outcome = _size(baked)
        known = with_cache(image, baked.cache)
        if known != image:
            write_lock(ROOT, lock.model_copy(update={"image": known}))
    if as_json:
        warmed = [asdict(found) | {"total": found.total} for found in rounds]
        facts = {"gpu": gpu, "reference": baked.reference, "changed": known != image, "warmed": warmed}
        print_json(facts | asdict(baked.packed) | {"compressed": baked.cache.size})
        return
    out.print(f"{baked.reference}  {gpu}  {baked.cache.size / 1e6:,.1f} MB", soft_wrap=True)
    if rounds and rounds[-1].total:
        err.print("the last round still compiled something: run it again")
    if known != image:
        err.print(f"{FILE_NAME} has its digest now: commit it, the other hosts fetch what it names")


@app.command(
    "modules",
    epilog=examples(
        "deploy bake modules                         all of them",
        "deploy bake modules --jobs 32               on a host with 100 GB of memory",
        "deploy bake modules sparse_mla_sm120        this one, and what an earlier run left",
        "deploy bake modules && git add deploy.lock  the GPU hosts' `deploy up` fetches them",
        "deploy bake modules --json | jq .compiled",
    ),
)
def modules_verb(
    names: Annotated[list[str] | None, typer.Argument(metavar="MODULE", help="All if none is named.")] = None,
    to: ToOption = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=512, help="Compilers at a time.", show_default="processors, 3 GiB of memory each"),
    ] = None,
    spec: SpecOption = SPEC,
    state: StateOption = STATE,
    as_json: JsonOption = False,
) -> None:
    """Compile with nvcc, on a host without a GPU, the modules that are too long for the image build.

    These are FlashInfer's and SGLang's CUTLASS kernels for this model on sm_120, which the first GPU host would compile
    at its start. They go where `deploy bake` puts what a GPU host compiled, together with it if deploy.lock names
    that already. Interrupted, the next run goes on where this one was.
    """
    require_docker(probe.docker_facts(), cdi=False)
    lock = read_lock(ROOT)
    image = require_built(lock.image)
    name = tag_of(image)
    at_a_time = jobs or modules.jobs_that_fit(os.cpu_count() or 1, psutil.virtual_memory().available)
    with registry_client(to, spec) as client, State(state).lock("bake"), render.steps(err) as report:
        # It refuses before anything is compiled.
        image_manifest(image, client)
        with step("caches", report) as running:
            running.outcome = modules.take_over(image, name, client)
        with step("compile", report) as running:
            found = modules.compile_missing(image, name, names or (), at_a_time, running.progress)
            seconds = sum(one.seconds for one in found)
            running.outcome = (
                f"{len(found)} compiled, {seconds:,.0f} s of {at_a_time} at a time" if found else "all there"
            )
        with step("push", report) as running:

            def packing(done: int, total: int) -> None:
                running.progress("packing", done, total)

            baked = bake(modules.workshop(image), image, name, modules.GPU, client, packing)
            running.outcome = _size(baked)
        known = with_cache(image, baked.cache)
        if known != image:
            write_lock(ROOT, lock.model_copy(update={"image": known}))
        modules.clear(image)
    if as_json:
        facts = {"gpu": modules.GPU, "reference": baked.reference, "changed": known != image}
        compiled = [asdict(one) for one in found]
        print_json(facts | {"compiled": compiled} | asdict(baked.packed) | {"compressed": baked.cache.size})
        return
    for one in found:
        out.print(f"{one.name}  {one.seconds:,.0f} s  {one.size / 1e6:,.1f} MB")
    out.print(f"{baked.reference}  {modules.GPU}  {baked.cache.size / 1e6:,.1f} MB", soft_wrap=True)
    if known != image:
        err.print(f"{FILE_NAME} has its digest now: commit it, the GPU hosts fetch what it names")


def _size(baked: Baked) -> str:
    size = f"{baked.packed.files} files, {baked.packed.size / 1e6:,.1f} MB"
    return f"{size}, {baked.cache.size / 1e6:,.1f} MB compressed"


def _require_locked_image(stack: Stack, image: ImageLock, folder: State) -> None:
    """What another image's engines compiled must not lie beside this one."""
    roles = [state for state in stack.roles() if state.role in stack.expected]
    if not roles:
        raise folder.nothing_runs("there is no container of this stack")
    if waiting := [state.role for state in roles if not state.serving]:
        raise RequestFailed("the stack does not serve", f"{', '.join(waiting)} is not healthy", "deploy status")
    tag = f":{image.inputs[:16]}"
    if other := [state.role for state in roles if not state.image.endswith(tag)]:
        raise DeployError(
            "what runs is not the locked image",
            f"{', '.join(other)} runs another than {tag[1:]}",
            "deploy up, then deploy bake",
        )
