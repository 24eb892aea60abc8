"""The verbs about the patches to SGLang: `patches check`, `edit`, `refresh`, `try`. `cli.py` mounts them."""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from deploy import render
from deploy.command_line import ROOT, JsonOption, console, examples, print_json, verbs
from deploy.errors import DeployError
from deploy.patches.hooks import HookResult, hook_results, plugin_pairs
from deploy.patches.release import folder_source, install_release, locked_release
from deploy.patches.series import PatchResult, check, compare, edit, functions_line, overlay, refresh

FAILED = 1
LOCKED = "locked"
COLOURS = {
    "applies": "green",
    "elsewhere": "yellow",
    "contained": "yellow",
    "fails": "red",
    "unchanged": "green",
    "changed": "red",
    "missing": "red",
}

app = verbs(
    help="The textual changes to SGLang: do they apply, what do they touch, do they survive a new release.",
    epilog=examples("deploy patches check         as they are", "deploy patches try 0.5.24    on another release"),
    no_args_is_help=True,
)
out = console()
err = console(stderr=True)


@app.command(
    "check",
    epilog=examples(
        "deploy patches check                   exit code 1 if one does not apply with zero fuzz, or not compile",
        "deploy patches check --json | jq '.patches[] | .name, .switch, .functions'",
    ),
)
def check_verb(as_json: JsonOption = False) -> None:
    """Apply the series to the locked SGLang, compile what it touches, and list the functions it changes."""
    with render.transfer(err) as progress, locked_release(ROOT, progress) as source:
        found = check(ROOT, source)
    _show(LOCKED, found, None, as_json)
    if any(result.state != "applies" for result in found):
        raise typer.Exit(FAILED)


@app.command(
    "edit",
    epilog=examples(
        "deploy patches edit topk.patch /tmp/topk             the files that it touches, with it applied",
        "deploy patches edit new.patch /tmp/new --file sglang/srt/environ.py",
        "deploy patches refresh topk.patch /tmp/topk          afterwards",
    ),
)
def edit_verb(
    name: Annotated[str, typer.Argument(metavar="PATCH", help="A name in patches/series.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Is made, or is empty.")],
    files: Annotated[
        list[str] | None, typer.Option("--file", metavar="PATH", help="One more file of SGLang to edit.")
    ] = None,
) -> None:
    """Write the files that a patch touches into a folder, to edit them there."""
    with render.transfer(err) as progress, locked_release(ROOT, progress) as source:
        written = edit(ROOT, name, source, folder, files or [])
    for path in written:
        out.print(str(folder / path), markup=False, soft_wrap=True)
    err.print(f"when they are edited: deploy patches refresh {name} {folder}", markup=False, soft_wrap=True)


@app.command(
    "refresh",
    epilog=examples(
        "deploy patches refresh                         line numbers and least context of every patch",
        "deploy patches refresh topk.patch /tmp/topk    take over what was edited after `deploy patches edit`",
    ),
)
def refresh_verb(
    name: Annotated[str | None, typer.Argument(metavar="[PATCH]", help="The one that was edited.")] = None,
    folder: Annotated[Path | None, typer.Argument(metavar="[FOLDER]", help="Its edited files.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Rewrite the patches with the least context that places each change; headers stay. All of them or none."""
    if name and (folder is None or not folder.is_dir()):
        raise typer.BadParameter("the folder that `deploy patches edit` wrote", param_hint="FOLDER")
    with render.transfer(err) as progress, locked_release(ROOT, progress) as source:
        changed = refresh(ROOT, source, name, folder)
    if as_json:
        print_json({"rewritten": changed})
        return
    for patch in changed:
        out.print(patch, markup=False)
    err.print(f"{len(changed)} patches rewritten")


@app.command(
    "try",
    epilog=examples(
        "deploy patches try 0.5.24                      which patches and hooks survive",
        "deploy patches try 0.5.24 --json | jq '.hooks[] | select(.state != \"unchanged\")'",
    )
    + "\n\n\b\nExit code 1 unless each patch applies to the same functions and each hooked function is unchanged.",
)
def try_verb(
    version: Annotated[str, typer.Argument(metavar="SGLANG_VERSION", help="A release, such as 0.5.24.")],
    as_json: JsonOption = False,
) -> None:
    """Fetch another release of SGLang and say which patches and hooks it leaves whole. Changes nothing here."""
    with render.transfer(err) as progress, locked_release(ROOT, progress) as source:
        here = check(ROOT, source)
    with tempfile.TemporaryDirectory(prefix="deploy-patches-") as directory:
        tree = Path(directory)
        with err.status(f"fetching SGLang {version}"):
            install_release(ROOT / ".tools/bin/uv", version, tree)
        there = compare(here, check(ROOT, folder_source(tree)))
        hooks = _hooks(tree)
    _show(version, there, hooks, as_json)
    whole = all(result.state == "applies" for result in there)
    if not whole or any(hook.state != "unchanged" for hook in hooks or ()):
        raise typer.Exit(FAILED)


def _hooks(tree: Path) -> list[HookResult] | None:
    """What became of the hooked functions, as far as the patches that apply leave them; None without a plug-in."""
    try:
        plugin = plugin_pairs(ROOT)
    except (ImportError, AttributeError) as error:
        raise DeployError(
            "the plug-in's table cannot be read", str(error), "restore kernels/sm120_kernels/plugin from git"
        ) from error
    if plugin is None:
        return None
    overlay(ROOT, folder_source(tree), tree)
    pairs, function_sha256 = plugin
    return hook_results(pairs, tree, function_sha256)


def _show(release: str, patches: Sequence[PatchResult], hooks: Sequence[HookResult] | None, as_json: bool) -> None:
    if as_json:
        shown = {"sglang": release, "patches": [asdict(result) for result in patches]}
        print_json(shown if hooks is None else shown | {"hooks": [asdict(hook) for hook in hooks]})
        return
    rows = [[result.name, result.state, _switch(result), functions_line(result)] for result in patches]
    _table(["patch", "state", "switch", "functions"], rows)
    if hooks is not None:
        _table(["hooked function", "state", "file"], [[hook.target, hook.state, hook.file] for hook in hooks])
    for result in patches:
        if result.why:
            err.print(f"{result.name}: {result.why.rstrip()}", markup=False, soft_wrap=True)
    good = sum(result.state == "applies" for result in patches)
    err.print(f"{good} of {len(patches)} patches apply to {_named(release)}", markup=False)
    if hooks is not None:
        same = sum(hook.state == "unchanged" for hook in hooks)
        err.print(f"{same} of {len(hooks)} hooked functions are unchanged", markup=False)


def _named(release: str) -> str:
    return "the locked SGLang" if release == LOCKED else f"SGLang {release}"


def _switch(result: PatchResult) -> str:
    return f"{result.switch}={result.default}" if result.switch != "none" else "none"


def _table(headers: list[str], rows: list[list[str]]) -> None:
    if out.is_terminal:
        out.print(render.table(headers, rows, COLOURS))
    else:
        for row in rows:
            sys.stdout.write("\t".join(row) + "\n")
