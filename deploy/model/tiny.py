"""A tiny Qwen3 model folder, generated: real architecture, seeded random weights, a byte-level tokenizer.

It gives a machine without GPUs something to serve that every part of SGLang takes for a normal checkpoint. The text it
writes is a chain of random words; what counts is that greedy decoding of the same prompt always gives the same chain.
"""

# tokenizers and safetensors carry no complete types.
# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PAD, BEGIN, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = {PAD: 0, BEGIN: 1, END: 2}
# Every word is one token when a space comes before it, so that text has a realistic number of tokens.
WORD_LIST = (
    "the a of and to in is are was it that this for with on as by from at be or not one two all each more most only "
    "after before between when where which while then than into over under about through during because cache key "
    "value prefill decode router request answer prompt token batch worker memory page block layer head model weight "
    "server client stream transfer network container image kernel process thread queue load time second first next "
    "last long short small large fast slow same other new old good high low open close start stop wait read write "
    "send receive compute count number word sentence question name list table line point part side place world day "
    "year water light house city river road mountain tree stone wind rain summer winter morning evening night hand "
    "eye voice story reason idea change move turn find keep give take make work"
)
WORDS = WORD_LIST.split()
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT_LENGTH = 8192
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 4, 2, 16
WEIGHT_STANDARD_DEVIATION = 0.3
# Sharpens attention: what comes next then depends on the whole text before it, and greedy text does not end in a loop
# of a few words, which would look right even if half of the KV cache were lost.
QUERY_SCALE = 3.0


def generate(folder: Path, seed: int = 0) -> Path:
    """Write the model into `folder`; nothing happens when exactly these files are there already.

    Args:
        folder: Where the checkpoint goes. It is written beside it and moved into place, so it is never half there.
        seed: Seed of the weights. The same seed gives the same bytes.

    Returns:
        `folder`.

    Raises:
        FileExistsError: `folder` exists and holds something else.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (staging / "config.json").write_text(_json(_config()))
        (staging / "generation_config.json").write_text(_json({"do_sample": False, "eos_token_id": SPECIAL[END]}))
        (staging / "tokenizer.json").write_text(_tokenizer().to_str(pretty=True) + "\n")
        (staging / "tokenizer_config.json").write_text(_json(_tokenizer_config()))
        save_file(_weights(seed), staging / "model.safetensors", {"format": "pt"})
        # The engine reads the folder as another user.
        staging.chmod(0o755)
        for path in staging.iterdir():
            path.chmod(0o644)
        if folder.exists() and not _same_files(staging, folder):
            raise FileExistsError(f"{folder} exists and is not this model: choose another folder or remove it")
        if not folder.exists():
            staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return folder


def _same_files(left: Path, right: Path) -> bool:
    if not right.is_dir():
        return False
    names = {path.name for path in left.iterdir()}
    if names != {path.name for path in right.iterdir()}:
        return False
    return all((left / name).read_bytes() == (right / name).read_bytes() for name in names)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def _vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Token → id and the BPE merges: special tokens, 256 bytes, and each word letter by letter from its space."""
    vocabulary = dict(SPECIAL)
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[byte] = len(vocabulary)
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        prefix = "Ġ"  # a space in the byte-level alphabet
        for letter in word:
            if prefix + letter not in vocabulary:
                merges.append((prefix, letter))
                vocabulary[prefix + letter] = len(vocabulary)
            prefix += letter
    return vocabulary, merges


def _tokenizer() -> Tokenizer:
    vocabulary, merges = _vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": len(_vocabulary()[0]),
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT_LENGTH,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": SPECIAL[END],
        "pad_token_id": SPECIAL[PAD],
    }


def _weights(seed: int) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    vocabulary, _ = _vocabulary()

    def matrix(rows: int, columns: int) -> NDArray[np.float32]:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(WEIGHT_STANDARD_DEVIATION)

    def ones(size: int) -> NDArray[np.float32]:
        return np.ones(size, dtype=np.float32)

    weights = {"model.embed_tokens.weight": matrix(len(vocabulary), HIDDEN), "model.norm.weight": ones(HIDDEN)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": ones(HIDDEN),
            f"{name}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{name}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{name}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{name}.self_attn.q_norm.weight": ones(HEAD_DIM) * np.float32(QUERY_SCALE),
            f"{name}.self_attn.k_norm.weight": ones(HEAD_DIM),
            f"{name}.mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            f"{name}.mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    # Only whole words and the end token can win: broken UTF-8 in the answer would hide tokens from a stream.
    head = np.zeros((len(vocabulary), HIDDEN), dtype=np.float32)
    writable = [vocabulary["Ġ" + word] for word in WORDS] + [vocabulary[END]]
    head[writable] = matrix(len(writable), HIDDEN)
    weights["lm_head.weight"] = head
    return weights
