#!/bin/bash
# On the GPU machine: unpacks archives into E2E_HOME (default /tmp/gpu-e2e; keys of SGLang's caches contain the path).
#
#   stage.sh ARCHIVE…        the overlay last
set -eu
home=${E2E_HOME:-/tmp/gpu-e2e}; mkdir -p "$home"
for archive in "$@"; do xz -T0 -dc "$archive" | tar x -C "$home"; done
if [ -f "$home/model.py" ]; then python3 "$home/model.py" "$home/tiny"; fi
du -sm "$home/site"
