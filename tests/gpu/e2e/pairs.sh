#!/bin/bash
# Prefill and decode apart over NIXL with hooks on, decode in CUDA graphs with hooks off and on, and FP4 experts in
# sm_120's layout: torch in the place of FlashInfer's kernel (fp4-off) against ours (fp4-on).
. "$(dirname "$0")/lib.sh"
graph="--moe-runner-backend triton --mem-fraction-static 0.6 --disable-prefill-cuda-graph --cuda-graph-bs-decode 1 4"
fp4="--moe-runner-backend flashinfer_mxfp4 --disable-cuda-graph --mem-fraction-static 0.6"
apart="--disaggregation-transfer-backend nixl --disaggregation-bootstrap-port 31998"
mx="--set SGLANG_DSV4_FP4_EXPERTS=1 --set E2E_ROUTES=attention,experts --set SGLANG_OPT_USE_TILELANG_INDEXER=1"
run start p 31040 $sm120 $wo_a --hooks all -- $eager $apart --disaggregation-mode prefill --nccl-port 32040
run start d 31050 $sm120 $wo_a --hooks all -- $eager $apart --disaggregation-mode decode --nccl-port 32050
run start graph-off 31060 $wo_a -- $graph --nccl-port 32060
run start graph-on 31070 $sm120 $wo_a --hooks all --set SGLANG_OPT_USE_MULTI_STREAM_OVERLAP=0 -- $graph --nccl-port 32070
run start fp4-off 31080 $mx $wo_a -- $fp4 --nccl-port 32080
run start fp4-on 31090 $mx $wo_a --hooks MOE_FP4_SMALL_BATCH,INV_ROPE_WO_A --set SGLANG_SM120_CHECK=1 -- $fp4 --nccl-port 32090
timeout 160 python3 run.py wait 150 graph-off graph-on p d fp4-off fp4-on || keep pairs
generating=()
for server in "graph-off 31060" "graph-on 31070" "fp4-off 31080" "fp4-on 31090"; do
    timeout 150 python3 run.py generate $server & generating+=($!)
done
wait "${generating[@]}"; keep pairs
run compare off graph-off; run compare on graph-on; run compare graph-off graph-on; run compare fp4-off fp4-on
run metrics graph-on 31070; run metrics fp4-on 31090; keep pairs
# Decode apart and decode in CUDA graphs: the same kernels, the same tokens.
timeout 150 python3 run.py pd 31040 31050 graph-on 31998; run metrics d 31050; run metrics p 31040; keep pairs
for server in graph-off\ 31060 graph-on\ 31070; do timeout 40 python3 run.py profile $server 1 3000; done
run layers graph-off 1; run layers graph-on 1; keep pairs
run stop p d graph-off graph-on fp4-off fp4-on
