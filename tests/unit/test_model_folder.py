import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy.host.errors import HostError
from deploy.model.folder import require_model

DATA = b"\0" * 64


def shard(file: Path, data: bytes = DATA) -> None:
    header = json.dumps({"weight": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "tokenizer.json").write_text("{}")
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for name in names:
        shard(tmp_path / name)
    weights = {f"layer{number}": name for number, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    tmp_path.chmod(0o755)
    return tmp_path


def refusal(folder: Path) -> HostError:
    with pytest.raises(HostError) as caught:
        require_model(folder)
    return caught.value


def test_a_complete_folder_passes(folder: Path) -> None:
    require_model(folder)


def test_one_unsharded_file_passes(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    shard(folder / "model.safetensors")
    require_model(folder)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "nope") in refusal(tmp_path / "nope").message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model-00002-of-00003.safetensors"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    assert refusal(folder).why == f"{name} is missing"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(min_value=0))
def test_a_shard_cut_at_any_byte_is_named(folder: Path, cut: int) -> None:
    file = folder / "model-00003-of-00003.safetensors"
    shard(file)
    whole = file.read_bytes()
    file.write_bytes(whole[: cut % len(whole)])
    assert file.name in refusal(folder).why


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', "{"])
def test_a_broken_json_file_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    assert name in refusal(folder).why


def test_a_file_that_only_root_can_read_is_refused_with_the_cure(folder: Path) -> None:
    (folder / "tokenizer.json").chmod(0o600)
    error = refusal(folder)
    assert "tokenizer.json" in error.message
    assert error.fix == f"chmod -R o+rX {folder}"
