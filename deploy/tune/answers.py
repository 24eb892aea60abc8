"""Are the answers still right? Greedy answers to fixed questions, held against those of the setting of before. Pure."""

from collections.abc import Sequence

ANSWER_TOKENS = 32
QUESTIONS = (
    "What carries the key value cache from prefill to decode?",
    "List the first twelve prime numbers.",
    "Translate into French: the meeting was moved to Thursday because of the rain.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in two sentences why the sky is blue.",
    # Longer than the model's window of 128 tokens, so that every kind of KV cache takes part.
    "Continue this list without a comment: "
    + ", ".join(f"{number} times {number} is {number * number}" for number in range(1, 60)),
)
"""Of several lengths and kinds; the text is ours."""


def agreement(reference: Sequence[str], found: Sequence[str]) -> float:
    """How much of the reference's answers came again: the mean share up to the first difference; 1.0 is equal.

    Raises:
        ValueError: not the same number of answers, or none.
    """
    if not reference:
        raise ValueError("no answers to compare")
    shares = [
        1.0 if one == two else _common(one, two) / max(len(one), len(two))
        for one, two in zip(reference, found, strict=True)
    ]
    return sum(shares) / len(shares)


def _common(one: str, two: str) -> int:
    """Length of the common beginning."""
    return next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
