"""Removes files that two wheels install with different content: which of them would stay is a matter of luck.

Runs inside the image build, after the wheels are in place: `python wheel_conflicts.py SITE_PACKAGES`.
"""

import csv
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

# Nothing of the engine runs these: example programs of both NIXL wheels, and a build helper that does not belong there.
UNWANTED = frozenset(
    {
        "../../../bin/nixl_etcd_example",
        "../../../bin/nixl_example",
        "../../../bin/telemetry_reader",
        "build_backend.py",
    }
)


def claims(site_packages: Path) -> dict[str, dict[str, str]]:
    """Hash by distribution of each file that a RECORD below this folder lists, by its path relative to the folder."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for record in site_packages.glob("*.dist-info/RECORD"):
        with record.open(newline="", encoding="utf-8") as lines:
            for path, digest, *_ in csv.reader(lines):
                found[os.path.normpath(path)][record.parent.name.removesuffix(".dist-info")] = digest
    return found


def conflicts(claimed: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """The distributions that disagree about a file, by its path."""
    return {path: sorted(by) for path, by in sorted(claimed.items()) if len(set(by.values())) > 1}


def remove(site_packages: Path, paths: Iterable[str]) -> None:
    """Delete files; each may be gone already."""
    for path in paths:
        (site_packages / path).unlink(missing_ok=True)


def main() -> None:
    site_packages = Path(sys.argv[1])
    found = conflicts(claims(site_packages))
    unknown = {path: by for path, by in found.items() if path not in UNWANTED}
    if unknown:
        named = "; ".join(f"{path} by {' and '.join(by)}" for path, by in unknown.items())
        sys.exit(f"error: wheels install different files of one name: {named}\nfix: see {Path(__file__).name}")
    remove(site_packages, found)
    print(f"Removed {len(found)} files that two wheels claim")  # noqa: T201 seen in the build's log


if __name__ == "__main__":
    main()
