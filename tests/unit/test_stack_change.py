"""A change that is cut off anywhere leaves what was before or what should be, and the next command heals it.

The containers are a file that a stand-in for Docker writes; everything else is the controller's own.
"""

import errno
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deploy.errors import DeployError
from deploy.spec.profiles import ROUTER
from deploy.stack import change, gate, generations, journal
from deploy.stack.compose import Stack
from deploy.stack.generations import Candidate, Generation
from deploy.stack.state import State, write

ENGINES = ("engine", "engine-2")
CUT = 9
OPERATIONS = ("replace", "rename", "symlink", "unlink", "rmdir", "mkdir", "fsync")


@dataclass(frozen=True)
class Container:
    role: str
    container: str
    status: str = "running"


@dataclass
class FakeStack:
    """What of `Stack` a change uses, over a file that says with which text each service runs."""

    file: Path
    environment: Path
    profile: str = "replicas"
    engines: tuple[str, ...] = ENGINES
    broken: set[str] = field(default_factory=set[str])

    @property
    def text(self) -> str:
        return self.environment.read_text() if self.environment.exists() else ""

    def running(self) -> dict[str, str]:
        return json.loads(self.file.read_text()) if self.file.exists() else {}

    def config(self) -> dict[str, Any]:
        return {"services": {name: {} for name in (*self.engines, ROUTER)}}

    def roles(self) -> list[Container]:
        return [Container(role, f"{role}:{text}") for role, text in self.running().items()]

    def outdated(self) -> set[str]:
        return {name for name in self.config()["services"] if self.running().get(name) != self.text}

    def volumes(self) -> set[str]:
        return set()

    def retire(self) -> None:
        pass

    def start(self, services: Iterable[str]) -> None:
        for name in services:
            write(self.file, json.dumps(self.running() | {name: self.text}))

    def remove(self, **_: Any) -> None:
        write(self.file, "{}")


class World:
    """A state folder and the stand-in's containers."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state, self.file = State(folder / "state"), folder / "containers.json"
        self.root = folder
        self.drains: list[tuple[str, ...]] = []
        self.sick = ""

        def wait_healthy(stack: FakeStack, roles: tuple[str, ...], state: State, report: object) -> None:
            if self.sick and self.sick in stack.text:
                raise DeployError(f"{roles[0]} failed to start", "it is sick", "")

        def drain(stack: FakeStack, roles: Iterable[str], limit: float, progress: object) -> int:
            self.drains.append(tuple(roles))
            return 0

        def place(root: Path, state: State, generation: Generation) -> FakeStack:
            generations.check(state, generation)
            return FakeStack(self.file, generations.folder(state, generation.number) / "stack.env")

        monkeypatch.setattr(change, "running_stack", lambda root, environment: FakeStack(self.file, environment))  # pyright: ignore
        monkeypatch.setattr(change, "generation_stack", place)
        monkeypatch.setattr(change, "wait_healthy", wait_healthy)
        monkeypatch.setattr(change, "accept", lambda stack, target, running: "accepted")  # pyright: ignore
        monkeypatch.setattr(change, "endpoint", lambda config: None)  # pyright: ignore
        monkeypatch.setattr(gate, "drain", drain)
        monkeypatch.setattr(gate, "restore", lambda stack, roles: None)  # pyright: ignore
        idle = gate.View(0, 0, frozenset(), frozenset(), frozenset(), frozenset(), False)
        monkeypatch.setattr(gate, "view", lambda stack: idle)  # pyright: ignore

    def up(self, text: str) -> Generation:
        """The part of `deploy up` that changes something."""
        candidate = Candidate("replicas", "isolated", 2, "image:1", "sha256:1", {"stack.env": text.encode()})
        with self.state.lock("up"):
            change.heal(self.root, self.state, _silent)
            with change.journaled(self.root, self.state, "up", _silent):
                folder = generations.write_candidate(self.state, candidate)
                stack: Any = FakeStack(self.file, folder / "stack.env")
                change.start(stack, self.state, _silent)
                return generations.accept_candidate(self.state, candidate, "up", {})

    def rollback(self, number: int | None = None) -> Generation:
        return change.rollback(self.root, self.state, number, _silent).generation

    def heal(self) -> None:
        with self.state.lock("heal"):
            change.heal(self.root, self.state, _silent)

    def runs(self) -> set[str]:
        return set(FakeStack(self.file, Path()).running().values())

    def whole(self) -> None:
        """Nothing is mixed: the containers are the current generation's, and every generation is sound."""
        now = generations.current(self.state)
        assert self.runs() == ({(self.state.current / "stack.env").read_text()} if now else set())
        for number in generations.numbers(self.state):
            generations.check(self.state, generations.read(self.state, number))
        assert journal.cut_off(self.state) is None
        assert not self.state.candidate.exists()
        assert [path.name for path in self.state.generations.glob(".*")] == []


def _silent(event: object) -> None:
    pass


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def cut(at: int, body: Callable[[], object], *, full: bool = False) -> bool:
    """Run a body in a process of its own that dies at its `at`-th operation on the disk; False if it ended before.

    Args:
        full: from then on the disk is full instead, for this process: it may still remove, and say what it wants.
    """
    child = os.fork()
    if not child:
        left = [at]

        def dying(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                if not full:
                    os._exit(CUT)
                if operation.__name__ not in ("unlink", "rmdir"):
                    raise OSError(errno.ENOSPC, "No space left on device")
            return operation(*arguments, **options)

        for name in OPERATIONS:
            setattr(os, name, partial(dying, getattr(os, name)))
        try:
            body()
        except (OSError, DeployError):
            os._exit(CUT if full else 1)
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, CUT)
    return code == CUT


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["first up", "up", "rollback", "prune"])
def test_cut_off_at_any_operation_the_next_command_finds_old_or_new_and_heals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    outcomes: set[int | None] = set()
    at = 0
    while True:
        world = World(tmp_path / str(at), monkeypatch)
        bodies: dict[str, Callable[[], object]] = {
            "first up": partial(world.up, "new"),
            "up": partial(world.up, "new"),
            "rollback": partial(world.rollback, 1),
            "prune": partial(generations.prune, world.state, 1),
        }
        if verb != "first up":
            for text in ("one", "two", "three"):
                world.up(text)
        before = generations.current_number(world.state)
        died = cut(at, bodies[verb])
        world.heal()
        world.whole()
        outcomes.add(generations.current_number(world.state))
        if not died:
            break
        # And once healed, everything works as if nothing had happened.
        if at % 7 == 0:
            world.up("afterwards")
            world.whole()
        at += 1
    assert at >= 5
    after = {"first up": 1, "up": 4, "rollback": 1, "prune": 3}[verb]
    assert outcomes == {before, after}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["up", "rollback"])
def test_a_disk_that_is_full_from_any_operation_on_leaves_old_or_new_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    outcomes: set[int | None] = set()
    for at in range(200):
        world = World(tmp_path / str(at), monkeypatch)
        world.up("one")
        world.up("two")
        body = partial(world.up, "three") if verb == "up" else partial(world.rollback, 1)
        failed = cut(at, body, full=True)
        world.heal()
        world.whole()
        outcomes.add(generations.current_number(world.state))
        if not failed:
            break
    assert outcomes == {2, 3 if verb == "up" else 1}


@pytest.mark.slow
def test_a_heal_that_is_cut_off_is_healed_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(0, 40, 3):
        world = World(tmp_path / str(at), monkeypatch)
        world.up("old")
        assert cut(12, partial(world.up, "new"))
        while cut(at, world.heal):
            at = at + 5
        world.whole()


def test_an_up_that_fails_is_back_at_the_generation_before_and_says_so(world: World) -> None:
    world.up("old")
    world.sick = "sick"
    with pytest.raises(DeployError) as failure:
        world.up("sick")
    assert failure.value.aftermath == "back to generation 1, which serves again"
    world.whole()
    assert generations.numbers(world.state) == [1]


def test_an_up_that_fails_where_nothing_ran_removes_what_it_started(world: World) -> None:
    world.sick = "sick"
    with pytest.raises(DeployError) as failure:
        world.up("sick")
    assert failure.value.aftermath == "removed what was started"
    world.whole()


def test_a_failed_return_keeps_the_journal_and_the_next_command_tries_again(world: World) -> None:
    world.up("old")
    world.up("old too")
    world.sick = "o"
    with pytest.raises(DeployError) as failure:
        world.up("other")
    assert "could not be brought back" in failure.value.aftermath
    assert journal.cut_off(world.state)
    world.sick = ""
    world.heal()
    world.whole()
    assert world.runs() == {"old too"}


def test_a_damaged_generation_is_refused_and_a_new_up_works(world: World) -> None:
    world.up("one")
    world.up("two")
    write(generations.folder(world.state, 1) / "stack.env", "something else")
    with pytest.raises(generations.Damaged, match="generation 1 is damaged"):
        world.rollback()
    assert world.runs() == {"two"}
    (generations.folder(world.state, 2) / "generation.json").write_text("{")
    assert world.up("three").number == 3
    assert world.runs() == {"three"}


def test_engines_that_do_the_same_are_replaced_one_after_the_other(world: World) -> None:
    world.up("one")
    assert world.drains == []
    world.up("two")
    assert world.drains == [("engine",), ("engine-2",)]


def test_the_same_again_is_the_same_generation(world: World) -> None:
    first = world.up("one")
    assert world.up("one") == first
    assert generations.numbers(world.state) == [1]


def test_rollback_goes_to_the_generation_before_and_up_makes_a_new_one(world: World) -> None:
    for text in ("one", "two", "three"):
        world.up(text)
    assert world.rollback().number == 2
    assert world.rollback().number == 1
    assert world.runs() == {"one"}
    with pytest.raises(DeployError, match="nothing to roll back to"):
        world.rollback()
    with pytest.raises(DeployError, match="there is no generation 9"):
        world.rollback(9)
    assert world.up("four").number == 4
    assert world.rollback().number == 3


def test_prune_keeps_the_current_generation_and_the_one_before(world: World) -> None:
    for text in ("one", "two", "three", "four"):
        world.up(text)
    world.rollback(2)
    assert generations.prune(world.state, 1) == [3]
    assert generations.numbers(world.state) == [1, 2, 4]


def test_the_real_stack_has_what_the_stand_in_pretends() -> None:
    for name in ("config", "roles", "outdated", "volumes", "retire", "start", "remove", "engines"):
        assert hasattr(Stack, name), name
