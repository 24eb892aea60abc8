"""Puts what the fault tests have seen into docs/faults.md, over older rows of the same: `make test-faults` ends so."""

import json
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT

TABLE = ROOT / "docs" / "faults.md"
HEAD = """# What breaks, and what a client sees of it

Written by `make test-faults` and `make soak` ([tests/faults](../tests/faults)). {machine}

A client asks twice a second and never sends a refused question again, except where it says so. *Seconds* is from the
fault until every later question was answered. *Load* is the machine's load average at that moment: above the number of
its cores other work delayed what is measured. "SGLang on CPU" is prefill, decode and router with the tiny model; the
stand-ins take the engines' place where router, gate and controller are tested.

| fault | stack | what clients saw | seconds | lost | load | when (UTC) |
|---|---|---|---|---|---|---|
"""


def cells(item: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table, as tests/faults/harness.py noted it."""
    seconds = "always served" if item["seconds"] is None else f"{item['seconds']:.0f}"
    found = (item["fault"], item["stack"], item["client"], seconds, item["lost"], item["load"], item["when"])
    return tuple(str(cell).replace("|", "/") for cell in found)


def merged(table: str, seen: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows by stack and fault, of the same fault on the same stack the one that was seen last.

    Args:
        table: docs/faults.md as it is.
    """
    rows = [tuple(line[2:-2].split(" | ")) for line in table.splitlines() if line.startswith("| ")][1:]
    last = {(row[1], row[0]): row for row in sorted((*rows, *seen), key=lambda row: row[-1])}
    return [last[key] for key in sorted(last)]


def main() -> None:
    if not RESULTS.exists():
        return
    seen: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    cores = len([line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("processor")])
    memory = int(Path("/proc/meminfo").read_text().split()[1]) // 1024**2
    machine = f"Machine of the last run: {cores} shared {platform.machine()} cores, {memory} GiB, no GPU."
    rows = merged(TABLE.read_text(), map(cells, seen.values()))
    TABLE.write_text(HEAD.format(machine=machine) + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    RESULTS.unlink()


if __name__ == "__main__":
    main()
