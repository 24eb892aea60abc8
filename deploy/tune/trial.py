"""One trial: start the stack with a setting, ask it fixed questions, measure it under load."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from python_on_whales import DockerClient

from deploy.errors import DeployError
from deploy.image.build import ImageReference
from deploy.lock.model import Lock, dump
from deploy.lock.resolve import profile_roles
from deploy.model.folder import draft_folder, model_folder
from deploy.model.variant import require_variant
from deploy.spec.load import SpecFile
from deploy.stack import change, generations
from deploy.stack.accept import accept
from deploy.stack.client import Endpoint, RequestFailed, endpoint, trust
from deploy.stack.compose import running_stack
from deploy.stack.events import Report, step
from deploy.stack.preview import preview
from deploy.stack.state import State, write
from deploy.stack.up import candidate_of, plan
from deploy.tune.answers import ANSWER_TOKENS, QUESTIONS
from deploy.tune.experiment import Edits, Step, Trial
from deploy.tune.store import Store
from deploy.tune.switches import apply, edited
from loadtest import bench
from loadtest.errors import BenchError
from loadtest.workload import Synthetic

WINDOWS = 3
"""Windows to try in one start until one is valid."""
SEEDS = 1_000_003
"""Seeds of neighbouring trials are so far apart that no prompt comes twice."""


@dataclass(frozen=True)
class Load:
    """How a trial is measured: closed loops of so many requests in flight, one after the other."""

    users: tuple[int, ...]
    workload: Synthetic
    duration: float
    warmup_limit: float = 300.0
    tokenizer: Path | None = None


@dataclass(frozen=True)
class Bench:
    """Where and on what trials run. `say` hears what goes on within the load test."""

    root: Path
    state: State
    spec_file: SpecFile
    text: str
    image: ImageReference
    lock: Lock | None
    store: Store
    load: Load
    report: Report
    say: Callable[[str], None] = lambda _: None

    def run(self, wanted: Step, other: Edits, number: int) -> Trial:
        """Run a trial; the services in which it differs from its opponent are started anew.

        Args:
            other: the opponent's edits.
            number: of the trial, from 0.

        Returns:
            What was measured, or why it was not.
        """
        begun = time.monotonic()
        folder = f"{number:03}"
        spec_file = edited(self.spec_file, self.text, wanted.edits)
        same: dict[str, Any] = {"comparison": wanted.comparison, "pair": wanted.pair, "arm": wanted.arm}
        try:
            target = self._start(spec_file, wanted.edits, self._differing(wanted.edits, other))
            started = time.monotonic() - begun
            self.say("asking the fixed questions")
            answers = [_answer(target, question) for question in QUESTIONS]
            levels, reason, last = self._measure(spec_file, target, folder, number)
        except (DeployError, BenchError) as error:
            took = time.monotonic() - begun
            return Trial(**same, outcome="failed", reason=f"{error.message}: {error.why}", seconds=took)
        values = list(levels.values())
        return Trial(
            **same,
            outcome="rejected" if reason else "measured",
            value=0.0 if reason else math.exp(math.fsum(map(math.log, values)) / len(values)),
            levels=levels,
            answers=answers,
            reason=reason,
            seconds=time.monotonic() - begun,
            start_seconds=started,
            folder=last,
        )

    def _services(self, edits: Edits) -> dict[str, Any]:
        """The services of a setting, as Compose makes them."""
        stack, lines = plan(self.root, edited(self.spec_file, self.text, edits), self.state, self.image.tag)
        return preview(stack, lines)[0]["services"]

    def _differing(self, edits: Edits, other: Edits) -> set[str]:
        one, two = self._services(edits), self._services(other)
        return {name for name in {*one, *two} if one.get(name) != two.get(name)}

    def _start(self, spec_file: SpecFile, edits: Edits, anew: set[str]) -> Endpoint:
        """Start the stack and return once it is accepted."""
        if spec_file.spec.roles:
            require_variant(model_folder(spec_file, self.state), spec_file.spec, draft_folder(spec_file))
        text = apply(self.text, edits).encode()
        stack, candidate = candidate_of(self.root, spec_file, self.state, self.image, text)
        before = running_stack(self.root, self.state.environment)
        # Nobody's request is in flight: at once, and for both arms alike.
        DockerClient().container.remove(
            [role.container for role in before.roles() if role.role in anew], force=True, volumes=True
        )
        generations.write_candidate(self.state, candidate)
        with step("start", self.report):
            change.start(stack, self.state, self.report)
        with step("accept", self.report) as running:
            target = endpoint(stack.config())
            running.outcome = str(accept(stack, target, running))
        return target

    def _measure(
        self, spec_file: SpecFile, target: Endpoint, folder: str, number: int
    ) -> tuple[dict[str, float], str, str]:
        """Throughput by level, or why no window was valid; and the folder of the last load test."""
        place = self.store.loads / folder
        lock = self._lock(spec_file, place)
        reason, last = "", ""
        for attempt in range(WINDOWS):
            settings = bench.Settings(
                url=target.url,
                workload=self.load.workload,
                users=self.load.users,
                duration=self.load.duration,
                api_key_file=target.api_key_file,
                ca_file=target.certificate,
                model=target.model,
                seed=SEEDS * (WINDOWS * number + attempt + 1),
                tokenizer=self.load.tokenizer,
                warmup_limit=self.load.warmup_limit,
                lock=lock,
                out=place,
                label=f"tune {folder}",
            )
            result, run = bench.run(settings, self._watch, self.say)
            last = str(run.relative_to(self.store.folder))
            values = {level.name: level.metrics.output_throughput for level in result.levels if level.metrics}
            if result.verdict == "valid" and all(value > 0 for value in values.values()):
                return values, "", last
            found = [text.text for level in result.levels for text in level.findings if text.severity == "reject"]
            reason = "; ".join(found[:3]) or "no level was valid"
        return {}, reason, last

    def _watch(self, seen: bench.State) -> None:
        left = f", {seen.progress.left:.0f} s left" if seen.progress.left else ""
        self.say(f"{seen.level}: {seen.progress.phase}{left}")

    def _lock(self, spec_file: SpecFile, place: Path) -> Path | None:
        """A lock that describes this trial, for the load test to hold the engines against."""
        if self.lock is None:
            return None
        roles = profile_roles(self.root, spec_file, spec_file.spec.profile)
        described = self.lock.model_copy(update={"roles": {spec_file.spec.profile: roles}})
        file = place / "deploy.lock"
        write(file, dump(described))
        return file


def _answer(target: Endpoint, question: str) -> str:
    """The model's own continuation of a text, greedily, without a chat template between.

    Raises:
        RequestFailed: no answer.
    """
    body = {
        "text": question,
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
    }
    try:
        # trust_env off: a proxy set in the shell must not see requests to this host.
        with httpx.Client(
            base_url=target.url,
            headers=target.headers(),
            timeout=httpx.Timeout(300, connect=5),
            trust_env=False,
            verify=trust(target.certificate),
        ) as client:
            response = client.post("/generate", json=body)
            response.raise_for_status()
            return str(response.json()["text"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise RequestFailed(
            "a fixed question was not answered", str(error) or type(error).__name__, "deploy logs"
        ) from error
