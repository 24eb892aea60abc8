"""The whole experiment with simulated trials: what a person gets, and what is left after whatever stops it."""

import json
import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.image.build import ImageReference
from deploy.spec.load import load
from deploy.stack.events import Event
from deploy.stack.state import State
from deploy.tune import run as module
from deploy.tune.decide import Rule
from deploy.tune.experiment import Alone, Comparison, Design, Edits, Progress, Step, Trial
from deploy.tune.run import BaselineFails, ChangedMeanwhile, Outcome, Request, tune
from deploy.tune.store import Store
from deploy.tune.switches import comparisons
from deploy.tune.trial import Load
from loadtest.workload import Length, Synthetic

ROOT = Path(__file__).parents[2]
SPEC = 'profile = "cpu"\n# stays\n[variables]\nCHUNKED_PREFILL_SIZE = 16  # planted\n'
LOAD = Load((16,), Synthetic(input=Length(low=8, high=8), output=Length(low=4, high=4)), 1.0)


class Silent:
    """Hears everything and keeps the trials' numbers."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.resumed = False

    def begin(self, store: Store, resumed: bool, known: Progress) -> None:
        self.resumed = resumed

    def alone(self, op: str, found: Alone | None) -> None: ...

    def trial(self, number: int, step: Step, comparison: Comparison) -> None:
        self.numbers.append(number)

    def measured(self, trial: Trial, known: Progress) -> None: ...

    def say(self, text: str) -> None: ...


@dataclass
class World:
    """The stack's stand-in: the default chunk is four times as fast as the planted one."""

    folder: Path
    spec: Path
    journal: list[str]
    failing: str = ""
    interrupt_at: int = -1

    def tune(self, watcher: Silent | None = None, **bounds: float) -> Outcome:
        spec_file = load(self.spec)
        files = [ROOT / "compose.yaml", ROOT / "compose.cpu.yaml"]
        found = tuple(comparisons(spec_file, files))
        design = Design(found, Rule(len(found)), **bounds)  # pyright: ignore[reportArgumentType]
        text = self.spec.read_text()
        state = State(self.folder / "state")
        return tune(ROOT, spec_file, text, state, _ignore, Request(design, LOAD, "me"), watcher or Silent())

    def measure(self, step: Step, number: int) -> Trial:
        if number == self.interrupt_at:
            raise KeyboardInterrupt
        same: dict[str, Any] = {"comparison": step.comparison, "pair": step.pair, "arm": step.arm}
        if self.failing == step.arm:
            return Trial(**same, outcome="failed", reason="decode failed to start: it hangs")
        rng = np.random.default_rng([step.comparison, step.pair, step.arm == "candidate"])
        speed = 100 * (4 if "variables.CHUNKED_PREFILL_SIZE" in step.edits else 1) * math.exp(rng.normal(0, 0.01))
        return Trial(**same, outcome="measured", value=speed, answers=["a"], seconds=1)


def _ignore(event: Event) -> None: ...


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    spec = tmp_path / "deploy.toml"
    spec.write_text(SPEC)
    made = World(tmp_path, spec, [])

    class Bench:
        def __init__(self, *arguments: Any, say: Any) -> None:
            self.store: Store = arguments[6]

        def run(self, step: Step, other: Edits, number: int) -> Trial:
            assert other != step.edits
            return made.measure(step, number)

    @contextmanager
    def journaled(*_: Any) -> Generator[None]:
        made.journal.append("begin")
        try:
            yield
        except BaseException:
            made.journal.append("undone")
            raise
        made.journal.append("end")

    def back(*_: Any) -> str:
        made.journal.append("back")
        return "back to generation 1, which serves again"

    class Nothing:
        def volumes(self) -> set[str]:
            return set()

    monkeypatch.setattr(module, "Bench", Bench)

    def prepare(*_: Any) -> ImageReference:
        return ImageReference("tag", "sha256:1", 1, False)

    def running_stack(*_: Any) -> Nothing:
        return Nothing()

    def heal(*_: Any) -> None: ...

    monkeypatch.setattr(module, "prepare", prepare)
    monkeypatch.setattr(module, "running_stack", running_stack)
    monkeypatch.setattr(module.change, "heal", heal)
    monkeypatch.setattr(module.change, "journaled", journaled)
    monkeypatch.setattr(module.change, "back", back)
    return made


def test_the_planted_slow_setting_is_found_and_signed_off(world: World) -> None:
    outcome = world.tune()
    assert [(one.setting, one.was, one.now) for one in outcome.winners] == [
        ("variables.CHUNKED_PREFILL_SIZE", "16", "2048")
    ]
    spec = load(world.spec).spec
    assert spec.variables == {"CHUNKED_PREFILL_SIZE": "2048"} and spec.tuned
    assert "# stays" in world.spec.read_text() and "# planted" in world.spec.read_text()
    assert spec.tuned.by == "me" and spec.tuned.winner[0].ratio == pytest.approx(4, rel=0.05)
    report = json.loads((world.folder / spec.tuned.results).read_text())
    assert len(report["trials"]) == outcome.trials and report["winners"][0]["now"] == "2048"
    assert world.journal == ["begin", "back", "end"]


def test_an_interrupted_experiment_undoes_its_change_signs_nothing_and_goes_on(world: World) -> None:
    world.interrupt_at = 4
    with pytest.raises(KeyboardInterrupt):
        world.tune()
    assert world.journal == ["begin", "undone"] and world.spec.read_text() == SPEC
    world.interrupt_at = -1
    watcher = Silent()
    outcome = world.tune(watcher)
    assert watcher.resumed and watcher.numbers[0] == 4 and outcome.winners
    assert len(list((world.folder / "state/tune").iterdir())) == 1


def test_an_experiment_that_was_cut_off_before_its_sign_off_only_signs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.signed

    def killed(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "signed", killed)
    with pytest.raises(KeyboardInterrupt):
        world.tune()
    monkeypatch.setattr(module, "signed", real)
    world.journal.clear()
    watcher = Silent()
    assert world.tune(watcher).winners and watcher.numbers == [] and world.journal == []


def test_bounds_end_it_with_what_is_known_so_far(world: World) -> None:
    outcome = world.tune(trials=2)
    assert outcome.trials == 2 and not outcome.winners and world.spec.read_text() == SPEC
    assert [one.verdict for one in outcome.findings] == ["undecided", "not tried"]


def test_a_stack_that_does_not_serve_as_it_is_cannot_be_tuned(world: World) -> None:
    world.failing = "incumbent"
    with pytest.raises(BaselineFails, match="does not serve") as raised:
        world.tune()
    assert raised.value.exit_code == 4 and "it hangs" in raised.value.why and world.journal == ["begin", "undone"]


def test_a_setting_that_does_not_start_is_a_finding_and_no_failure(world: World) -> None:
    world.failing = "candidate"
    outcome = world.tune()
    assert {one.verdict for one in outcome.findings} == {"fails"} and not outcome.winners
    assert world.journal == ["begin", "back", "end"]


def test_a_spec_that_was_changed_meanwhile_is_left_alone(world: World) -> None:
    real = world.measure

    def measure(step: Step, number: int) -> Trial:
        world.spec.write_text(SPEC + "# another hand\n")
        return real(step, number)

    world.measure = measure
    with pytest.raises(ChangedMeanwhile, match="was changed"):
        world.tune()
    assert world.spec.read_text() == SPEC + "# another hand\n"
    assert list((world.folder / "state/tune").glob("*/report.json"))
