"""Copies what a GPU machine lacks out of an environment, without what no test here reads.

Usage: collect.py SITE_PACKAGES MIXED OUT PRESENT

MIXED holds the packages that take the place of those in SITE_PACKAGES; PRESENT names, separated by white space, what
the machine has already.
"""

import importlib.metadata
import re
import shutil
import sys
from pathlib import Path

site, mixed, out = (Path(argument) for argument in sys.argv[1:4])
present = set(Path(sys.argv[4]).read_text(encoding="utf-8").split()) - {"transformers"}
LEFT_OUT = {"uv", "pip", "jedi", "sglang-kernel"}
UNREAD = re.compile(
    r"(^|/)__pycache__/|^sglang/(multimodal_gen|test|benchmark)/|^sglang/srt/rust_extensions/_(bench|multimodal|grpc)\."
    r"|^flashinfer/data/(csrc|cutlass|cccl|spdlog)/|^tilelang/3rdparty/composable_kernel"
)

shutil.rmtree(out, ignore_errors=True)
for distribution in importlib.metadata.distributions(path=[str(site)]):
    name = re.sub(r"[._]", "-", distribution.metadata["Name"].lower())
    if name in LEFT_OUT or name in present:
        continue
    for file in distribution.files or []:
        source = Path(str(distribution.locate_file(file)))
        if str(file).startswith("..") or UNREAD.search(str(file)) or not source.is_file():
            continue
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, out / file)
shutil.copytree(mixed, out, dirs_exist_ok=True)
# One copy of the same 20 MB.
library = out / "z3/lib/libz3.so"
versions = [file for file in library.parent.glob("libz3.so.*") if not file.is_symlink()]
if library.is_file() and versions:
    library.unlink()
    library.symlink_to(versions[0].name)
