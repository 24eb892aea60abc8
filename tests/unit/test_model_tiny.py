import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from deploy.model import tiny


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.generate(tmp_path_factory.mktemp("models") / "tiny")


def test_the_same_seed_gives_the_same_bytes(model: Path, tmp_path: Path) -> None:
    assert contents(tiny.generate(tmp_path / "again")) == contents(model)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(model: Path, tmp_path: Path) -> None:
    first, other = contents(model), contents(tiny.generate(tmp_path / "other", seed=1))
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}


def test_generating_over_the_same_model_changes_nothing(model: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in model.iterdir()}
    assert tiny.generate(model) == model
    assert {path.name: path.stat().st_mtime_ns for path in model.iterdir()} == before
    assert [path.name for path in model.parent.iterdir()] == [model.name]


@pytest.mark.parametrize("content", ["", "{}"])
def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, content: str) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(content)
    with pytest.raises(FileExistsError, match="choose another folder"):
        tiny.generate(folder)
    assert contents(folder) == {"config.json": content.encode()}
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_every_tensor_has_the_shape_that_the_configuration_says(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    weights: Any = safe_open(model / "model.safetensors", framework="numpy")
    shapes = {name: tuple(weights.get_slice(name).get_shape()) for name in weights.offset_keys()}
    types = {weights.get_slice(name).get_dtype() for name in weights.offset_keys()}
    hidden, heads, kv, size = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    assert types == {"F32"}
    assert shapes["lm_head.weight"] == shapes["model.embed_tokens.weight"] == (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        attention = f"model.layers.{layer}.self_attn"
        assert shapes[f"{attention}.q_proj.weight"] == (heads * size, hidden)
        assert shapes[f"{attention}.k_proj.weight"] == shapes[f"{attention}.v_proj.weight"] == (kv * size, hidden)
        assert shapes[f"{attention}.o_proj.weight"] == (hidden, heads * size)


@pytest.mark.parametrize("text", ["hello", " the router sends\n", "héllo — 日本語 🙂", "\x00\x7f"])
def test_any_text_survives_the_tokenizer(model: Path, text: str) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_word_is_one_token_after_a_space(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert len(tokenizer.encode(" " + " ".join(tiny.WORDS)).ids) == len(tiny.WORDS)


def test_the_special_tokens_have_the_numbers_that_the_configuration_names(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text())
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]
    assert tokenizer.token_to_id("<|endoftext|>") == config["pad_token_id"]
    assert tokenizer.get_vocab_size() == config["vocab_size"]
