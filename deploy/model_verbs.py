"""The verbs about the model's files: `model fetch`, `model verify`. `cli.py` mounts them."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from deploy import render
from deploy.command_line import (
    ROOT,
    SPEC,
    STATE,
    JsonOption,
    ProfileOption,
    SpecOption,
    StateOption,
    console,
    examples,
    print_json,
    verbs,
)
from deploy.errors import DeployError
from deploy.lock.model import ModelLock, read_lock
from deploy.model.check import check_folder
from deploy.model.fetch import HUB, fetch_model
from deploy.model.folder import model_folder
from deploy.spec.load import load
from deploy.stack.state import State

FAILED = 1

app = verbs(
    help="Bring the model's files here, and hold them against deploy.lock.",
    epilog=examples(
        "deploy model fetch            what deploy.lock names and this host lacks",
        "deploy model verify --full    every byte",
    ),
    no_args_is_help=True,
)
out = console()
err = console(stderr=True)


@app.command(
    "fetch",
    epilog=examples(
        "deploy model fetch                         from the hub",
        "deploy model fetch --from https://hub.lan  from a mirror that serves REPO/resolve/REVISION/PATH",
        "deploy model fetch --from /mnt/usb/model   from a folder",
    ),
)
def fetch_verb(
    source: Annotated[
        str, typer.Option("--from", metavar="URL|FOLDER", envvar="HF_ENDPOINT", help="A hub, or a folder.")
    ] = HUB,
    spec: SpecOption = SPEC,
    state: StateOption = STATE,
    certificates: Annotated[
        Path | None, typer.Option("--certificates", help="CA file for the hub.", show_default="the machine's")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Have every file of the locked model in its folder, several at a time, each verified against deploy.lock.

    A file that is there is verified; one that was cut is completed, one with other bytes fetched anew. After a cut or
    Ctrl-C the same command goes on.
    """
    spec_file = load(spec)
    model = _locked(cpu=False)
    folder = (spec_file.file.parent / spec_file.spec.model.path).absolute()
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        err.print(text, markup=False, soft_wrap=True)

    with render.transfer(err) as progress:
        fetch_model(
            model,
            source,
            folder,
            State(state).seen_models,
            certificates=certificates,
            progress=lambda done, total: progress("model", done, total),
            note=note,
        )
    if as_json:
        print_json({"folder": str(folder), "files": len(model.file), "size": model.size, "notes": notes})
    else:
        out.print(f"{folder}  {len(model.file)} files, {model.size / 1e9:.1f} GB, all as locked", soft_wrap=True)


@app.command(
    "verify",
    epilog=examples(
        "deploy model verify           sizes, times and samples: a moment",
        "deploy model verify --full    every byte",
        "deploy model verify --json | jq '.drifts[].path'",
    ),
)
def verify_verb(
    full: Annotated[bool, typer.Option("--full", help="Hash every byte, not samples.")] = False,
    spec: SpecOption = SPEC,
    state: StateOption = STATE,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold the model's folder against deploy.lock; nothing needs to run. Exit code 1 and a line for each drift."""
    spec_file = load(spec, profile.value if profile else None)
    folder = State(state)
    model = _locked(cpu=spec_file.spec.profile == "cpu")
    with render.transfer(err) as progress:
        drifts = check_folder(
            model_folder(spec_file, folder),
            model,
            full=full,
            memory=folder.seen_models,
            progress=lambda done, total: progress("model", done, total),
        )
    if as_json:
        print_json({"agrees": not drifts, "files": len(model.file), "drifts": [asdict(drift) for drift in drifts]})
    else:
        for drift in drifts:
            sys.stdout.write(f"{drift.path}: expected {drift.expected}, found {drift.found}\n")
        how = "byte by byte" if full else "by size, time and samples"
        fix = "deploy up --profile cpu makes it" if spec_file.spec.profile == "cpu" else "fix: deploy model fetch"
        verdict = f"{len(drifts)} drifts; {fix}" if drifts else "all as locked"
        err.print(f"{verdict}: {len(model.file)} files {how}", markup=False)
    if drifts:
        raise typer.Exit(FAILED)


def _locked(*, cpu: bool) -> ModelLock:
    lock = read_lock(ROOT)
    model = lock.tiny_model if cpu else lock.model
    if model is None:
        raise DeployError(
            "deploy.lock has no model",
            "its files' hashes are what a fetched file is held against",
            "bring the files to [model] path on one host, set repo and revision, then deploy lock --update model",
        )
    return model
