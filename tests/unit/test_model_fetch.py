import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import deploy.fetch
from deploy.errors import DeployError
from deploy.host.errors import HostError
from deploy.lock.model import ModelLock
from deploy.model.check import check_folder
from deploy.model.fetch import addresses, fetch_model
from deploy.model.hashing import lock_folder
from tests.unit.web import Fault, serve

REPO, REVISION = "owner/name", "a" * 40
SIZES = {"config.json": 300, "model-1.safetensors": 700_000, "model-2.safetensors": 900_000, "sub/a b+c.txt": 10}
FAULTS = [
    Fault("cut", bytes=0),
    Fault("cut", bytes=200),
    Fault("cut", bytes=500_000),
    Fault("status", status=500),
    Fault("status", status=429),
    Fault("slow", seconds=0.02),
]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy.fetch, "PAUSE_S", 0.001)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that serves one model as a hub does."""
    root = tmp_path_factory.mktemp("hub")
    chance = random.Random(7)
    for name, size in SIZES.items():
        path = files_of(root) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.randbytes(size))
    return root


def files_of(hub: Path) -> Path:
    return hub / REPO / "resolve" / REVISION


@pytest.fixture(scope="module")
def model(hub: Path) -> ModelLock:
    return lock_folder(files_of(hub), REPO, REVISION)


def get(hub: Path, model: ModelLock, target: Path, faults: Sequence[Fault] = ()) -> tuple[list[str], int]:
    """Fetch from a server with these faults; what was noted, and the bytes that the server sent."""
    notes: list[str] = []
    with serve(hub, faults=faults) as server:
        fetch_model(model, server.address, target, target.parent / "memory.json", note=notes.append)
        return notes, server.sent


@settings(max_examples=30)
@given(st.lists(st.sampled_from(FAULTS), max_size=4))
def test_every_file_arrives_whatever_passes_goes_wrong(
    hub: Path, model: ModelLock, tmp_path_factory: pytest.TempPathFactory, faults: list[Fault]
) -> None:
    target = tmp_path_factory.mktemp("host") / "model"
    get(hub, model, target, faults)
    assert check_folder(target, model, full=True) == []
    assert not [path for path in target.rglob("*") if path.name.startswith(".")]


def test_wrong_bytes_on_the_way_are_fetched_again_and_the_file_named(
    hub: Path, model: ModelLock, tmp_path: Path
) -> None:
    notes, _ = get(hub, model, tmp_path / "model", [Fault("wrong")])
    assert len(notes) == 1
    assert notes[0].partition(":")[0] in SIZES and "fetched again" in notes[0]
    assert check_folder(tmp_path / "model", model, full=True) == []


def test_damaged_and_cut_files_are_mended_and_named_and_only_they_are_transferred(
    hub: Path, model: ModelLock, tmp_path: Path
) -> None:
    target = tmp_path / "model"
    get(hub, model, target)
    damaged, cut = target / "model-1.safetensors", target / "model-2.safetensors"
    content = bytearray(damaged.read_bytes())
    content[350_000] ^= 1
    damaged.write_bytes(content)
    os.truncate(cut, 600_000)
    notes, sent = get(hub, model, target)
    assert sorted(note.partition(":")[0] for note in notes) == [damaged.name, cut.name]
    assert sent == SIZES[damaged.name] + SIZES[cut.name] - 600_000
    assert check_folder(target, model, full=True) == []


def test_what_is_there_is_verified_and_not_transferred(hub: Path, model: ModelLock, tmp_path: Path) -> None:
    get(hub, model, tmp_path / "model")
    assert get(hub, model, tmp_path / "model") == ([], 0)


def test_a_folder_is_a_source_like_a_hub(hub: Path, model: ModelLock, tmp_path: Path) -> None:
    target, memory = tmp_path / "model", tmp_path / "memory.json"
    (target / "sub").mkdir(parents=True)
    (target / "model-2.safetensors").write_bytes((files_of(hub) / "model-2.safetensors").read_bytes()[:1000])
    notes: list[str] = []
    fetch_model(model, str(files_of(hub)), target, memory, note=notes.append)
    assert [note.partition(":")[0] for note in notes] == ["model-2.safetensors"]
    assert check_folder(target, model, full=True) == []


def test_a_folder_with_other_bytes_or_without_a_file_is_refused_by_name(
    hub: Path, model: ModelLock, tmp_path: Path
) -> None:
    mirror = tmp_path / "mirror"
    for name in SIZES:
        (mirror / name).parent.mkdir(parents=True, exist_ok=True)
        (mirror / name).write_bytes((files_of(hub) / name).read_bytes())
    (mirror / "config.json").write_bytes(b"x" * SIZES["config.json"])
    with pytest.raises(DeployError, match=r"config\.json is not what was locked"):
        fetch_model(model, str(mirror), tmp_path / "model", tmp_path / "memory.json")
    (mirror / "config.json").unlink()
    with pytest.raises(DeployError, match=r"config\.json is not there"):
        fetch_model(model, str(mirror), tmp_path / "model", tmp_path / "memory.json")


def test_a_quick_check_after_a_fetch_finds_nothing(hub: Path, model: ModelLock, tmp_path: Path) -> None:
    target, memory = tmp_path / "model", tmp_path / "memory.json"
    get(hub, model, target)
    assert check_folder(target, model, memory=memory) == []
    (target / "model-1.safetensors").write_bytes(b"other")
    assert check_folder(target, model, memory=memory) != []
    get(hub, model, target)
    assert check_folder(target, model, memory=memory) == []


def test_fetched_files_are_readable_for_the_containers_user(hub: Path, model: ModelLock, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        get(hub, model, tmp_path / "model")
    finally:
        os.umask(before)
    paths = [tmp_path / "model", *(tmp_path / "model").rglob("*")]
    assert all(path.stat().st_mode & 0o004 for path in paths)
    assert all(path.stat().st_mode & 0o001 for path in paths if path.is_dir())


def test_a_disk_that_is_too_small_is_refused_before_anything_is_fetched(
    hub: Path, model: ModelLock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 10**9, 1000))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with serve(hub) as server, pytest.raises(HostError, match="too small for the model"):
        fetch_model(model, server.address, tmp_path / "model", tmp_path / "memory.json")
    assert server.requested == []


def test_what_is_no_source_is_refused(model: ModelLock) -> None:
    with pytest.raises(DeployError, match="is no source of a model"):
        addresses(model, "/no/such/folder")
    with pytest.raises(DeployError, match="comes from no hub"):
        addresses(ModelLock(file=model.file), "https://hub.example")
    assert addresses(model, "https://hub.example/")("sub/a b+c.txt") == (
        f"https://hub.example/{REPO}/resolve/{REVISION}/sub/a%20b%2Bc.txt"
    )
