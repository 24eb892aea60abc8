import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deploy import model_verbs
from deploy.entry import run
from deploy.lock.model import Lock, write_lock
from deploy.model.hashing import lock_folder


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose lock has a model of two files, and a mirror of it."""
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / "config.json").write_text("{}")
    (mirror / "model.safetensors").write_bytes(bytes(100_000))
    write_lock(tmp_path, Lock(model=lock_folder(mirror, "owner/name", "a" * 40)))
    (tmp_path / "deploy.toml").write_text('[model]\npath = "model"\n')
    monkeypatch.setattr(model_verbs, "ROOT", tmp_path)
    return tmp_path


def deploy(root: Path, *arguments: str) -> Result:
    own = ("--spec", str(root / "deploy.toml"), "--state", str(root / "state"))
    return CliRunner().invoke(model_verbs.app, [*arguments, *own])


def test_a_model_is_fetched_verified_damaged_found_and_mended(root: Path) -> None:
    missing = deploy(root, "verify")
    assert missing.exit_code == 1
    assert "config.json: expected 2 bytes, found no such file" in missing.stdout
    fetched = json.loads(deploy(root, "fetch", "--from", str(root / "mirror"), "--json").stdout)
    assert fetched == {"folder": str(root / "model"), "files": 2, "size": 100_002, "notes": []}
    assert deploy(root, "verify", "--full").exit_code == 0
    (root / "model/model.safetensors").write_bytes(bytes(99_999) + b"x")
    found = json.loads(deploy(root, "verify", "--full", "--json").stdout)
    assert [drift["path"] for drift in found["drifts"]] == ["model.safetensors"]
    notes = json.loads(deploy(root, "fetch", "--from", str(root / "mirror"), "--json").stdout)["notes"]
    assert len(notes) == 1 and notes[0].startswith("model.safetensors: sha256 ")
    assert deploy(root, "verify", "--full").exit_code == 0


def test_a_lock_without_a_model_says_what_to_do(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_lock(root, Lock())
    monkeypatch.setattr("sys.argv", ["deploy", "fetch", "--spec", str(root / "deploy.toml")])
    with pytest.raises(SystemExit) as raised:
        run(model_verbs.app)
    assert raised.value.code == 1
    assert "deploy lock --update model" in capsys.readouterr().err
