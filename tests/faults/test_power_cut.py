"""The controller killed at its orders to Docker and its changes on the disk: what runs is old or new, never mixed."""

import json
import signal
from pathlib import Path

import pytest
from harness import Controller, note

STACK = "two stand-ins, real router"
# Of the changes of one verb these are tried; the unit tests try each one with a stand-in for Docker.
MOMENTS = (0, 4, 9, 14, 19, 24, 29, 34, 39)


def whole(controller: Controller) -> str:
    """The current generation's image, after a look at whether the containers are its and nothing is left over."""
    listed = json.loads(controller.must("generations", "--json").stdout)
    assert not [item for item in listed if "damaged" in item], listed
    now = next(item for item in listed if item["current"])
    images = controller.images()
    assert len(images) == 3 and set(images.values()) == {now["image"]}, (images, now)
    assert not (controller.state / "journal.json").exists()
    assert not (controller.state / "candidate").exists()
    return str(now["image"])


@pytest.mark.long
@pytest.mark.parametrize("verb", ["upgrade", "rollback"])
def test_killed_at_any_moment_the_next_command_heals(fresh: Controller, second_name: str, verb: str) -> None:
    fresh.must("up")
    first_name = whole(fresh)
    new = second_name
    if verb == "rollback":
        fresh.must("upgrade", STANDIN_IMAGE=second_name)
        new = first_name
    outcomes: set[str] = set()
    cut = 0
    for moment in MOMENTS:
        process = fresh.start(verb, KILL_AT=str(moment), STANDIN_IMAGE=second_name)
        process.communicate(timeout=400)
        if process.returncode != -signal.SIGKILL:
            break
        cut += 1
        # The next command, whichever it is: this one changes nothing of its own.
        fresh.must("watch", "--once")
        outcomes.add(whole(fresh))
        if new in outcomes:
            break
    assert cut >= 2
    assert outcomes <= {first_name, second_name}
    seen = f"cut {cut} times at different moments; the next command healed each"
    note(f"controller killed in deploy {verb}", seen, None, "nothing: old or new", STACK)


def test_killed_in_the_first_up_nothing_is_left(fresh: Controller) -> None:
    for moment in (3, 8):
        process = fresh.start("up", KILL_AT=str(moment))
        process.communicate(timeout=400)
        assert process.returncode == -signal.SIGKILL
        fresh.must("watch", "--once")
        assert [item for item in fresh.leftovers() if not item.startswith("volume")] == []
    note("controller killed in the first deploy up", "nothing ran before", None, "nothing is left of it", STACK)


def test_two_controllers_at_once_and_a_state_that_is_not_what_was_written(fresh: Controller, tmp_path: Path) -> None:
    fresh.must("up")
    first = fresh.start("restart", "engine")
    while not (fresh.state / "journal.json").exists():
        assert first.poll() is None
    refused = fresh.run("up")
    assert refused.returncode == 5, refused.stderr
    assert "`deploy restart` (pid" in refused.stderr
    assert first.wait(400) == 0
    note("two controllers at once", "nothing", None, "nothing: the second is refused, exit code 5", STACK)
    before = fresh.images()
    (fresh.state / "journal.json").write_text("{")
    fresh.must("watch", "--once")
    record = fresh.state / "generations" / "1" / "generation.json"
    record.write_bytes(b"\x00" * 10)
    assert "damaged" in fresh.must("generations").stdout
    assert fresh.run("rollback", "1").returncode == 1
    assert fresh.images() == before
    fresh.must("up")
    assert fresh.images() == before
    note("journal and current generation overwritten", "nothing", None, "that generation: `up` makes a new one", STACK)
