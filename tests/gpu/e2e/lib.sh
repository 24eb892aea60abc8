# Sourced by the scripts that run on the GPU machine.
export E2E_HOME=${E2E_HOME:-/tmp/gpu-e2e}
export PYTHONPATH=$E2E_HOME/site:$E2E_HOME/plug PYTHONUNBUFFERED=1
export SGLANG_JIT_CACHE_DIR=/var/cache/engine/sglang-jit
cd "$E2E_HOME"
results=${OUT:-$E2E_HOME/out}; mkdir -p "$results"
run() { python3 run.py "$@"; }
# What there is so far, after every step: a run that is cut short keeps what it had.
keep() { tar cf - ./*.json ./*.log ./*.gz 2> /dev/null | xz -1 > "$results/$1.txz"; }
# Decode as on sm_120: routes of the test's plug-in, and SGLang's own switch for the indexer.
sm120="--set E2E_ROUTES=attention --set SGLANG_OPT_USE_TILELANG_INDEXER=1"
# SGLang turns FP8 wo_a off by itself where DeepGEMM is another than it expects.
wo_a="--set SGLANG_OPT_FP8_WO_A_GEMM=1"
eager="--moe-runner-backend triton --disable-cuda-graph --mem-fraction-static 0.6"
