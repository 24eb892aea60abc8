"""The whole experiment: what has to be there, trial after trial, what ran before back again, the sign-off."""

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from deploy.errors import DeployError
from deploy.host import probe
from deploy.image.build import ImageReference
from deploy.lock.document import FILE_NAME
from deploy.lock.model import read_lock
from deploy.spec.load import SpecFile, parse
from deploy.spec.model import Tuned, Winner
from deploy.stack import change
from deploy.stack.compose import running_stack
from deploy.stack.events import Report
from deploy.stack.state import State, write
from deploy.stack.up import prepare
from deploy.tune.alone import time_alone
from deploy.tune.experiment import Alone, Comparison, Design, Edits, Finding, Progress, Step, Trial, progress
from deploy.tune.signed import signed, winners
from deploy.tune.store import Store, open_store
from deploy.tune.switches import refusal
from deploy.tune.trial import Bench, Load

SCHEMA = "dsv4-tune/1"
NOT_SERVING = 4


class BaselineFails(DeployError):
    """What is to be improved does not serve."""

    exit_code = NOT_SERVING


class ChangedMeanwhile(DeployError):
    """deploy.toml is not what was measured."""


class Watcher(Protocol):
    """Hears how an experiment goes."""

    def begin(self, store: Store, resumed: bool, known: Progress) -> None:
        """It starts, or goes on."""
        ...

    def alone(self, op: str, found: Alone | None) -> None:
        """An op is timed alone (None), and what came out."""
        ...

    def trial(self, number: int, step: Step, comparison: Comparison) -> None:
        """A trial begins; the number is from 0."""
        ...

    def measured(self, trial: Trial, known: Progress) -> None:
        """A trial has ended."""
        ...

    def say(self, text: str) -> None:
        """What goes on within a trial."""
        ...


@dataclass(frozen=True)
class Request:
    """What a person asks for."""

    design: Design
    load: Load
    by: str
    fresh: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came out.

    Attributes:
        afterwards: what runs now, in words.
        winners: signed off in deploy.toml; none if nothing was better.
        report: the experiment's file.
    """

    findings: tuple[Finding, ...]
    winners: tuple[Winner, ...]
    trials: int
    seconds: float
    afterwards: str
    report: Path


def tune(
    root: Path, spec_file: SpecFile, text: str, state: State, report: Report, request: Request, watcher: Watcher
) -> Outcome:
    """Run an experiment to its end, or go on with one that was cut off; what ran before runs again afterwards.

    Args:
        text: of deploy.toml.

    Raises:
        BaselineFails: the stack does not start or serve as deploy.toml has it.
        ChangedMeanwhile: deploy.toml was changed while this measured; the report is there, nothing was signed.
        HostError, LockHeld: as `up` does.
        KeyboardInterrupt: passed on; what ran before runs again, and the experiment can go on.
    """
    with state.lock("tune"):
        change.heal(root, state, report)
        image = prepare(root, spec_file, state, report)
        lock = read_lock(root) if (root / FILE_NAME).exists() else None
        refuses = refuser(root, spec_file, text)
        store, resumed = open_store(state, _plan(text, spec_file, image, request), fresh=request.fresh)
        known = progress(request.design, store.trials(), store.alone(), refuses)
        watcher.begin(store, resumed, known)
        afterwards = "nothing was changed"
        if known.next:
            bench = Bench(
                *(root, state, spec_file, text, image, lock, store, request.load, report),
                say=watcher.say,
            )
            volumes = running_stack(root, state.environment).volumes()
            with change.journaled(root, state, "tune", report):
                _alone(root, spec_file, image, request, store, watcher)
                _trials(bench, request.design, refuses, watcher)
                afterwards = change.back(root, state, volumes, report)
    known = progress(request.design, store.trials(), store.alone(), refuses)
    return _conclude(spec_file, text, image, request, store, known, afterwards)


def refuser(root: Path, spec_file: SpecFile, text: str) -> Callable[[Edits, Edits], str]:
    """`switches.refusal` for this spec on this host, each pair asked once."""
    gpus = tuple(probe.gpus()) if spec_file.spec.roles else ()

    @cache
    def ask(edits: str, holds: str) -> str:
        return refusal(root, spec_file, text, json.loads(edits), json.loads(holds), gpus)

    return lambda edits, holds: ask(json.dumps(dict(edits)), json.dumps(dict(holds)))


def _alone(
    root: Path, spec_file: SpecFile, image: ImageReference, request: Request, store: Store, watcher: Watcher
) -> None:
    """Time each op alone that is not timed yet; only where there is a GPU."""
    if not spec_file.spec.roles:
        return
    done = {one.op for one in store.alone()}
    for op in dict.fromkeys(one.op for one in request.design.comparisons if one.op and one.op not in done):
        watcher.alone(op, None)
        found = time_alone(root, spec_file.spec, image.tag, op, max(request.load.users))
        store.add(found)
        watcher.alone(op, found)


def _trials(bench: Bench, design: Design, refuses: Callable[[Edits, Edits], str], watcher: Watcher) -> None:
    """Run trials until the design has no more.

    Raises:
        BaselineFails: the incumbent's trial failed.
    """
    trials, alone = bench.store.trials(), bench.store.alone()
    while (step := progress(design, trials, alone, refuses).next) is not None:
        comparison = design.comparisons[step.comparison]
        watcher.trial(len(trials), step, comparison)
        trial = bench.run(step, opponent(design, trials, alone, refuses, step), len(trials))
        if trial.outcome == "failed" and step.arm == "incumbent":
            raise BaselineFails(
                "the stack does not serve without the setting to be tried", trial.reason, "deploy up, then deploy tune"
            )
        bench.store.add(trial)
        trials.append(trial)
        watcher.measured(trial, progress(design, trials, alone, refuses))


def opponent(
    design: Design,
    trials: Sequence[Trial],
    alone: Sequence[Alone],
    refuses: Callable[[Edits, Edits], str],
    step: Step,
) -> Edits:
    """What the other arm of a step's pair runs with."""
    winners = progress(design, trials, alone, refuses).winners
    return winners if step.arm == "candidate" else {**winners, **design.comparisons[step.comparison].edits}


def _plan(text: str, spec_file: SpecFile, image: ImageReference, request: Request) -> dict[str, Any]:
    """What results depend on. Bounds are not in it: an experiment may go on with others."""
    return {
        "schema": SCHEMA,
        "spec": text,
        "profile": spec_file.spec.profile,
        "image": image.id,
        "comparisons": [one.model_dump(mode="json") for one in request.design.comparisons],
        "rule": asdict(request.design.rule),
        "load": load_dict(request.load),
        "gpu": gpu_words(),
    }


def load_dict(load: Load) -> dict[str, Any]:
    return {
        "users": list(load.users),
        "workload": load.workload.model_dump(mode="json"),
        "duration": load.duration,
        "warmup_limit": load.warmup_limit,
    }


def gpu_words() -> str:
    """The host's GPUs, in words."""
    names = [gpu.name or "GPU" for gpu in probe.gpus()]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


def _conclude(
    spec_file: SpecFile,
    text: str,
    image: ImageReference,
    request: Request,
    store: Store,
    known: Progress,
    afterwards: str,
) -> Outcome:
    """Write the report, and the sign-off if anything won.

    Raises:
        ChangedMeanwhile: deploy.toml is not what was measured.
    """
    trials = store.trials()
    seconds = sum(trial.seconds for trial in trials)
    before = {key: spec_file.spec.at(key) for one in known.findings for key in one.comparison.edits}
    won = winners(known.findings, before)
    content = {
        "schema": SCHEMA,
        "by": request.by,
        "at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "host": platform.node(),
        "gpu": gpu_words(),
        "image": image.id,
        "profile": spec_file.spec.profile,
        "load": load_dict(request.load),
        "rule": asdict(request.design.rule),
        "agreement": request.design.agreement,
        "findings": [finding_dict(one) for one in known.findings],
        "alone": [one.model_dump(mode="json") for one in store.alone()],
        "winners": [one.model_dump(mode="json") for one in won],
        "trials": [trial.model_dump(mode="json") for trial in trials],
        "seconds": round(seconds, 1),
    }
    data = json.dumps(content, indent=2) + "\n"
    write(store.report, data)
    if spec_file.file.read_text(encoding="utf-8") != text:
        raise ChangedMeanwhile(
            f"{spec_file.file} was changed while this measured",
            f"what was measured is in {store.report}; nothing was signed",
            "deploy tune begins anew with what it says now",
        )
    if won:
        tuned = Tuned(
            by=request.by,
            at=str(content["at"]),
            host=str(content["host"]),
            gpu=str(content["gpu"]),
            image=image.id,
            workload=load_words(request.load),
            results=_beside(store.report, spec_file.file),
            results_sha256=hashlib.sha256(data.encode()).hexdigest(),
            winner=won,
        )
        new = signed(text, known.winners, tuned)
        parse(new, spec_file.file, spec_file.spec.profile if "profile" in spec_file.overridden else None)
        write(spec_file.file, new, spec_file.file.stat().st_mode & 0o777)
    store.close()
    return Outcome(known.findings, won, len(trials), seconds, afterwards, store.report)


def finding_dict(one: Finding) -> dict[str, Any]:
    """For the report and --json."""
    return {**asdict(one), "comparison": one.comparison.model_dump(mode="json")}


def load_words(load: Load) -> str:
    """How it was measured, in words."""
    lengths = f"{load.workload.input}/{load.workload.output}"
    return f"{lengths} tokens at C={','.join(map(str, load.users))}, {load.duration:g} s a window"


def _beside(file: Path, spec: Path) -> str:
    try:
        return str(file.resolve().relative_to(spec.resolve().parent))
    except ValueError:
        return str(file.resolve())
