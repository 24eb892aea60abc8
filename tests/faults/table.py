"""Writes docs/faults.md from what the fault tests have seen: `make test-faults` calls it last."""

import json
import platform
from pathlib import Path
from typing import Any

from harness import RESULTS, ROOT

HEAD = """# What breaks, and what a client sees of it

Written by `make test-faults` ([tests/faults](../tests/faults)); changes here are overwritten. {machine}

A client asks twice a second and never sends a refused question again, except where it says so. *Seconds* is from the
fault until every later question was answered. *Load* is the machine's load average at that moment: above the number of
its cores other work delayed what is measured. "SGLang on CPU" is prefill, decode and router with the tiny model; the
stand-ins take the engines' place where router, gate and controller are tested.

| fault | stack | what clients saw | seconds | lost | load | when (UTC) |
|---|---|---|---|---|---|---|
"""


def row(item: dict[str, Any]) -> str:
    seconds = "always served" if item["seconds"] is None else f"{item['seconds']:.0f}"
    cells = (item["fault"], item["stack"], item["client"], seconds, item["lost"], item["load"], item["when"])
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |\n"


def main() -> None:
    rows: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())
    cores = len([line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("processor")])
    memory = int(Path("/proc/meminfo").read_text().split()[1]) // 1024**2
    machine = f"Machine: {cores} shared {platform.machine()} cores, {memory} GiB, no GPU."
    text = HEAD.format(machine=machine) + "".join(row(rows[name]) for name in sorted(rows))
    (ROOT / "docs" / "faults.md").write_text(text)


if __name__ == "__main__":
    main()
