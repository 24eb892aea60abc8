"""Patches as text: what stands before the changes, and the changes in as few lines as place them. Pure functions."""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher, unified_diff
from email.parser import HeaderParser
from itertools import pairwise

NOTHING = "/dev/null"


def header(patch: str) -> str:
    """What a patch says about itself: everything before its first file."""
    return re.split(r"^(?:diff |--- )", patch, maxsplit=1, flags=re.MULTILINE)[0]


def fields(patch: str) -> dict[str, str]:
    """The fields that a patch starts with: `Subject`, `Upstream`, `Switch`, `Default`."""
    found = HeaderParser().parsestr(header(patch))
    return {name: " ".join(value.split()) for name, value in found.items()}


def changes(before: Mapping[str, str | None], after: Mapping[str, str | None]) -> str:
    """Write changes as a patch with the least context that places each of them.

    Args:
        before: texts by path; None for a file that is not there.
        after: the same paths.

    Raises:
        ValueError: a text does not end with a line feed, which a patch can only say in an extra line.
    """
    return "".join(
        line
        for path in sorted(before)
        if before[path] != after[path]
        for line in _file_changes(path, before[path], after[path])
    )


def _file_changes(path: str, before: str | None, after: str | None) -> Sequence[str]:
    for text in (before, after):
        if text and not text.endswith("\n"):
            raise ValueError(f"{path} does not end with a line feed")
    old, new = ((text or "").splitlines(keepends=True) for text in (before, after))
    names = (NOTHING if before is None else f"a/{path}", NOTHING if after is None else f"b/{path}")
    lines: Sequence[str] = ()
    # From one line on: without any, `patch` has nothing but the line number to go by.
    for context in range(1, len(old) + 2):
        lines = list(unified_diff(old, new, *names, n=context))
        if all(_count(old, block) <= 1 for block in _old_blocks(lines)):
            break
    return lines


def _old_blocks(lines: Sequence[str]) -> Iterator[Sequence[str]]:
    """What each hunk expects to find."""
    starts = [place for place, line in enumerate(lines) if line.startswith("@@")] + [len(lines)]
    for start, end in pairwise(starts):
        yield [line[1:] for line in lines[start + 1 : end] if line[0] in " -"]


def _count(lines: Sequence[str], block: Sequence[str]) -> int:
    if not block:
        return 0
    return sum(lines[place : place + len(block)] == block for place in range(len(lines) - len(block) + 1))


def changed_lines(before: str, after: str) -> tuple[set[int], set[int]]:
    """Numbers of the lines that differ, counted from 1: in the text before and in the one after."""
    old, new = before.splitlines(), after.splitlines()
    gone, come = set[int](), set[int]()
    for kind, old_start, old_end, new_start, new_end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind != "equal":
            gone |= set(range(old_start + 1, old_end + 1))
            come |= set(range(new_start + 1, new_end + 1))
    return gone, come
