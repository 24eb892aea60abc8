"""Before the load: which model, and which words are one token each in its vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from loadtest.api import Api
from loadtest.errors import BenchError
from loadtest.plain import mapping, sequence
from loadtest.sse import Endpoint
from loadtest.workload import ANCHOR, Vocabulary

MAX_WORDS = 4096
MIN_WORDS = 8
PROBES_AT_ONCE = 8

# Frequent English words and single letters: what a tokenizer most likely has as one token.
COMMON_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "for",
    "was",
    "on",
    "are",
    "as",
    "with",
    "they",
    "at",
    "be",
    "this",
    "have",
    "from",
    "or",
    "one",
    "had",
    "by",
    "but",
    "not",
    "what",
    "all",
    "were",
    "we",
    "when",
    "your",
    "can",
    "said",
    "there",
    "use",
    "an",
    "each",
    "which",
    "she",
    "do",
    "how",
    "their",
    "if",
    "will",
    "up",
    "other",
    "about",
    "out",
    "many",
    "then",
    "them",
    "these",
    "so",
    "some",
    "her",
    "would",
    "make",
    "like",
    "him",
    "into",
    "time",
    "has",
    "look",
    "two",
    "more",
    "go",
    "see",
    "no",
    "way",
    "could",
    "people",
    "my",
    "than",
    "first",
    "been",
    "call",
    "who",
    "its",
    "now",
    "find",
    "long",
    "down",
    "day",
    "did",
    "get",
    "come",
    "made",
    "may",
    "part",
    "a",
    "b",
    "c",
    "d",
    "e",
    "f",
    "g",
    "h",
    "i",
    "j",
    "k",
    "l",
    "m",
    "n",
    "o",
    "p",
    "q",
    "r",
    "s",
    "t",
    "u",
    "v",
    "w",
    "x",
    "y",
    "z",
]


def choose_model(api: Api, wanted: str | None) -> str:
    """The model to ask for: the wanted one if the server has it, else its only one. Raises BenchError."""
    served = [str(mapping(entry).get("id")) for entry in sequence(api.get_json("/v1/models").get("data"))]
    if not served:
        raise BenchError(f"{api.url} serves no model", "/v1/models is empty", "wait until it is ready (deploy status)")
    if wanted is None:
        if len(served) > 1:
            raise BenchError("the server has several models", ", ".join(served), "choose one with --model NAME")
        return served[0]
    if wanted not in served:
        raise BenchError(f"the server has no model {wanted!r}", f"it has {', '.join(served)}", "--model NAME")
    return wanted


def count_prompt(api: Api, endpoint: Endpoint, model: str) -> Callable[[str], int]:
    """A function that asks the server how many prompt tokens a text is, template included: one request, one token."""

    def count(text: str) -> int:
        if endpoint == "generate":
            sampling = {"max_new_tokens": 1, "temperature": 0}
            answer = api.post_json("/generate", {"text": text, "sampling_params": sampling})
            found = mapping(answer.get("meta_info")).get("prompt_tokens")
        else:
            body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
            answer = api.post_json("/v1/chat/completions", body)
            found = mapping(answer.get("usage")).get("prompt_tokens")
        if not isinstance(found, int) or found < 1:
            raise BenchError("the server does not report prompt tokens", "its answer has no usage", "")
        return found

    return count


def tokenizer_words(path: Path) -> list[str]:
    """Words of one token after a space, from a `tokenizer.json` or the folder it is in. Raises BenchError."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:
        raise BenchError(
            f"cannot read the tokenizer {file}", str(error), "--tokenizer takes a tokenizer.json"
        ) from None
    texts = (tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size()))
    candidates = sorted({text.strip() for text in texts if text.strip().isascii() and text.strip().isalpha()})
    base = len(tokenizer.encode(ANCHOR, add_special_tokens=False).ids)
    encoded = tokenizer.encode_batch([f"{ANCHOR} {word} {word}" for word in candidates], add_special_tokens=False)
    single = [word for word, result in zip(candidates, encoded, strict=True) if len(result.ids) == base + 2]
    step = max(1, len(single) // MAX_WORDS)
    return single[::step][:MAX_WORDS]


def probed_words(count: Callable[[str], int], candidates: Sequence[str] = COMMON_WORDS) -> list[str]:
    """Those candidates that the server itself counts as one token each."""
    base = count(ANCHOR)
    with ThreadPoolExecutor(PROBES_AT_ONCE) as pool:
        counts = pool.map(count, [" ".join([ANCHOR, *[word] * 8]) for word in candidates])
        return [word for word, found in zip(candidates, counts, strict=True) if found == base + 8]


def build_vocabulary(count: Callable[[str], int], tokenizer: Path | None) -> Vocabulary:
    """Words from the tokenizer file, or probed from the server, and the template's tokens, checked by the server.

    Raises BenchError when lengths would not come out exact.
    """
    if tokenizer is not None:
        words, source = tokenizer_words(tokenizer), f"tokenizer {tokenizer.name}"
    else:
        words, source = probed_words(count), "probed from the server"
    if len(words) < MIN_WORDS:
        raise BenchError(
            f"only {len(words)} words of one token found ({source})",
            "prompts of an exact length cannot be made from so few",
            "name the served model's tokenizer: --tokenizer FOLDER, or use your own prompts: --prompts FILE",
        )
    overhead = check(count, words)
    return Vocabulary(words=words, overhead=overhead, source=source)


def check(count: Callable[[str], int], words: Sequence[str]) -> int:
    """The template's tokens; raises BenchError when the server's count is not linear in the words."""
    lengths = (min(16, len(words)), 64)
    texts = [" ".join([ANCHOR, *(words[k * 7919 % len(words)] for k in range(length))]) for length in lengths]
    short, long = (count(text) - length for text, length in zip(texts, lengths, strict=True))
    if short != long:
        raise BenchError(
            "prompt lengths would not be exact",
            f"the server counts {short} tokens beside {lengths[0]} words, but {long} beside {lengths[1]}",
            "--tokenizer must be the served model's own",
        )
    return short


def read_key(path: Path | None) -> str | None:
    """The API key in a file. Raises BenchError."""
    if path is None:
        return None
    try:
        key = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise BenchError(f"cannot read the API key file {path}", error.strerror or str(error), "") from None
    if not key or "\n" in key:
        raise BenchError(f"{path} does not hold an API key", "expected one line", "")
    return key
