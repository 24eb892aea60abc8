"""How things look on a terminal and in a pipe. Builds and shows; decides nothing."""

import re
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from deploy.errors import DeployError
from deploy.lock.diff import Change, Transfer
from deploy.spec.load import SpecError
from deploy.stack.events import Event, Report

TITLES = {
    "host": "Host",
    "image": "Engine image",
    "caches": "Compiled kernels",
    "model": "Model",
    "start": "Start",
    "accept": "Acceptance",
    "warm": "Warm up",
    "compile": "Modules",
    "push": "Registry",
    "stop": "Stop",
    "clean": "Clean up",
    "heal": "Heal",
    "drain": "Drain",
}

QUIET_S = 30.0
"""In a pipe, seconds after which something that goes on is said again."""

SECTIONS = {
    "package": "Debian packages",
    "request": "Root file system",
    "release": "Debian releases",
    "python": "Python and uv",
    "wheel": "Wheels",
    "patch": "Patches",
    "engine": "SGLang",
    "kernels": "Kernels",
    "hook": "Hooks",
    "runtime": "What runs around SGLang",
    "model": "Model",
    "tiny_model": "Model of the cpu profile",
    "host": "Least versions of a host",
    "compose": "Compose files",
    "argument": "Arguments",
    "environment": "Environment",
    "role": "Roles",
    "image": "Image",
    "layer": "Layers",
    "cache": "Compiled kernels",
    "tuned": "Signed off by deploy tune",
}


@dataclass
class _Row:
    title: str
    state: str
    detail: str
    begun: float
    seconds: float | None = None
    done: int | None = None
    total: int | None = None


class _Steps:
    """The rows of a running command, redrawn by Rich as often as it likes."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], _Row] = {}

    def take(self, event: Event) -> None:
        key = (event.step, event.role)
        row = self.rows.setdefault(
            key, _Row(f"  {event.role}" if event.role else TITLES[event.step], "", "", time.monotonic())
        )
        row.state, row.seconds, row.done, row.total = event.state, event.seconds, event.done, event.total
        row.detail = event.detail or ("" if event.state == "finished" else row.detail)
        if event.state == "failed" and not event.role:
            for (name, _), part in self.rows.items():
                if name == event.step and part.seconds is None:
                    part.state, part.seconds = "failed", time.monotonic() - part.begun

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for row in self.rows.values():
            seconds = row.seconds if row.seconds is not None else time.monotonic() - row.begun
            detail = Text(row.detail, overflow="ellipsis", no_wrap=row.state != "finished")
            bar = (
                ProgressBar(total=row.total, completed=row.done, width=20) if row.total and row.done is not None else ""
            )
            table.add_row(_mark(row.state), row.title, f"{seconds:5.0f} s", detail, bar)
        return table


def _mark(state: str) -> Text | Spinner:
    match state:
        case "finished":
            return Text("✓", style="green")
        case "failed":
            return Text("✗", style="red")
        case _:
            return Spinner("dots", style="cyan")


@contextmanager
def steps(console: Console) -> Generator[Report]:
    """Show events as they come: a live table on a terminal, one line a change in a pipe."""
    if console.is_terminal:
        shown = _Steps()
        with Live(shown, console=console, refresh_per_second=8):
            yield shown.take
    else:
        lines, ended = _Lines(console), threading.Event()
        beat = threading.Thread(target=lines.beat, args=(ended,), daemon=True)
        beat.start()
        try:
            yield lines.take
        finally:
            ended.set()
            beat.join()


class _Lines:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.begun = time.monotonic()
        self.last: dict[tuple[str, str], str] = {}
        self.busy: dict[tuple[str, str], tuple[str, float]] = {}
        self.lock = threading.Lock()

    def beat(self, ended: threading.Event) -> None:
        """Say every now and then what goes on for long, so that nobody takes it for stuck."""
        while not ended.wait(QUIET_S):
            with self.lock:
                for words, since in self.busy.values():
                    if (passed := time.monotonic() - since) >= QUIET_S:
                        self._say(f"{words}, for {passed:.0f} s")

    def take(self, event: Event) -> None:
        with self.lock:
            self._take(event)

    def _take(self, event: Event) -> None:
        words = event.detail or {"finished": "done"}.get(event.state, event.state)
        if event.state == "finished" and event.seconds is not None:
            words = f"{words} ({event.seconds:.1f} s)"
        key = (event.step, event.role)
        title = TITLES[event.step] + (f" {event.role}" if event.role else "")
        if event.state in ("finished", "failed"):
            # The end of a step is that of its roles.
            for other in [key] if event.role else [row for row in self.busy if row[0] == event.step]:
                self.busy.pop(other, None)
        if self.last.get(key) != words:
            self.last[key] = words
            if event.state in ("started", "progress"):
                self.busy[key] = (f"{title}: {words}", time.monotonic())
            self._say(f"{title}: {words}")

    def _say(self, text: str) -> None:
        passed = time.monotonic() - self.begun
        self.console.print(f"[{passed:6.1f} s] {text}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def transfer(console: Console) -> Generator[Callable[[str, int, int], None]]:
    """Show how far bytes are read: a bar on a terminal, one line a thing in a pipe."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total or None)
                if not console.is_terminal:
                    console.print(f"reading {what}", markup=False, highlight=False, soft_wrap=True)
            bar.update(tasks[what], completed=done, total=total or None)

        yield show


def changes(found: Sequence[Change]) -> str:
    """Changes of a lock, grouped, a line each: `-` gone, `+` new, `~` other. Empty if there are none."""
    lines: list[str] = []
    section = ""
    for change in found:
        if change.section != section:
            section = change.section
            lines.append(SECTIONS[change.section])
        match change.before, change.after:
            case None, after:
                lines.append(f"  + {change.name} {short(str(after))}")
            case before, None:
                lines.append(f"  - {change.name} {short(before)}")
            case before, after:
                lines.append(f"  ~ {change.name} {short(before)} -> {short(after)}")
    return "\n".join(escape(line) for line in lines)


def transferred(found: Transfer) -> str:
    """What a host has to fetch, in words."""
    how = "" if found.compressed else ", unpacked; a registry sends less"
    return f"To fetch: {found.layers} layers, {found.size / 1e6:,.1f} MB{how}"


def short(text: str) -> str:
    """A text with its hashes cut to the length at which people still tell them apart."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{28,52}\b", r"\1", text)


def error(console: Console, failure: DeployError) -> None:
    """What happened, why, and what mends it; for a spec each mistake with its line."""
    if isinstance(failure, SpecError):
        lines = failure.file.read_text(errors="replace").splitlines() if failure.file.exists() else []
        for problem in failure.problems:
            place = f"{failure.file}:{problem.position.line}:{problem.position.column}"
            console.print(f"[bold red]error:[/] {escape(place)}: {escape(problem.message)}", soft_wrap=True)
            if problem.position.line <= len(lines):
                console.print(f"  | {lines[problem.position.line - 1]}", markup=False, soft_wrap=True)
                console.print(f"  | {' ' * (problem.position.column - 1)}^", markup=False, soft_wrap=True)
            _reason(console, problem.why, problem.fix)
    else:
        console.print(f"[bold red]error:[/] {escape(failure.message)}", soft_wrap=True)
        _reason(console, failure.why, failure.fix, failure.aftermath)


def _reason(console: Console, why: str, fix: str, aftermath: str = "") -> None:
    for name, text in (("why", why), ("fix", fix), ("now", aftermath)):
        if text:
            console.print(f"  [bold]{name}:[/] {escape(text.replace(chr(10), chr(10) + '       '))}", soft_wrap=True)


def table(headers: list[str], rows: list[list[str]], styles: dict[str, str] | None = None) -> Table:
    """A plain table; `styles` colours cells by their text."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        shown.add_column(header, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(cell, style=(styles or {}).get(cell, "")) for cell in row))
    return shown


def stacked(*parts: object) -> Group:
    """Several things below each other."""
    return Group(*(part if not isinstance(part, str) else Text(part) for part in parts))  # pyright: ignore[reportArgumentType]
