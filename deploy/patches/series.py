"""Checks the patch series against a tree of SGLang, and rewrites its patches."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from deploy.errors import DeployError
from deploy.image.apply_patches import apply, series, touched
from deploy.lock.document import replace_text
from deploy.patches.functions import touched_functions
from deploy.patches.text import changes, fields, header

FOLDER = Path("patches")
SERIES = FOLDER / "series"
State = Literal["applies", "elsewhere", "contained", "fails"]
Source = Callable[[str], str | None]  # a file of SGLang as it was published, by its path; None if there is none


@dataclass(frozen=True)
class PatchResult:
    """What a patch does to a tree.

    Attributes:
        state: `elsewhere` if it changes other functions than in the locked SGLang, `contained` if the tree has it
            already, `fails` if it does not apply with no fuzz or leaves a file that does not compile.
        switch: the environment variable that turns it on or off; `default` is its value.
        functions: touched functions by file; none for a file that is not Python.
        why: what is wrong.
    """

    name: str
    title: str
    state: State
    switch: str
    default: str
    functions: Mapping[str, tuple[str, ...]]
    why: str = ""


def check(root: Path, source: Source) -> list[PatchResult]:
    """Apply the series to a tree and say what each patch does. Nothing outside a temporary folder is written.

    Args:
        root: the checkout.
        source: the tree.
    """
    with published(root, source) as tree:
        return [apply_one(root, name, tree) for name in names(root)]


def compare(locked: Sequence[PatchResult], other: Sequence[PatchResult]) -> list[PatchResult]:
    """Mark what applies to another SGLang, but to other functions than to the locked one."""
    marked: list[PatchResult] = []
    for here, there in zip(locked, other, strict=True):
        moved = there.state == "applies" and dict(here.functions) != dict(there.functions)
        if moved:
            why = f"in the locked SGLang it changes {functions_line(here)}"
            there = replace(there, state="elsewhere", why=why)
        marked.append(there)
    return marked


def functions_line(result: PatchResult) -> str:
    """The touched functions in one line."""
    return "; ".join(f"{file}: {', '.join(names)}" if names else file for file, names in result.functions.items())


def names(root: Path) -> list[str]:
    """The patches of the series, in order.

    Raises:
        DeployError: there is no series, or it names a patch that is not there.
    """
    try:
        found = series((root / SERIES).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DeployError(f"there is no {SERIES}", "it names the patches in order", "git checkout patches") from error
    for name in found:
        if not (root / FOLDER / name).is_file():
            raise DeployError(
                f"{FOLDER / name} is missing", f"{SERIES} names it", f"restore it from git, or take it out of {SERIES}"
            )
    return found


@contextmanager
def published(root: Path, source: Source, more: Sequence[str] = ()) -> Generator[Path]:
    """A temporary folder with every file that the series touches, as SGLang was published, and more of them.

    Raises:
        DeployError: as `names`.
    """
    with tempfile.TemporaryDirectory(prefix="deploy-patches-") as directory:
        tree = Path(directory)
        for path in {*more, *(path for name in names(root) for path in _touched(root, name))}:
            if (text := source(path)) is not None:
                write({path: text}, tree)
        yield tree


def apply_one(root: Path, name: str, tree: Path) -> PatchResult:
    """Apply one patch to a tree, which is left as it was if that fails.

    Args:
        root: the checkout.
        name: of the patch.
        tree: folder that holds the files that the patch touches.
    """
    patch = root / FOLDER / name
    text = patch.read_text(encoding="utf-8")
    about = fields(text)
    title, switch, default = (about.get(field, "") for field in ("Subject", "Switch", "Default"))

    def result(state: State, functions: Mapping[str, tuple[str, ...]] | None = None, why: str = "") -> PatchResult:
        return PatchResult(name, title, state, switch, default, functions or {}, why)

    try:
        paths = sorted(touched(text))
    except ValueError as error:
        return result("fails", why=str(error))
    before = read(paths, tree)
    try:
        run(patch, tree)
        after = read(paths, tree)
        functions: dict[str, tuple[str, ...]] = {}
        for path in paths:
            functions[path] = ()
            if path.endswith(".py"):
                compile(after[path] or "", path, "exec", dont_inherit=True)
                functions[path] = touched_functions(before[path] or "", after[path] or "")
    except (ValueError, SyntaxError) as error:
        write(before, tree)
        contained = isinstance(error, ValueError) and _contained(patch, before)
        return result("contained") if contained else result("fails", why=str(error))
    return result("applies", functions)


def read(paths: Sequence[str], tree: Path) -> dict[str, str | None]:
    """Texts by path; None for a file that is not there.

    Raises:
        DeployError: a file is no text.
    """
    try:
        return {path: (tree / path).read_bytes().decode("utf-8") if (tree / path).is_file() else None for path in paths}
    except UnicodeDecodeError as error:
        raise DeployError(f"a file of {tree} is no text", str(error), "only text can be patched") from error


def write(texts: Mapping[str, str | None], tree: Path) -> None:
    """Make files of a tree what `read` returned."""
    for path, text in texts.items():
        file = tree / path
        if text is None:
            file.unlink(missing_ok=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode("utf-8"))


def run(patch: Path, tree: Path) -> None:
    """Apply a patch with no fuzz.

    Raises:
        ValueError: it does not apply; the tree may be half patched.
        DeployError: this machine has no `patch`.
    """
    try:
        apply(patch, tree)
    except FileNotFoundError as error:
        raise DeployError(
            "patches cannot be applied on this machine", "there is no `patch`", "apt-get install patch"
        ) from error


def _contained(patch: Path, before: Mapping[str, str | None]) -> bool:
    """Whether texts have a patch's changes already, so that they could be taken back."""
    with tempfile.TemporaryDirectory(prefix="deploy-patches-") as directory:
        write(before, Path(directory))
        command = ["patch", "--reverse", "--dry-run", "--force", "--strip=1", "--fuzz=0", "--reject-file=-"]
        command += [f"--directory={directory}", f"--input={patch.resolve()}"]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def edit(root: Path, name: str, source: Source, folder: Path, more: Sequence[str]) -> list[str]:
    """Write the files that a patch touches, as they are after it, into a folder for a person to edit.

    Args:
        root: the checkout.
        name: of the patch; it may have nothing but a header yet.
        source: the locked SGLang.
        folder: is made; must be empty.
        more: other files of SGLang that are to be edited.

    Returns:
        The files' paths.

    Raises:
        DeployError: the series does not name the patch, an earlier one does not apply, or a file does not exist.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DeployError(f"{folder} is not empty", "edited files in it would be lost", "name another folder")
    if name not in names(root):
        raise _unknown(name)
    paths = sorted({*_touched(root, name), *more})
    with published(root, source, more) as tree:
        for earlier in names(root)[: names(root).index(name)]:
            _require(apply_one(root, earlier, tree))
        if _touched(root, name):
            _require(apply_one(root, name, tree))
        texts = read(paths, tree)
    if unknown := [path for path in more if texts[path] is None]:
        raise DeployError(f"SGLang has no {unknown[0]}", "paths start with sglang/", "check --file")
    write({path: text for path, text in texts.items() if text is not None}, folder)
    return [path for path, text in texts.items() if text is not None]


def refresh(root: Path, source: Source, name: str | None = None, folder: Path | None = None) -> list[str]:
    """Rewrite patches with the least context and right line numbers; their headers stay. All of them or none.

    Args:
        root: the checkout.
        source: the locked SGLang.
        name: the patch that was edited; none was if None.
        folder: its files as `edit` wrote them, edited. A file that is no longer there is one that the patch removes.

    Returns:
        The patches that are different now.

    Raises:
        DeployError: a patch would change nothing, or one does not apply to what those before it leave.
    """
    if name is not None and name not in names(root):
        raise _unknown(name)
    new: dict[Path, str] = {}
    edited = _files(folder) if folder else set[str]()
    with published(root, source, sorted(edited)) as tree:
        for current in names(root):
            patch = root / FOLDER / current
            text = patch.read_text(encoding="utf-8")
            paths = sorted(_touched(root, current) | (edited if current == name else set()))
            before = read(paths, tree)
            if folder and current == name:
                after = read(paths, folder)
                write(after, tree)
            else:
                _require(apply_one(root, current, tree))
                after = read(paths, tree)
            try:
                body = changes(before, after)
            except ValueError as error:
                raise DeployError(
                    f"{current} cannot be written", str(error), "end the file with a line feed"
                ) from error
            if not body:
                raise DeployError(
                    f"{current} changes nothing any more",
                    "the edited files are as before it",
                    f"take it out of {SERIES}",
                )
            new[patch] = header(text).rstrip("\n") + "\n\n" + body
    changed = [patch for patch, text in new.items() if patch.read_text(encoding="utf-8") != text]
    for patch in changed:
        replace_text(patch, new[patch])
    return [patch.name for patch in changed]


def _touched(root: Path, name: str) -> set[str]:
    """As `touched`; empty for a patch that has nothing but a header yet, or touches what it must not."""
    with suppress(ValueError):
        return touched((root / FOLDER / name).read_text(encoding="utf-8"))
    return set()


def _files(folder: Path) -> set[str]:
    """Edited files, without what editors and Python leave beside them.

    Raises:
        DeployError: one is none of SGLang's.
    """
    inside = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    edited = {
        path
        for path in inside
        if not any(part.startswith(".") or part == "__pycache__" for part in path.parts) and path.name[-1] != "~"
    }
    if strays := sorted(path for path in edited if path.parts[0] != "sglang"):
        raise DeployError(
            f"{folder / strays[0]} is no file of SGLang", "a patch touches files below sglang/ alone", "remove it"
        )
    return {str(path) for path in edited}


def _require(result: PatchResult) -> None:
    if result.state != "applies":
        why = result.why or "the tree has it already"
        raise DeployError(
            f"{FOLDER / result.name} does not apply to what the patches before it leave",
            why,
            f"mend it by hand, or edit it anew: deploy patches edit {result.name} FOLDER",
        )


def _unknown(name: str) -> DeployError:
    return DeployError(
        f"{SERIES} does not name {name}",
        "the series says in which order patches are applied",
        f"write its header to {FOLDER / name} and add the name to {SERIES}",
    )


def overlay(root: Path, source: Source, tree: Path) -> None:
    """Change a tree of SGLang as the patches do that apply to it.

    Args:
        root: the checkout.
        source: the tree as it is.
        tree: the same, as a folder that holds `sglang/`.
    """
    with published(root, source) as patched:
        for name in names(root):
            apply_one(root, name, patched)
        shutil.copytree(patched, tree, dirs_exist_ok=True)
