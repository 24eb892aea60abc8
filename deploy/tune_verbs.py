"""The verb that finds out what wins here: `tune`. `cli.py` mounts it."""

import getpass
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.command_line import (
    ROOT,
    SPEC,
    STATE,
    JsonOption,
    Panel,
    ProfileOption,
    SpecOption,
    StateOption,
    console,
    examples,
    print_json,
    verbs,
)
from deploy.errors import DeployError
from deploy.stack.events import Event

if TYPE_CHECKING:
    from deploy.tune.experiment import Alone, Comparison, Finding, Progress, Step, Trial
    from deploy.tune.run import Outcome, Request
    from deploy.tune.store import Store

TIME, CONCURRENCY, LENGTHS, DURATION = "12h", "16", "256/256", 60.0
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
ASSUMED_START_S = {"cpu": 40.0}
ASSUMED_GPU_START_S = 240.0
ASSUMED_AROUND_WINDOW_S = 25.0
"""Warm-up and the last answers, around each window."""
FIRST_PAIRS = 3

app = verbs()
out = console()
err = console(stderr=True)


@app.command(
    "tune",
    rich_help_panel=Panel.TUNE,
    epilog=examples(
        "deploy tune --dry-run                         what would be tried, what is refused, how long it takes",
        "deploy tune                                   every switch of this profile, twelve hours at most",
        "deploy tune --only nccl --only NCCL_P2P_LEVEL --time 90m",
        "deploy tune --only indexer_logits --agreement 0.8    a hook whose rounding may change close answers",
        "deploy tune --try 'prefill.chunked_prefill_size=2048|32768'    values of your own",
        "deploy tune -c 1,16,64 --lengths 8K/1K        measured under another load",
        "deploy tune                                   after Ctrl-C or a crash: goes on where it was",
        "deploy tune --json | jq .winners",
    ),
)
def tune_verb(
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="SWITCH", help="Only this switch; may be repeated.")
    ] = None,
    attempt: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="KEY=VALUE", help="Only this key of deploy.toml with these values, | between."),
    ] = None,
    concurrency: Annotated[str, typer.Option("--concurrency", "-c", help="Requests in flight.")] = CONCURRENCY,
    lengths: Annotated[str, typer.Option(help="INPUT/OUTPUT tokens, as deploy bench has them.")] = LENGTHS,
    duration: Annotated[float, typer.Option(min=1, max=3600, help="Seconds of each measured window.")] = DURATION,
    limit: Annotated[str, typer.Option("--time", help="The longest it may take in all: 90m, 4h.")] = TIME,
    trials: Annotated[int, typer.Option(min=2, max=100_000, help="The most starts of the stack.")] = 400,
    pairs: Annotated[int, typer.Option(min=2, max=100, help="The most pairs of one comparison.")] = 8,
    gain: Annotated[float, typer.Option(min=0, max=1, help="Relative gain that is worth a change.")] = 0.02,
    agreement: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the greedy answers that must stay; 1: all.")
    ] = 1.0,
    by: Annotated[str | None, typer.Option("--by", help="Who signs it off.", show_default="the user")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, even if one was cut off.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be tried; start nothing.")] = False,
    spec: SpecOption = SPEC,
    state: StateOption = STATE,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find out which settings make this host faster, and sign them off in deploy.toml with the evidence.

    Starts the stack again and again, with a setting and without, under load: take the host out of service first.
    Kernels are timed alone before. A setting wins only if it is faster beyond doubt and answers as before. What ran
    before runs again at the end, also after Ctrl-C; the same command goes on with an experiment that was cut off.
    """
    from deploy.lock.resolve import update_lock
    from deploy.spec.load import load
    from deploy.stack.state import State
    from deploy.tune.run import tune

    spec_file = load(spec, None if profile is None else profile.value)
    text = spec.read_text(encoding="utf-8")
    design = _design(spec_file, only or [], attempt or [], pairs, gain, agreement, _seconds(limit), trials)
    request = _request(design, concurrency, lengths, duration, by or _user(), fresh)
    if dry_run:
        _dry_run(spec_file, text, request, State(state), as_json)
        return
    if not design.comparisons:
        raise DeployError(
            "there is nothing to try", "no switch has another setting here", "deploy tune --try KEY=VALUE"
        )
    shown = _Shown(request)
    with shown:
        outcome = tune(ROOT, spec_file, text, State(state), shown.event, request, shown)
    unlocked = ""
    if outcome.winners:
        try:
            update_lock(ROOT, load(spec, None if profile is None else profile.value))
        except DeployError as error:
            unlocked = f"{error.message}: {error.why}"
    if as_json:
        print_json(_as_dict(outcome, unlocked))
        return
    _show(outcome, spec, unlocked)


def _design(
    spec_file: Any,
    only: list[str],
    attempt: list[str],
    pairs: int,
    gain: float,
    agreement: float,
    seconds: float,
    trials: int,
) -> Any:
    from deploy.stack.compose import stack_of
    from deploy.tune.decide import Rule
    from deploy.tune.experiment import Design
    from deploy.tune.switches import chosen, comparisons, tried

    files = stack_of(ROOT, Path(os.devnull), spec_file.spec).files
    found = tried(attempt)
    if only or not attempt:
        found += chosen(comparisons(spec_file, files), only)
    rule = Rule(max(1, len(found)), least=min(FIRST_PAIRS, pairs), most=pairs, gain=gain)
    return Design(tuple(found), rule, agreement, seconds, trials)


def _request(design: Any, concurrency: str, lengths: str, duration: float, by: str, fresh: bool) -> "Request":
    from deploy.gap_verbs import parse_numbers
    from deploy.tune.run import Request
    from deploy.tune.trial import Load
    from loadtest.workload import Synthetic, parse_lengths

    users = tuple(parse_numbers(concurrency, "--concurrency"))
    try:
        asked, answered = parse_lengths(lengths)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--lengths") from None
    return Request(design, Load(users, Synthetic(input=asked, output=answered), duration), by, fresh)


def _seconds(text: str) -> float:
    unit = text.strip()[-1:] if not text.strip()[-1:].isdigit() else ""
    try:
        value = float(text.strip().removesuffix(unit)) * UNITS[unit]
        if not 0 < value < float("inf"):
            raise ValueError
    except (KeyError, ValueError):
        raise typer.BadParameter(f"{text!r}: expected seconds, or 90m, 4h", param_hint="--time") from None
    return value


def _user() -> str:
    return os.environ.get("SUDO_USER") or getpass.getuser()


def _dry_run(spec_file: Any, text: str, request: "Request", state: Any, as_json: bool) -> None:
    """List the comparisons with what speaks against each, and how long they take."""
    from deploy.tune.run import refuser

    refuses = refuser(ROOT, spec_file, text)
    refused = [refuses(one.edits, {}) for one in request.design.comparisons]
    each, known = _trial_seconds(spec_file.spec.profile, request, state)
    open_ = refused.count("")
    rule = request.design.rule
    least, usual, most = (2 * open_ * each * pairs for pairs in (1, rule.least, rule.most))
    if as_json:
        print_json(
            {
                "comparisons": [
                    {**one.model_dump(mode="json"), "refused": why}
                    for one, why in zip(request.design.comparisons, refused, strict=True)
                ],
                "rule": asdict(rule),
                "trial_seconds": round(each, 1),
                "trial_seconds_measured": known,
                "seconds": {"least": round(least), "three_pairs": round(usual), "most": round(most)},
                "limit_seconds": request.design.seconds,
                "limit_trials": request.design.trials,
            }
        )
        return
    table = Table(box=None, pad_edge=False)
    for name in ("setting", "trials", "time", "refused"):
        table.add_column(name, overflow="fold")
    for one, why in zip(request.design.comparisons, refused, strict=True):
        span = "" if why else f"2 to {2 * rule.most}"
        table.add_row(one.name, span, "" if why else f"{_words(2 * each)} to {_words(2 * rule.most * each)}", why)
    wide = out if out.is_terminal else Console(highlight=False, width=160)
    wide.print(table)
    source = "as measured before" if known else "assumed"
    out.print(
        f"\n{open_} comparisons, {_words(each)} a trial ({source}): {_words(least)} if none is worth it, "
        f"{_words(usual)} with {rule.least} pairs each, {_words(most)} at most; ends after "
        f"{_words(request.design.seconds)} or {request.design.trials} trials",
        soft_wrap=True,
    )


def _trial_seconds(profile: str, request: "Request", state: Any) -> tuple[float, bool]:
    """How long a trial takes: as earlier experiments with this load had it, else assumed."""
    import json

    from deploy.tune.run import load_dict
    from deploy.tune.store import PLAN, Store

    found: list[float] = []
    for file in sorted(state.folder.glob(f"tune/*/{PLAN}")):
        try:
            plan = json.loads(file.read_text(encoding="utf-8"))
            if (plan["profile"], plan["load"]) == (profile, load_dict(request.load)):
                found += [trial.seconds for trial in Store(file.parent).trials() if trial.outcome == "measured"]
        except (OSError, ValueError, KeyError, TypeError, DeployError):
            continue
    if found:
        return sum(found) / len(found), True
    around = len(request.load.users) * (request.load.duration + ASSUMED_AROUND_WINDOW_S)
    return ASSUMED_START_S.get(profile, ASSUMED_GPU_START_S) + around, False


class _Shown:
    """How an experiment goes: on a terminal a table that changes, in a pipe a line for each trial."""

    def __init__(self, request: "Request") -> None:
        self.request = request
        self.begun = time.monotonic()
        self.findings: tuple[Finding, ...] = ()
        self.trials = 0
        self.now = self.detail = ""
        self.live = Live(self, console=err, refresh_per_second=4, transient=True) if err.is_terminal else None

    def __enter__(self) -> "_Shown":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def line(self, text: str) -> None:
        passed = time.monotonic() - self.begun
        err.print(f"[{passed:7.1f} s] {text}", markup=False, soft_wrap=True)

    def event(self, event: Event) -> None:
        """What goes on with the stack."""
        self.detail = " ".join(part for part in (event.role or event.step, event.detail) if part)
        if event.state == "failed" and event.step in ("clean", "heal"):
            self.line(f"{event.step}: failed; the next deploy command tries again")
        if event.state == "finished" and event.step in ("host", "image", "model", "heal", "clean") and not event.role:
            self.line(f"{event.step}: {event.detail or 'done'}")

    def begin(self, store: "Store", resumed: bool, known: "Progress") -> None:
        self.findings = known.findings
        self.trials = len(store.trials())
        word = f"goes on after {self.trials} trials" if resumed else "begins"
        self.line(f"the experiment {word}: {len(known.findings)} comparisons, {store.folder}")

    def alone(self, op: str, found: "Alone | None") -> None:
        self.now = f"{op} alone"
        if found:
            ratio = f"{found.ratio:.2f} times as fast as upstream's" if found.ratio else "nothing to compare with"
            self.line(f"{op} alone: {ratio}; {'; '.join(found.detail[:2])}")

    def trial(self, number: int, step: "Step", comparison: "Comparison") -> None:
        which = "with it" if step.arm == "candidate" else "without"
        self.now = f"trial {number + 1}: {comparison.name}, pair {step.pair + 1}, {which}"
        self.line(self.now)

    def measured(self, trial: "Trial", known: "Progress") -> None:
        self.trials += 1
        before = {id(one.comparison): one.verdict for one in self.findings}
        self.findings = known.findings
        if trial.outcome == "measured":
            levels = ", ".join(f"{name} {value:.1f} tok/s" for name, value in trial.levels.items())
            self.line(f"  {levels}; {trial.seconds:.0f} s, {trial.start_seconds:.0f} s of it the start")
        else:
            self.line(f"  {trial.outcome}: {trial.reason}")
        finding = known.findings[trial.comparison]
        if finding.verdict not in ("open", "waiting", before.get(id(finding.comparison))):
            self.line(f"  {finding.comparison.name}: {_verdict(finding)}")

    def say(self, text: str) -> None:
        self.detail = text

    def __rich__(self) -> Group:
        limit = _words(self.request.design.seconds)
        head = f"{self.trials} trials, {_words(time.monotonic() - self.begun)} in this call, {limit} at most in all"
        return Group(
            _table(self.findings), Text(f"{self.now}\n  {self.detail}", overflow="ellipsis", no_wrap=True), Text(head)
        )


def _table(findings: "tuple[Finding, ...]") -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("setting", "verdict", "ratio", "pairs", "answers", "why"):
        table.add_column(name, overflow="fold", justify="right" if name in ("ratio", "pairs", "answers") else "left")
    for one in findings:
        judged = one.judgement
        ratio = f"{judged.ratio:.3f}" if judged.pairs else ""
        if judged.low is not None and one.verdict == "better":
            ratio += f" (> {judged.low:.3f})"
        answers = "" if one.agreement is None else f"{one.agreement:.3f}"
        table.add_row(one.comparison.name, one.verdict, ratio, str(judged.pairs or ""), answers, one.reason)
    return table


def _verdict(one: "Finding") -> str:
    judged = one.judgement
    ratio = f", {judged.ratio:.3f} times the throughput in {judged.pairs} pairs" if judged.pairs else ""
    return f"{one.verdict}{ratio}{f'; {one.reason}' if one.reason else ''}"


def _words(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


def _as_dict(outcome: "Outcome", unlocked: str) -> dict[str, Any]:
    from deploy.tune.run import finding_dict

    return {
        "winners": [one.model_dump(mode="json") for one in outcome.winners],
        "findings": [finding_dict(one) for one in outcome.findings],
        "trials": outcome.trials,
        "seconds": round(outcome.seconds, 1),
        "report": str(outcome.report),
        "afterwards": outcome.afterwards,
        "not_locked": unlocked,
    }


def _show(outcome: "Outcome", spec: Path, unlocked: str) -> None:
    wide = out if out.is_terminal else Console(highlight=False, width=160)
    wide.print(_table(outcome.findings))
    out.print(f"\n{outcome.trials} trials in {_words(outcome.seconds)}; {outcome.report}", soft_wrap=True)
    if not outcome.winners:
        out.print(f"nothing is better beyond doubt: {spec} stays as it is; {outcome.afterwards}", soft_wrap=True)
        return
    for one in outcome.winners:
        out.print(f"{one.setting}: {one.was or 'default'} -> {one.now}, {one.ratio:.3f} times as fast", soft_wrap=True)
    where = f"not in deploy.lock ({unlocked}): deploy lock" if unlocked else "in deploy.lock too"
    out.print(f"signed off in {spec}, {where}; {outcome.afterwards}. To run it: deploy upgrade", soft_wrap=True)
