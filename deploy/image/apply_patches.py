"""Applies the patch series to the installed wheels. Runs inside the image build, with nothing but the standard library.

Usage: apply_patches.py PATCHES SITE_PACKAGES
"""

import py_compile
import re
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path


def series(text: str) -> list[str]:
    """Names of the patches in a series file, in order; `#` starts a comment."""
    return [name for line in text.splitlines() if (name := line.split("#", 1)[0].strip())]


def touched(patch: str) -> set[str]:
    """Files that a patch changes, adds or removes, below site-packages.

    Raises:
        ValueError: it touches none, or something outside the `sglang` package.
    """
    names = set(re.findall(r"^(?:---|\+\+\+) [ab]/([^\t\n]+)", patch, flags=re.MULTILINE))
    if not names:
        raise ValueError("touches no file")
    strays = [name for name in names if not name.startswith("sglang/") or ".." in name.split("/")]
    if strays:
        raise ValueError(f"touches files outside sglang/: {', '.join(sorted(strays))}")
    return names


def apply(patch: Path, site_packages: Path) -> set[str]:
    """Apply one patch with no fuzz, and return the files it touched.

    Raises:
        ValueError: it does not apply exactly; site_packages may be half patched then.
    """
    names = touched(patch.read_text(encoding="utf-8"))
    command = ["patch", "--strip=1", "--fuzz=0", "--forward", "--batch", "--no-backup-if-mismatch", "--reject-file=-"]
    command += [f"--directory={site_packages}", f"--input={patch.resolve()}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"does not apply:\n{done.stdout}")
    return names


def recompile(file: Path) -> None:
    """Renew the bytecode of a Python file, or remove it with the file."""
    cached = Path(cache_from_source(str(file)))
    cached.unlink(missing_ok=True)
    if file.exists():
        mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
        py_compile.compile(str(file), doraise=True, invalidation_mode=mode)


def main(patches: Path, site_packages: Path) -> int:
    names: set[str] = set()
    for name in series((patches / "series").read_text(encoding="utf-8")):
        try:
            names |= apply(patches / name, site_packages)
        except (ValueError, OSError) as error:
            sys.stderr.write(f"patch {name} {error}\n")
            return 1
        sys.stdout.write(f"applied {name}\n")
    for name in sorted(names):
        if name.endswith(".py"):
            recompile(site_packages / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
