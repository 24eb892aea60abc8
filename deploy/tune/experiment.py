"""What an experiment knows and does next, as a function of what was measured so far. Pure, so that it resumes."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from deploy.tune import decide
from deploy.tune.answers import agreement
from deploy.tune.decide import Judgement, Rule

Value = str | int | float | bool | list[Any] | None
"""A value of deploy.toml; a list of tables is an array of tables, None removes the key."""
Edits = Mapping[str, Value]
"""By dotted key of deploy.toml."""
Arm = Literal["incumbent", "candidate"]
Outcome = Literal["measured", "rejected", "failed"]
Refuses = Callable[[Edits, Edits], str]
"""Why edits cannot be compared with those that hold, empty if they can."""
Verdict = Literal[
    "waiting", "open", "better", "no gain", "undecided", "refused", "slower alone", "fails", "wrong answers",
    "not measurable", "not tried",
]  # fmt: skip
MOST_REJECTED = 3
"""Trials of one comparison without a valid window, after which it cannot be measured here."""


class Comparison(BaseModel):
    """One setting to try against what has won so far.

    Attributes:
        name: for people, `KEY=VALUE`.
        switch: the key, or the op of a hook.
        op: the hook's op, empty for other switches; it is tried alone first.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    switch: str
    edits: dict[str, Value]
    op: str = ""


class Trial(BaseModel):
    """One start of the stack and what was measured of it.

    Attributes:
        pair: from 0; both arms of a pair are measured one right after the other.
        value: output tokens a second, the geometric mean over the levels; 0 unless measured.
        levels: the same for each level.
        answers: to the fixed questions.
        reason: why it failed or was rejected.
        seconds: it took, `start_seconds` of them until the stack was accepted.
        folder: of the load test's result, below the experiment's.
    """

    model_config = ConfigDict(frozen=True)

    comparison: int
    pair: int
    arm: Arm
    outcome: Outcome
    value: float = 0.0
    levels: dict[str, float] = {}
    answers: list[str] = []
    reason: str = ""
    seconds: float = 0.0
    start_seconds: float = 0.0
    folder: str = ""


class Alone(BaseModel):
    """An op timed alone, ours against upstream's.

    Attributes:
        ratio: upstream's time over ours, the geometric mean over shapes; None if there is nothing to compare.
        detail: each shape, or why there is none.
    """

    model_config = ConfigDict(frozen=True)

    op: str
    ratio: float | None
    detail: list[str] = []
    seconds: float = 0.0


@dataclass(frozen=True)
class Design:
    """What an experiment is to do.

    Attributes:
        agreement: how much of the baseline's greedy answers must come again, 1.0: all. Where the baseline does not
            give itself so much, what it gives counts.
        seconds, trials: bounds of the whole experiment, however often it is resumed.
    """

    comparisons: tuple[Comparison, ...]
    rule: Rule
    agreement: float = 1.0
    seconds: float = math.inf
    trials: int = 1_000_000


@dataclass(frozen=True)
class Finding:
    """What is known of one comparison."""

    comparison: Comparison
    verdict: Verdict
    judgement: Judgement
    agreement: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Step:
    """The trial to run next."""

    comparison: int
    pair: int
    arm: Arm
    edits: Edits


@dataclass(frozen=True)
class Progress:
    """Where an experiment stands.

    Attributes:
        winners: edits that hold now: all that won, later ones over earlier.
        next: None when it is over.
    """

    findings: tuple[Finding, ...]
    winners: Edits
    next: Step | None


def progress(design: Design, trials: Sequence[Trial], alone: Iterable[Alone], refuses: Refuses) -> Progress:
    """Go through the comparisons in order: each is tried on top of what has won before it.

    Args:
        trials: in the order in which they were run.
        alone: of the ops that were timed alone.
    """
    slower = {one.op: one for one in alone if one.ratio is not None and one.ratio < 1}
    spent = sum(trial.seconds for trial in trials)
    longest = max((trial.seconds for trial in trials), default=0.0)
    over = len(trials) >= design.trials or spent + longest > design.seconds
    baseline: list[list[str]] = []
    findings: list[Finding] = []
    winners: dict[str, Value] = {}
    following: Step | None = None
    for place, comparison in enumerate(design.comparisons):
        if following:
            findings.append(Finding(comparison, "waiting", decide.judge((), design.rule)))
            continue
        own = [trial for trial in trials if trial.comparison == place]
        edits = {**winners, **comparison.edits}
        if not winners:
            baseline += [trial.answers for trial in own if trial.arm == "incumbent" and trial.answers]
        found = _preliminary(comparison, edits, winners, slower, refuses) or _judged(design, comparison, own, baseline)
        if found.verdict == "open":
            if over:
                verdict: Verdict = "undecided" if own else "not tried"
                found = Finding(comparison, verdict, found.judgement, found.agreement, "time or trials were used up")
            else:
                pair, arm = _place(own)
                following = Step(place, pair, arm, edits if arm == "candidate" else dict(winners))
        elif found.verdict == "better":
            winners = edits
        findings.append(found)
    return Progress(tuple(findings), winners, following)


def _preliminary(
    comparison: Comparison, edits: Edits, winners: Edits, slower: Mapping[str, Alone], refuses: Refuses
) -> Finding | None:
    """What needs no trial."""
    nothing = Judgement("open", 0, 1.0, None, None)
    if why := refuses(edits, winners):
        return Finding(comparison, "refused", nothing, reason=why)
    if one := slower.get(comparison.op):
        return Finding(comparison, "slower alone", nothing, reason=f"{1 / (one.ratio or 1):.2f} times upstream's time")
    return None


def _judged(design: Design, comparison: Comparison, own: Sequence[Trial], baseline: Sequence[Sequence[str]]) -> Finding:
    """What the trials of one comparison say.

    Args:
        baseline: answers of the trials without any setting, the first of which are the reference. How much of them it
            gives again itself is known once there are two.
    """
    judgement = decide.judge(_ratios(own), design.rule)
    candidates = [trial for trial in own if trial.arm == "candidate"]
    share = min((agreement(baseline[0], one.answers) for one in candidates if one.answers and baseline), default=None)
    least = min((design.agreement, *(agreement(baseline[0], again) for again in baseline[1:])))
    verdict: Verdict = judgement.verdict
    reason = ""
    failed = next((trial for trial in candidates if trial.outcome == "failed"), None)
    rejected = [trial for trial in own if trial.outcome == "rejected"]
    if failed:
        verdict, reason = "fails", failed.reason
    elif share is not None and share < least and len(baseline) > 1:
        verdict, reason = "wrong answers", f"{share:.3f} of the baseline's answers came again, {least:.3f} must"
    elif verdict == "open" and len(rejected) >= MOST_REJECTED:
        verdict, reason = "not measurable", rejected[-1].reason
    return Finding(comparison, verdict, judgement, share, reason)


def _ratios(own: Sequence[Trial]) -> list[float]:
    """Candidate over incumbent of the pairs that are complete."""
    pairs: dict[int, dict[Arm, float]] = {}
    for trial in own:
        if trial.outcome == "measured":
            pairs.setdefault(trial.pair, {})[trial.arm] = trial.value
    return [pair["candidate"] / pair["incumbent"] for pair in pairs.values() if len(pair) == 2]


def _place(own: Sequence[Trial]) -> tuple[int, Arm]:
    """The next trial's pair and arm: every second pair begins with the candidate, so that a drift cancels."""
    done = {(trial.pair, trial.arm) for trial in own if trial.outcome == "measured"}
    pair = 0
    while True:
        order: tuple[Arm, Arm] = ("incumbent", "candidate") if pair % 2 == 0 else ("candidate", "incumbent")
        for arm in order:
            if (pair, arm) not in done:
                return pair, arm
        pair += 1
