#!/bin/bash
# One server at a time's worth of checks, four servers beside each other: SGLang as it is on this GPU (off), with
# sm_120's own functions (route), with our hooks on them (on), and with both run on every call (check).
. "$(dirname "$0")/lib.sh"
run start off 31000 -- $eager --nccl-port 32000
run start route 31010 $sm120 -- $eager --nccl-port 32010
run start on 31020 $sm120 --hooks all -- $eager --nccl-port 32020
run start check 31030 $sm120 --hooks all --set SGLANG_SM120_CHECK=1 -- $eager --nccl-port 32030
timeout 170 python3 run.py wait 160 off route on check; keep single
# The first one's compilations serve the others.
timeout 120 python3 run.py generate off 31000; keep single
for server in "route 31010" "on 31020" "check 31030"; do timeout 150 python3 run.py generate $server & done; wait; keep single
run compare off route; run compare route on; run compare off on
run metrics on 31020; run metrics check 31030; keep single
run stop check
for batch in 1 16; do timeout 40 python3 run.py profile off 31000 $batch 400; timeout 40 python3 run.py profile on 31020 $batch 400; keep single; done
timeout 40 python3 run.py profile route 31010 1 400; keep single
run stop off route on
