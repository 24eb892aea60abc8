import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.errors import DeployError
from deploy.host.docker_facts import DockerFacts
from deploy.lock.model import LockedFile, ModelLock
from deploy.model.check import check_folder
from deploy.stack import cleanup, docker_engine, generations, journal
from deploy.stack.state import LockHeld, NoStateFolder, State, copy_secret, read_keys, write, write_all

HOLD = """
import sys
from deploy.stack.state import *
with State(Path(sys.argv[1])).lock("up"):
    print("held", flush=True)
    input()
"""


def test_a_second_command_is_refused_and_told_who_holds_the_lock(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout and holder.stdout.readline() == "held\n"
    with pytest.raises(LockHeld) as caught, State(tmp_path).lock("down"):
        pass
    assert f"`deploy up` (pid {holder.pid}" in caught.value.message
    holder.kill()
    holder.wait()
    with State(tmp_path).lock("down"):
        assert str(os.getpid()) in (tmp_path / "lock").read_text()


def test_while_another_command_is_at_work_nothing_runs_yet_and_it_is_named(tmp_path: Path) -> None:
    state = State(tmp_path)
    before = state.nothing_runs("no container")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        seen = state.nothing_runs("no container")
        holder.kill()
    after = state.nothing_runs("no container")
    assert seen.message == "nothing runs yet"
    assert seen.why.startswith(f"no container; `deploy up` (pid {holder.pid}, since ")
    assert seen.fix == "deploy status --watch, and wait"
    # Of one that was killed the note is still there.
    assert (tmp_path / "lock").read_text()
    assert [(error.message, error.why, error.fix) for error in (before, after)] == [
        ("nothing runs", "no container", "deploy up")
    ] * 2
    assert {error.exit_code for error in (before, seen, after)} == {4}


def test_a_command_does_not_wait_for_itself(tmp_path: Path) -> None:
    with State(tmp_path).lock("bake"):
        assert State(tmp_path).nothing_runs("no container").message == "nothing runs"


def test_a_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError), State(tmp_path).lock("up"):
        raise ValueError
    with State(tmp_path).lock("up"):
        pass


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a" / "stack.env"
    write(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write(file, "new \ud800")
    assert file.read_text() == "old"
    assert list(file.parent.iterdir()) == [file]


def test_of_two_files_none_is_replaced_where_one_refuses(tmp_path: Path) -> None:
    (kept := tmp_path / "kept").write_text("old")
    (refusing := tmp_path / "refusing").mkdir()
    with pytest.raises(OSError) as caught:
        write_all({tmp_path / "absent": ("new", 0o600), kept: ("new", 0o600), refusing: ("new", 0o600)})
    assert caught.value.filename == str(refusing)
    assert kept.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["kept", "refusing"]


def test_the_containers_copy_of_a_secret_is_readable_only_through_its_mount(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret alice\n")
    target = State(tmp_path).api_key
    copy_secret(tmp_path / "key", target)
    assert target.read_text() == "secret alice\n"
    assert target.stat().st_mode & 0o777 == 0o444
    assert target.parent.stat().st_mode & 0o777 == 0o700


def test_a_copy_keeps_its_time_until_the_secret_changes(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("one")
    target = State(tmp_path).api_key
    copy_secret(tmp_path / "key", target)
    os.utime(target, ns=(1, 1))
    copy_secret(tmp_path / "key", target)
    assert target.stat().st_mtime_ns == 1
    (tmp_path / "key").write_text("two")
    copy_secret(tmp_path / "key", target)
    assert target.stat().st_mtime_ns > 1


def test_keys_are_the_first_words_of_the_lines(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\n\nsk-one\n  sk-two bob\n")
    assert read_keys(tmp_path / "keys") == ["sk-one", "sk-two"]


@pytest.mark.parametrize(("text", "complaint"), [("", "no key"), ("# sk-x\n", "no key"), ("sk-a b c", "line 1")])
def test_a_key_file_that_is_not_one_is_refused_without_repeating_it(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(DeployError, match=complaint) as caught:
        read_keys(tmp_path / "key")
    assert "sk-" not in str(caught.value)


def test_a_folder_with_other_things_in_it_is_no_state_folder(tmp_path: Path) -> None:
    """`DEPLOY_STATE=.` must not make what lies there ours to remove."""
    (tmp_path / "README.md").touch()
    (tmp_path / "current").symlink_to("README.md")
    with pytest.raises(NoStateFolder, match=r"README\.md"), State(tmp_path).lock("down"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "current"]


@pytest.mark.parametrize("inside", ["", "deeper"])
def test_a_file_or_a_dangling_link_in_place_of_the_state_folder_is_named_and_left_alone(
    tmp_path: Path, inside: str
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(NoStateFolder, match="no state folder"), State(tmp_path / name / inside).lock("down"):
            pass
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_a_command_cut_off_has_left_is_still_a_state_folder(tmp_path: Path) -> None:
    for name in ("model", "docker", ".current", "models.json"):
        (tmp_path / name).touch()
    with State(tmp_path).lock("up"):
        (tmp_path / "anything").touch()
    with State(tmp_path).lock("down"):
        pass


def test_cleaning_up_leaves_what_is_not_ours_beside_the_generated_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup.probe, "docker_facts", DockerFacts)
    weights = tmp_path / "model" / "weights.safetensors"
    (tmp_path / "model" / "tiny").mkdir(parents=True)
    (tmp_path / "model" / ".tiny-half").mkdir()
    weights.touch()
    cleanup.remove_all(State(tmp_path))
    assert list((tmp_path / "model").iterdir()) == [weights]
    weights.unlink()
    cleanup.remove_all(State(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize(
    "text", ["", "null", "[" * 100_000, '{"pid": 1e999, "verb": "up", "since": "now"}', "\ufeff{}"], ids=range(5)
)
def test_whatever_stands_in_the_controllers_own_notes_it_goes_on(text: str, tmp_path: Path) -> None:
    state = State(tmp_path)
    for file in (state.journal, state.seen_models, state.engine / "process.json"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert journal.cut_off(state)
    assert not docker_engine.installed_here(state)
    model = ModelLock(file=(LockedFile(path="a", sha256="0" * 64, size=1),))
    assert [drift.path for drift in check_folder(tmp_path / "none", model, memory=state.seen_models)] == ["a"]


def test_only_folders_with_a_number_for_a_name_are_generations(tmp_path: Path) -> None:
    state = State(tmp_path)
    for name in ("2", "10", "³", "x", ".unfinished"):
        (state.generations / name).mkdir(parents=True)
    assert generations.numbers(state) == [2, 10]
    state.current.symlink_to(state.generations / "³")
    assert generations.current_number(state) is None
