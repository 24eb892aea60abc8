#!/bin/bash
# After single.sh: the launches of decode steps with hooks off and on.
. "$(dirname "$0")/lib.sh"
for batch in 1 16; do
    timeout 60 python3 run.py profile off 31000 $batch 400 &
    timeout 60 python3 run.py profile on 31020 $batch 400 &
    wait; run layers off $batch; run layers on $batch; keep launches
done
timeout 40 python3 run.py profile route 31010 1 400; keep launches
run stop off route on
