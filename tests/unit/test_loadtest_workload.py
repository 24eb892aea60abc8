"""Requests follow from seed and index alone, and are as long as they should be."""

# tokenizers is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportAttributeAccessIssue=false
from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest import prepare, workload
from loadtest.errors import BenchError
from loadtest.workload import Length, Plan, Synthetic, Trace, Vocabulary, parse_length

WORDS = [f"w{k}" for k in range(64)]
OVERHEAD = 6


def plan(kind: workload.Workload, seed: int = 1) -> Plan:
    vocabulary = Vocabulary(words=WORDS, overhead=OVERHEAD, source="test")
    return Plan(url="http://x", model="m", workload=kind, vocabulary=vocabulary, seed=seed)


def tokens(text: str) -> int:
    """The test server's tokenizer: the anchor and each word are a token, the template has five."""
    return len(text.split()) + 5


def prompt(request: workload.Request) -> str:
    return request.messages[-1]["content"]


LENGTHS = st.one_of(
    st.integers(16, 3000).map(lambda n: Length(low=n, high=n)),
    st.tuples(st.integers(16, 100), st.integers(100, 300)).map(lambda p: Length(low=p[0], high=p[1])),
    st.just(Length(low=16, high=900, median=200, sigma=0.5)),
)


@given(LENGTHS, st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 500), st.integers(1, 4))
def test_a_prompt_has_exactly_the_tokens_that_are_asked(
    length: Length, seed: int, index: int, shared: int, groups: int
) -> None:
    kind = Synthetic(input=length, output=length, shared_prefix=shared, groups=groups)
    request = workload.synthetic_request(plan(kind, seed), kind, index)
    assert tokens(prompt(request)) == request.asked_input
    assert request.asked_input is not None and length.low <= request.asked_input <= length.high
    assert request.asked_output is not None and length.low <= request.asked_output <= length.high
    assert request == workload.synthetic_request(plan(kind, seed), kind, index)


def test_prompts_differ_by_index_and_by_seed() -> None:
    kind = Synthetic(input=parse_length("256"), output=parse_length("8"))
    prompts = {prompt(workload.synthetic_request(plan(kind, seed), kind, k)) for seed in (1, 2) for k in range(200)}
    assert len(prompts) == 400
    heads = {text.split()[1:9].__str__() for text in prompts}
    assert len(heads) == 400, "a prefix cache would find common beginnings"


def test_a_shared_prefix_is_shared_within_its_group_only() -> None:
    kind = Synthetic(input=parse_length("200"), output=parse_length("8"), shared_prefix=100, groups=3)
    prefixes: dict[str, int] = {}
    for k in range(60):
        words = prompt(workload.synthetic_request(plan(kind), kind, k)).split()
        prefixes[" ".join(words[1:101])] = prefixes.get(" ".join(words[1:101]), 0) + 1
    assert len(prefixes) == 3 and min(prefixes.values()) > 5


def test_a_conversation_contains_its_history() -> None:
    kind = Synthetic(input=parse_length("64"), output=parse_length("8"), turns=3)
    first = workload.turn_request(plan(kind), kind, 5, 0, [])
    history = [*first.messages, {"role": "assistant", "content": "answer"}]
    second = workload.turn_request(plan(kind), kind, 5, 1, history)
    assert second.messages[:2] == history and len(second.messages) == 3
    assert first.asked_input == 64 and second.asked_input is None


def test_a_trace_gives_equal_blocks_equal_text() -> None:
    lines = [
        '{"timestamp": 2000, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]}',
        '{"timestamp": 1000, "input_length": 1090, "output_length": 6, "hash_ids": [7, 8, 10]}',
    ]
    rows = workload.read_trace("\n".join(lines), "t", speed=2.0)
    assert [row.at for row in rows] == [0.0, 0.5] and [row.output for row in rows] == [6, 5]
    kind = Trace(path="t")
    a, b = (workload.trace_request(plan(kind), rows, k) for k in range(2))
    assert (tokens(prompt(a)), tokens(prompt(b))) == (1090, 1100)
    words = prompt(a).split(), prompt(b).split()
    assert words[0][1:1025] == words[1][1:1025] and words[0][1025:1080] != words[1][1025:1080]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"timestamp": 0, "input_length": 0, "output_length": 5}', "line 1"),
        ('{"timestamp": 0}', "line 1"),
        ('\n{"timestamp": 0, "input_length": 5, "output_length": 5}\nnope', "line 3"),
        ("", "no requests"),
    ],
)
def test_a_broken_trace_names_its_line(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        workload.read_trace(text, "trace.jsonl", 1.0)


def test_own_prompts_in_three_forms() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "three"}]
    text = "\n".join(['"one"', "", '{"prompt": "two"}', json.dumps({"messages": messages})])
    found = workload.read_prompts(text, "p")
    assert [prompt[-1]["content"] for prompt in found] == ["one", "two", "three"] and found[2] == messages


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("nope", "line 1"),
        ('{"text": "x"}', "line 1"),
        ('"a"\n{"messages": [{"role": "user"}]}', "line 2"),
        ("\n", "no prompts"),
    ],
)
def test_broken_prompts_name_their_line(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        workload.read_prompts(text, "p.jsonl")


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("256", 256, 256), ("8K", 8192, 8192), ("uniform:1:2k", 1, 2048), ("lognormal:100:0.5:900", 1, 900)],
)
def test_lengths_are_read(text: str, low: int, high: int) -> None:
    length = parse_length(text)
    assert (length.low, length.high) == (low, high)
    assert parse_length(str(length)) == length


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "1.5", "uniform:9:3", "uniform:1", "normal:3:4", "lognormal:0:1", "8KB"]
)
def test_wrong_lengths_say_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="allowed are"):
        parse_length(text)


def test_a_log_normal_length_has_its_median() -> None:
    rng = random.Random(1)
    drawn = sorted(parse_length("lognormal:300:0.4").draw(rng) for _ in range(4000))
    assert abs(drawn[2000] / 300 - 1) < 0.05


@given(st.floats(0.5, 50), st.floats(0, 20))
def test_arrivals_come_at_the_rate_asked(rate: float, ramp: float) -> None:
    """The time of the n-th expected arrival inverts the expected count, during the ramp and after it."""
    for units in (0.1, 1.0, 10.0, 1000.0):
        at = workload.arrival(units, rate, ramp)
        expected = rate * at * at / (2 * ramp) if at < ramp else rate * (at - ramp / 2)
        assert math.isclose(expected, units, rel_tol=1e-9)


def test_words_are_found_by_asking_the_server() -> None:
    """A tokenizer that has only some words whole; its template costs nine."""
    whole = {"the", "of", "and", "to", "in", "is", "that", "it", "for", "was"}

    def count(text: str) -> int:
        return 9 + sum(1 if word in whole or word == workload.ANCHOR else 2 for word in text.split())

    found = prepare.build_vocabulary(count, None)
    assert set(found.words) == whole and found.overhead == 10


def test_too_few_words_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(BenchError) as caught:
        prepare.build_vocabulary(lambda text: 2 * len(text), None)
    assert "--tokenizer" in caught.value.fix


def test_words_come_from_a_tokenizer_file(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    text = ["the cat and the dog sat on a mat with some other cats near one river"] * 20
    tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=400))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = prepare.tokenizer_words(tmp_path)
    assert {"the", "cat", "river"} <= set(found)
    for word in found:
        assert (
            len(tokenizer.encode(f"{workload.ANCHOR} {word} {word}").ids) - len(tokenizer.encode(workload.ANCHOR).ids)
            == 2
        )

    def other_model(text: str) -> int:
        return 3 * len(text.split())

    with pytest.raises(BenchError, match="not be exact"):
        prepare.build_vocabulary(other_model, tmp_path)


def test_a_file_that_is_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BenchError, match="cannot read the tokenizer"):
        prepare.tokenizer_words(tmp_path)
