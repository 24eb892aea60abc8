#!/bin/bash
# Builds what a GPU machine without network lacks, as archives in FOLDER (about 10 minutes, 140 MB). Its steps have run
# one by one, not yet as one script.
#
#   tests/gpu/e2e/pack.sh FOLDER        needs python3.12 (or PYTHON), xz, unzip, patch and a package index
#
# The GPU machine is expected to have Python 3.12, torch 2.11 (CUDA 13), Triton 3.6, nvcc and the packages in present.txt.
# SGLang 0.5.23 is the locked one, patched with patches/; the parts compiled for torch 2.14 are replaced by builds for
# 2.11 (README.md). Archives: A and B make one server, C adds NIXL, and a registry with what the controller imports.
# `overlay.txz` is this checkout: patched files, the kernels, the plug-ins, the controller. It alone changes with the
# source: pack.sh FOLDER overlay
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); root=$(cd "$here/../../.." && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd); python=${PYTHON:-python3.12}
export PIP_DISABLE_PIP_VERSION_CHECK=1

fetch() {  # fetch FOLDER REQUIREMENT…: wheels for the GPU machine, without what they require
    local folder=$1 platforms=(); shift
    for glibc in 39 35 34 31 28 27 24 17 12 5; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
    for old in 2014 2010 1; do platforms+=(--platform "manylinux${old}_x86_64"); done
    "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        "${platforms[@]}" -d "$folder" "$@"
}

overlay() {  # patched SGLang files, the kernels with their entry point, what caches.py imports, the test's plug-in
    rm -rf "$out/overlay"; mkdir -p "$out/overlay/site"
    local name
    for name in $(sed -n 's#^+++ b/##p' "$root"/patches/*.patch | sort -u); do
        mkdir -p "$out/overlay/site/$(dirname "$name")"
        unzip -qp "$out"/wheels/sglang-0.5.23-*.whl "$name" > "$out/overlay/site/$name"
    done
    "$python" "$root/deploy/image/apply_patches.py" "$root/patches" "$out/overlay/site"
    "$python" -m pip install -q --no-deps --target "$out/overlay/site" "$root/kernels" "$root/engine"
    cp -r "$root/deploy" "$out/overlay/site/"; cp "$root/compose.yaml" "$out/overlay/"
    cp -r "$here/plug" "$out/overlay/"; cp "$here"/*.py "$here"/*.sh "$out/overlay/"
    find "$out/overlay" -name __pycache__ -prune -exec rm -rf {} +
    tar -C "$out/overlay" -c . | xz -6 > "$out/overlay.txz"
}

if [ "${2:-}" = overlay ]; then overlay; exit; fi
cd "$out"
fetch wheels sglang==0.5.23 sglang-kernel==0.4.10 flashinfer-python==0.7.2 sgl-flash-mla==1.0.0 \
    humming-kernels==0.1.12 compressed-tensors==0.18.0
fetch old sglang-kernel==0.4.5 sgl-deep-gemm==0.1.4.post1; fetch nixl nixl==1.5.1 nixl-cu13==1.5.1
fetch controller python-on-whales zstandard typer rich shellingham tomli-w python-debian
"$python" -m venv venv
venv/bin/pip install -q uv
venv/bin/uv pip install -q --python venv/bin/python -r "$here/requirements.txt"
venv/bin/uv pip install -q --no-deps --python venv/bin/python wheels/sglang-0*.whl wheels/flashinfer*.whl \
    wheels/sgl_flash_mla*.whl wheels/humming*.whl wheels/compressed*.whl
# sglang-kernel: Python of 0.4.10, libraries of 0.4.5 for sm_90.
rm -rf mixed; mkdir mixed
unzip -qo wheels/sglang_kernel-*.whl -d mixed -x '*.so'
unzip -qo old/sglang_kernel-*.whl -d mixed 'sgl_kernel/sm90/common_ops*' 'sgl_kernel/spatial_ops*' 'sgl_kernel/flashmla_ops*'
unzip -qo old/sgl_deep_gemm-*.whl -d mixed
"$python" "$here/collect.py" venv/lib/python3.12/site-packages mixed site "$here/present.txt"
large=$(cd site && echo tilelang* z3* flash_mla* sgl_flash_mla* transformers* deep_gemm* sgl_deep_gemm*)
tar --exclude=__pycache__ $(printf -- '--exclude=site/%s ' $large) -c site | xz -T0 -6 > A.txz
tar --exclude=__pycache__ -c $(printf 'site/%s ' $large) | xz -T0 -6 > B.txz
# FlashInfer's headers, for its own kernels and SGLang's that include them.
data=venv/lib/python3.12/site-packages/flashinfer/data; rm -rf headers; to=headers/site/flashinfer/data
mkdir -p $to/csrc $to/cutlass/tools/util
find $data/csrc -maxdepth 1 -type f -exec cp {} $to/csrc/ \;
cp -r $data/csrc/{mhc,sparse_mla_sm120,generated} $to/csrc/; cp -r $data/spdlog $data/cccl $to/
cp -r $data/cutlass/include $to/cutlass/; cp -r $data/cutlass/tools/util/include $to/cutlass/tools/util/
tar -C headers -c . | xz -T0 -6 > headers.txz
rm -rf transfer; mkdir -p transfer/site; unzip -qo nixl/nixl-1*.whl -d transfer/site
unzip -qo nixl/nixl_cu13*.whl -d transfer/site -x 'nixl_ep*'; rm -rf transfer/site/nixl_ep*
for wheel in controller/*.whl; do unzip -qo "$wheel" -d transfer/site; done
make -s -C "$root" .cache/programs/usr/bin/docker-registry
cp "$root/.cache/programs/usr/bin/docker-registry" transfer/
tar -C transfer -c . | xz -T0 -6 > C.txz
overlay
ls -l ./*.txz
