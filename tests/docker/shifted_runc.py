#!/usr/bin/env python3
"""Stands before runc (`DOCKER_BUILDKIT_RUNC_COMMAND`): programs of a build see the wall clock of tests/clock.c.

From the environment: SHIFTED_CLOCK, the compiled library; CLOCK_OFFSET_FILE, what it reads. Beside the library grows a
line for each container that was started so.
"""

import json
import os
import sys
from pathlib import Path

# A mount point elsewhere would stay in the layer; /dev is a tmpfs.
LIBRARY, OFFSET = "/dev/clock.so", "/dev/clock.offset"

if "--bundle" in sys.argv:
    library = Path(os.environ["SHIFTED_CLOCK"])
    path = Path(sys.argv[sys.argv.index("--bundle") + 1], "config.json")
    config = json.loads(path.read_text())
    for target, source in ((LIBRARY, str(library)), (OFFSET, os.environ["CLOCK_OFFSET_FILE"])):
        config["mounts"].append({"destination": target, "type": "bind", "source": source, "options": ["bind", "ro"]})
    config["process"]["env"] += [f"LD_PRELOAD={LIBRARY}", f"CLOCK_OFFSET_FILE={OFFSET}"]
    path.write_text(json.dumps(config))
    with library.with_suffix(".log").open("a") as log:
        log.write(" ".join(config["process"]["args"]) + "\n")
os.execvp("runc", ["runc", *sys.argv[1:]])
