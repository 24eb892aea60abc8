#!/bin/bash
# On two GPUs, one step a call, so that a machine which is handed out for minutes can be used step by step:
#
#   two.sh prepare    bakes our kernels for this GPU and compiles SGLang's modules, in the background (needs A, headers)
#   two.sh start      servers, and the prompts to each: SGLang's sm_90 path, our hooks, both on every call, and two ranks
#                     with and without hooks (needs B)
#   two.sh single     answers, differences, counts and launches of one rank, batch 1 and 16
#   two.sh ranks      the same answers of two ranks
#   two.sh start-apart, apart      prefill on one GPU, decode on the other, over NIXL (needs C)
#   two.sh bake       the cache into a registry and back into an empty folder; what a start on it compiles (needs C)
. "$(dirname "$0")/lib.sh"
apart="--disaggregation-transfer-backend nixl --disaggregation-bootstrap-port 31998"
# Two ranks over NCCL alone: custom and fused all-reduces may use NVLink multicast.
two="--tp-size 2 --disable-custom-all-reduce --enforce-disable-flashinfer-allreduce-fusion"
# Other servers share these GPUs.
export SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0
# The compressors go along where they are not on streams of their own.
hooked="$sm120 $wo_a --hooks all --set SGLANG_OPT_USE_MULTI_STREAM_OVERLAP=0"

at() { echo "== $(date +%T) $*"; }

begin() {  # begin SERVER PORT OPTION…: start it, and ask as soon as it is up, in the background
    local name=$1 port=$2; shift 2
    run start "$name" "$port" "$@" --nccl-port $((port + 1000))
    setsid nohup bash -c "python3 run.py wait 150 $name && timeout 280 python3 run.py generate $name $port" \
        > "$name.asked" 2>&1 < /dev/null &
}

answered() {  # answered SECONDS SERVER…
    local deadline=$(($(date +%s) + $1)) name; shift
    for name; do
        until [ -f "generate-$name.json" ] || [ "$(date +%s)" -gt $deadline ]; do sleep 1; done
        cat "$name.asked"
    done
    at answered
}

case $1 in
prepare)
    mkdir -p "$SGLANG_JIT_CACHE_DIR"
    setsid nohup python3 compile.py > compile.log 2>&1 < /dev/null &
    TRITON_DISABLE_LINE_INFO=1 CUDA_VISIBLE_DEVICES='' \
        setsid nohup python3 -W ignore -m sm120_kernels.bake baked --capability 90 --jobs 16 > bake.log 2>&1 < /dev/null &
    nvidia-smi --query-gpu=index,name,driver_version --format=csv,noheader; nvidia-smi topo -m ;;
start)
    run mark
    begin off 31000 $wo_a -- $eager --base-gpu-id 1
    begin on 31020 $hooked -- $eager
    begin check 31030 $hooked --set SGLANG_SM120_CHECK=1 -- $eager
    begin two-on 31100 $hooked -- $eager $two
    begin two-off 31110 $wo_a -- $eager $two ;;
start-apart)
    run start p 31040 $hooked -- $eager $apart --disaggregation-mode prefill --nccl-port 32040
    run start d 31050 $hooked -- $eager $apart --disaggregation-mode decode --nccl-port 32050 --base-gpu-id 1 ;;
single)
    answered "${2:-200}" off on check; keep single
    run compare off on; run compare on check; run metrics on 31020; run metrics check 31030; run stop check; keep single
    for batch in 1 16; do
        at "profile $batch"; timeout 60 python3 run.py profile off 31000 $batch 400 &
        timeout 60 python3 run.py profile on 31020 $batch 400; wait
        run layers off $batch; run layers on $batch; keep single
    done
    run compiled single; cat bake.log; keep single ;;
ranks)
    answered "${2:-100}" two-on two-off; keep ranks
    run compare two-off two-on; run compare off two-off; run compare on two-on; run metrics two-on 31100
    run stop two-on two-off; keep ranks ;;
apart)
    at wait; timeout 100 python3 run.py wait 90 p d || keep apart
    at pd; timeout 150 python3 run.py pd 31040 31050 on 31998; run metrics d 31050; run metrics p 31040
    grep -h -A14 'remote memory write' p.log | head -40; nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv
    run stop p d; keep apart ;;
bake)
    run compiled all
    at bake; python3 caches.py bake; run stop off on two-on two-off p d 2> /dev/null; sleep 2
    at restore; python3 caches.py restore
    run mark
    begin again 31200 $hooked -- $eager
    begin again-off 31210 $wo_a -- $eager --base-gpu-id 1
    at wait; timeout 100 python3 run.py wait 90 again again-off || keep bake
    run compiled again-start; answered 100 again again-off
    run compiled again; run compare on again; run compare off again-off
    run stop again again-off; keep bake ;;
esac
at done
