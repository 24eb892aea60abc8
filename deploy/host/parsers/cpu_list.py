"""CPU and node lists as the kernel and nvidia-smi write them: `0-22,24-47`."""

import re

HIGHEST = 65535
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


def parse_cpu_list(text: str | None) -> list[int]:
    """The numbers of a list, sorted, each once. Parts that are no range are left out."""
    numbers: set[int] = set()
    for part in (text or "").split(",")[: HIGHEST + 1]:
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            continue
        first, last = int(found[1]), int(found[2] or found[1])
        if first <= last <= HIGHEST:
            numbers.update(range(first, last + 1))
    return sorted(numbers)


def format_cpu_list(numbers: list[int]) -> str:
    """The shortest list text of some CPU numbers: [0, 1, 2, 5] is `0-2,5`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
