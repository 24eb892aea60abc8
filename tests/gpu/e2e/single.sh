#!/bin/bash
# Four servers beside each other: SGLang as it is on this GPU (off), with sm_120's own functions (route), with our hooks
# on them (on), and with both run on every call (check). Leaves off, route and on running for launches.sh.
. "$(dirname "$0")/lib.sh"
timeout 120 python3 compile.py > compile.log 2>&1 &
compiling=$!
run start off 31000 $wo_a -- $eager --nccl-port 32000
run start route 31010 $sm120 $wo_a -- $eager --nccl-port 32010
run start on 31020 $sm120 $wo_a --hooks all -- $eager --nccl-port 32020
run start check 31030 $sm120 $wo_a --hooks all --set SGLANG_SM120_CHECK=1 -- $eager --nccl-port 32030
timeout 180 python3 run.py wait 170 off route on check || { keep single; exit 1; }
wait $compiling; keep single
# The first one's compilations serve the others.
timeout 200 python3 run.py generate off 31000; keep single
generating=()
for server in "route 31010" "on 31020" "check 31030"; do
    timeout 150 python3 run.py generate $server & generating+=($!)
done
wait "${generating[@]}"; keep single
run compare off route; run compare route on; run compare off on; run compare on check
run metrics on 31020; run metrics check 31030; run stop check; keep single
