"""A trace as the time of a step: by category, launches, idle, occupancy, kernels; and two compared. Pure."""

import re
from collections import Counter, defaultdict
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from deploy.profile.categories import CATEGORIES, category_of, is_ours
from deploy.profile.trace import Events, Floats, Span, Trace

SCHEMA = "dsv4-profile/1"
SHORT_SECONDS = 5e-6
"""A kernel shorter than this costs about as much to start as to run."""
TOP = 20
STEP = re.compile(r"^(?:## )?step\[(\w+)")
# SGLang's names of the forward modes that generate, and of those that read prompts.
STAGES = {"decode": ("DECODE", "VERIFY", "TARGET_VERIFY"), "prefill": ("EXTEND", "MIXED", "PREFILL")}

Stage = Literal["decode", "prefill", "all"]


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Share(Frozen):
    """Of one category in one step: seconds in which nothing before it still ran, launches, and our kernels' seconds."""

    seconds: float
    launches: float
    ours: float


class Kernel(Frozen):
    """One name, all its launches in one step together."""

    name: str
    category: str
    ours: bool
    seconds: float
    launches: float


class Step(Frozen):
    """The mean step. `by_category` adds up to `seconds`, idle time included."""

    seconds: float
    launches: float
    by_category: dict[str, Share]


class Summary(Frozen):
    """What a trace says of a step.

    Attributes:
        device: the GPU, or "CPU" where the trace has no kernels: then operators' own times count.
        stage: which steps are counted.
        steps: how many; 1 if the trace marks none, and `notes` says so.
        busy: share of the time in which something ran.
        launch_bound: share of the time that was idle or went to kernels shorter than 5 us.
        few_blocks: share of the busy time in kernels of fewer blocks than the GPU has multiprocessors; None where the
            trace does not say.
        occupancy: of the multiprocessors while something ran, percent, as the profiler estimates it; None as above.
        ours: share of the busy time in this repository's kernels.
    """

    schema_: str = SCHEMA
    file: str
    device: str
    stage: Stage
    steps: int
    layers: int
    step: Step
    layer_seconds: float
    layer_launches: float
    busy: float
    launch_bound: float
    few_blocks: float | None
    occupancy: float | None
    ours: float
    kernels: list[Kernel]
    notes: list[str]


class Change(Frozen):
    """Seconds of a step, before and after; `name` is a category or a kernel."""

    name: str
    before: float
    after: float

    @property
    def difference(self) -> float:
        return self.after - self.before


class Comparison(Frozen):
    """`categories` in their order, `kernels` by how much they changed, the largest first."""

    before: str
    after: str
    step: Change
    launches: Change
    categories: list[Change]
    kernels: list[Change]


def summarise(trace: Trace, layers: int, stage: Stage = "all") -> Summary:
    """The mean step of a trace.

    Args:
        layers: of the model; what a layer takes is a step's time over them.
        stage: count only steps that generate or that read prompts; "all": those of the stage that took longest.

    Raises:
        ValueError: there is nothing to count, or no step of that stage.
    """
    on_gpu = len(trace.kernels) > 0
    events = trace.kernels if on_gpu else trace.operators
    if not len(events):
        raise ValueError("it has neither kernels nor operators")
    notes: list[str] = []
    spans, stage = _steps(trace, on_gpu, stage)
    windows, steps = _windows(trace, events, spans, on_gpu, notes)
    if not on_gpu:
        lanes, counts = np.unique(events.lane, return_counts=True)
        events = events.where(events.lane == (spans[0].thread if spans else lanes[counts.argmax()]))
        if not len(events):
            raise ValueError("its steps' thread has no operators")
        notes.append("no kernels in the trace: the host's operators, each without those inside it")
    inside = _inside(events.begin, windows)
    seconds = _exclusive(events) if on_gpu else _self_times(events)
    events, seconds = events.where(inside), seconds[inside]
    if not len(events):
        raise ValueError("nothing ran in its steps")
    whole = float((windows[:, 1] - windows[:, 0]).sum())
    return _summary(trace, events, seconds, whole, steps, layers, stage, on_gpu, notes)


def _steps(trace: Trace, on_gpu: bool, stage: Stage) -> tuple[list[Span], Stage]:
    """The spans of the steps to count, and which stage that is."""
    marked = [span for span in trace.spans if STEP.match(span.name)]
    here = [span for span in marked if span.on_gpu == on_gpu]
    marked = here or marked
    if not marked:
        return [], stage
    by_stage: dict[Stage, list[Span]] = defaultdict(list)
    for span in marked:
        found = STEP.match(span.name)
        mode = found.group(1) if found else ""
        for name, modes in STAGES.items():
            if mode in modes:
                by_stage["decode" if name == "decode" else "prefill"].append(span)
    if stage == "all":
        if not by_stage:
            return marked, "all"
        stage = max(by_stage, key=lambda name: sum(span.end - span.begin for span in by_stage[name]))
    if not by_stage.get(stage):
        raise ValueError(f"it has no {stage} step; it has {', '.join(by_stage) or 'others'}")
    return by_stage[stage], stage


def _windows(trace: Trace, events: Events, spans: list[Span], on_gpu: bool, notes: list[str]) -> tuple[Floats, int]:
    """[n, 2] begin and end of what is counted, and how many steps that is.

    A step lasts until the next begins, so that what the host does between them counts, unless other work lies between.
    """
    if spans and spans[0].on_gpu == on_gpu:
        others = [span.begin for span in trace.spans if STEP.match(span.name) and span not in spans]
        found: list[tuple[float, float]] = []
        for span, following in zip(spans, [*spans[1:], None], strict=True):
            end = span.end
            if following and not any(span.begin < begin < following.begin for begin in others):
                end = max(end, following.begin)
            found.append((span.begin, end))
        return _merge(np.array(found)), len(found)
    steps = len(trace.graph_launches) or len(spans)
    if not steps:
        notes.append("no steps are marked: all figures are of the whole trace")
    else:
        notes.append("steps are counted by graph launches or host spans; idle time before and after counts too")
    return np.array([[events.begin.min(), events.end.max()]]), max(steps, 1)


def _merge(windows: Floats) -> Floats:
    """Windows that overlap become one."""
    kept: list[list[float]] = []
    for begin, end in windows[np.argsort(windows[:, 0])].tolist():
        if kept and begin <= kept[-1][1]:
            kept[-1][1] = max(kept[-1][1], end)
        else:
            kept.append([begin, end])
    return np.array(kept)


def _inside(times: Floats, windows: Floats) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    place = np.searchsorted(windows[:, 0], times, side="right") - 1
    return (place >= 0) & (times < windows[np.maximum(place, 0), 1])


def _exclusive(events: Events) -> Floats:
    """Seconds of each event in which none that began before it still ran; they add up to the busy time."""
    latest = np.maximum.accumulate(events.end)
    before = np.concatenate([[-np.inf], latest[:-1]])
    return np.maximum(0.0, events.end - np.maximum(events.begin, before))


def _self_times(events: Events) -> Floats:
    """Seconds of each operator without those inside it; of one thread, ordered by begin, the outer one first."""
    own = events.end - events.begin
    ends = events.end.tolist()
    open_: list[int] = []
    for place, begin in enumerate(events.begin.tolist()):
        while open_ and ends[open_[-1]] <= begin:
            open_.pop()
        if open_:
            own[open_[-1]] -= ends[place] - begin
        open_.append(place)
    return np.maximum(own, 0.0)


def _summary(
    trace: Trace,
    events: Events,
    seconds: Floats,
    whole: float,
    steps: int,
    layers: int,
    stage: Stage,
    on_gpu: bool,
    notes: list[str],
) -> Summary:
    categories = [category_of(name) for name in trace.names]
    ours = np.array([is_ours(name) for name in trace.names])
    size = len(trace.names)
    by_name = np.bincount(events.name, weights=seconds, minlength=size)
    counts = np.bincount(events.name, minlength=size)
    busy = min(float(seconds.sum()), whole)
    total: defaultdict[str, float] = defaultdict(float)
    own: defaultdict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    for place, category in enumerate(categories):
        total[category] += float(by_name[place])
        launches[category] += int(counts[place])
        own[category] += float(by_name[place]) if ours[place] else 0.0
    total["idle"] = max(0.0, whole - busy)
    shares = {
        name: Share(seconds=total[name] / steps, launches=launches[name] / steps, ours=own[name] / steps)
        for name in CATEGORIES
        if total[name] > 0 or launches[name]
    }
    short = float(seconds[(events.end - events.begin) < SHORT_SECONDS].sum())
    known = events.occupancy >= 0
    kernels = [
        Kernel(
            name=trace.names[place],
            category=categories[place],
            ours=bool(ours[place]),
            seconds=float(by_name[place]) / steps,
            launches=int(counts[place]) / steps,
        )
        for place in map(int, np.argsort(-by_name))
        if counts[place]
    ]
    has_blocks = on_gpu and trace.multiprocessors > 0 and bool((events.blocks > 0).any())
    few = float(seconds[(events.blocks > 0) & (events.blocks < trace.multiprocessors)].sum())
    weight = float(seconds[known].sum())
    return Summary(
        file=trace.file,
        device=(trace.gpu_name or "GPU") if on_gpu else "CPU",
        stage=stage,
        steps=steps,
        layers=layers,
        step=Step(seconds=whole / steps, launches=len(events) / steps, by_category=shares),
        layer_seconds=whole / steps / layers,
        layer_launches=len(events) / steps / layers,
        busy=busy / whole,
        launch_bound=min(1.0, (whole - busy + short) / whole),
        few_blocks=few / busy if has_blocks and busy else None,
        occupancy=float((events.occupancy[known] * seconds[known]).sum()) / weight if weight else None,
        ours=sum(own.values()) / busy if busy else 0.0,
        kernels=kernels,
        notes=notes,
    )


def compare(before: Summary, after: Summary) -> Comparison:
    """What a step of `after` does otherwise than one of `before`."""
    names = [name for name in CATEGORIES if name in {*before.step.by_category, *after.step.by_category}]
    sides = [{k.name: k.seconds for k in one.kernels} for one in (before, after)]
    kernels = [
        Change(name=name, before=sides[0].get(name, 0.0), after=sides[1].get(name, 0.0))
        for name in dict.fromkeys([*sides[0], *sides[1]])
    ]
    return Comparison(
        before=before.file,
        after=after.file,
        step=Change(name="step", before=before.step.seconds, after=after.step.seconds),
        launches=Change(name="launches", before=before.step.launches, after=after.step.launches),
        categories=[Change(name=name, before=_seconds(before, name), after=_seconds(after, name)) for name in names],
        kernels=sorted(kernels, key=lambda change: -abs(change.difference)),
    )


def _seconds(summary: Summary, category: str) -> float:
    share = summary.step.by_category.get(category)
    return share.seconds if share else 0.0
