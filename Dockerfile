# One image for every role and every machine, from locked inputs only: no base image, no package that is not in
# deploy.lock or uv.lock. `deploy build` assembles the context (deploy/image/build.py); it is not the checkout.
# There is no "# syntax=" line, because that pulls a frontend image.
#
# Every file gets the time SOURCE_DATE_EPOCH, so that the same inputs give the same bytes.
ARG SOURCE_DATE_EPOCH

# ---- bootstrap: Debian's essential packages, unpacked and no more: enough to run dpkg
FROM scratch AS bootstrap
ADD bootstrap.tar /

# ---- rootfs: the locked packages, installed by dpkg
FROM bootstrap AS rootfs-build
ARG SOURCE_DATE_EPOCH
RUN --network=none --mount=type=tmpfs,target=/tmp --mount=type=bind,source=rootfs,target=/tmp/build \
    --mount=type=bind,from=debs,target=/tmp/debs \
    sh /tmp/build/rootfs.sh

FROM scratch AS rootfs
COPY --from=rootfs-build /out/ /
# Bytecode is written by compileall and by nothing else: a program that merely starts would leave its own, with times.
ENV LC_ALL=C.UTF-8 TZ=UTC PYTHONDONTWRITEBYTECODE=1 \
    CUDA_HOME=/opt/venv/lib/python3.11/site-packages/nvidia/cu13 \
    PATH=/opt/venv/bin:/opt/venv/lib/python3.11/site-packages/nvidia/cu13/bin:/usr/sbin:/usr/bin

# From here on a step's layer is the tree itself, changed in place: nothing is copied between stages, and 11 GB are
# written once. All mounts lie in /tmp, a tmpfs, since a mount point elsewhere would leave its time in the layer.

# ---- torch, then engine: every locked wheel, with bytecode, in two layers, since PyTorch and its CUDA libraries stay
# when SGLang moves
FROM rootfs AS torch
ARG SOURCE_DATE_EPOCH
RUN --mount=type=tmpfs,target=/tmp --mount=type=bind,source=tools,target=/tmp/tools \
    --mount=type=bind,source=torch-environment,target=/tmp/environment \
    --mount=type=secret,id=ca,target=/tmp/ca.pem --mount=type=secret,id=keep_wheels,target=/tmp/keep_wheels \
    --mount=type=cache,id=deepseek-v4-flash-sm120-wheels,target=/tmp/wheels \
    sh /tmp/tools/install_wheels.sh

FROM torch AS engine
ARG SOURCE_DATE_EPOCH
RUN --mount=type=tmpfs,target=/tmp --mount=type=bind,source=tools,target=/tmp/tools \
    --mount=type=bind,source=engine-environment,target=/tmp/environment \
    --mount=type=secret,id=ca,target=/tmp/ca.pem --mount=type=secret,id=keep_wheels,target=/tmp/keep_wheels \
    --mount=type=cache,id=deepseek-v4-flash-sm120-wheels,target=/tmp/wheels \
    sh /tmp/tools/install_wheels.sh

# ---- modules: what SGLang itself would compile with nvcc at its first start, for sm_120. Below the patches, which
# touch none of its sources
FROM engine AS modules
ARG SOURCE_DATE_EPOCH
# nvcc looks for libraries in lib64, CUDA's wheels have lib.
ENV LIBRARY_PATH=/opt/cuda-link:/opt/venv/lib/python3.11/site-packages/nvidia/cu13/lib \
    HOME=/tmp
RUN --network=none --mount=type=tmpfs,target=/tmp --mount=type=bind,source=modules,target=/tmp/modules \
    set -eu; umask 022; \
    # Names that a linker asks for and CUDA's wheels lack; the driver's library itself is only there at run time.
    mkdir /opt/cuda-link; \
    for name in cudart nvrtc cublas cublasLt; do \
      test -e "$CUDA_HOME/lib/lib$name.so.13"; ln -s "$CUDA_HOME/lib/lib$name.so.13" "/opt/cuda-link/lib$name.so"; \
    done; \
    gcc -shared -nostdlib -Wl,-soname,libcuda.so.1 -o /opt/cuda-link/libcuda.so -x c /dev/null; \
    # Here FlashInfer takes modules from before it compiles them; `deploy bake modules` puts them into the engines' cache.
    site=/opt/venv/lib/python3.11/site-packages; \
    version=$(python -c 'from importlib.metadata import version; print(version("flashinfer-python"))'); \
    ln -s "/var/cache/engine/.cache/flashinfer/$version/120f/aot" "$site/flashinfer/data/aot"; \
    python -W ignore /tmp/modules/bake_modules.py /opt/baked/sglang-jit; \
    find /opt -depth -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

# ---- patched: the textual changes to SGLang
FROM modules AS patched
ARG SOURCE_DATE_EPOCH
RUN --network=none --mount=type=tmpfs,target=/tmp --mount=type=bind,source=patches,target=/tmp/patches \
    set -eu; umask 022; \
    python /tmp/patches/apply_patches.py /tmp/patches /opt/venv/lib/python3.11/site-packages; \
    find /opt -depth -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

# ---- wheels: our own two packages
FROM rootfs AS wheels
RUN --network=none --mount=type=tmpfs,target=/tmp --mount=type=bind,source=tools,target=/tmp/tools \
    --mount=type=bind,source=packages,target=/tmp/packages \
    set -eu; umask 022; \
    for package in kernels engine; do \
        cp -r "/tmp/packages/$package" /tmp; \
        /tmp/tools/uv build --wheel --offline --no-cache --python /usr/bin/python3 --out-dir /wheels "/tmp/$package"; \
    done

# ---- kernels, then runtime: they lie on top, so that a changed kernel replaces two small layers, its source and its
# share of what is compiled. Whatever Triton's keys contain is set here and holds in the running engine too.
FROM patched AS kernels
ARG SOURCE_DATE_EPOCH
ENV TRITON_DISABLE_LINE_INFO=1
RUN --network=none --mount=type=tmpfs,target=/tmp --mount=type=bind,from=wheels,source=/wheels,target=/tmp/wheels \
    set -eu; umask 022; site=/opt/venv/lib/python3.11/site-packages; \
    python -m zipfile --extract /tmp/wheels/sm120_kernels-*.whl "$site"; \
    python -m compileall -q --invalidation-mode unchecked-hash "$site/sm120_kernels"; \
    find /opt -depth -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
RUN --network=none --mount=type=tmpfs,target=/tmp \
    --mount=type=cache,id=deepseek-v4-flash-sm120-triton,target=/tmp/triton \
    python -m sm120_kernels.bake --cache /tmp/triton --share 1/5 /opt/baked/triton
RUN --network=none --mount=type=tmpfs,target=/tmp \
    --mount=type=cache,id=deepseek-v4-flash-sm120-triton,target=/tmp/triton \
    python -m sm120_kernels.bake --cache /tmp/triton --share 2/5 /opt/baked/triton
RUN --network=none --mount=type=tmpfs,target=/tmp \
    --mount=type=cache,id=deepseek-v4-flash-sm120-triton,target=/tmp/triton \
    python -m sm120_kernels.bake --cache /tmp/triton --share 3/5 /opt/baked/triton
RUN --network=none --mount=type=tmpfs,target=/tmp \
    --mount=type=cache,id=deepseek-v4-flash-sm120-triton,target=/tmp/triton \
    python -m sm120_kernels.bake --cache /tmp/triton --share 4/5 /opt/baked/triton
RUN --network=none --mount=type=tmpfs,target=/tmp \
    --mount=type=cache,id=deepseek-v4-flash-sm120-triton,target=/tmp/triton \
    python -m sm120_kernels.bake --cache /tmp/triton --share 5/5 /opt/baked/triton

FROM kernels AS runtime
ARG SOURCE_DATE_EPOCH
RUN --network=none --mount=type=tmpfs,target=/tmp --mount=type=bind,from=wheels,source=/wheels,target=/tmp/wheels \
    --mount=type=bind,source=packages/engine/cpu_standins,target=/tmp/cpu_standins \
    set -eu; umask 022; site=/opt/venv/lib/python3.11/site-packages; \
    python -m zipfile --extract /tmp/wheels/engine_runtime-*.whl "$site"; \
    cp -r /tmp/cpu_standins /opt; \
    python -m compileall -q --invalidation-mode unchecked-hash "$site/engine_runtime" /opt/cpu_standins; \
    find /opt -depth -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

ENV TRITON_CACHE_MANAGER=sm120_kernels.baked:BakedCache
USER 65532:65532
WORKDIR /
ENTRYPOINT ["/usr/bin/tini", "--"]
ARG INPUT_HASH
ARG ENVIRONMENT_HASH
LABEL org.opencontainers.image.title="deepseek-v4-flash-sm120" \
    org.opencontainers.image.description="SGLang prefill, decode and router for DeepSeek-V4-Flash on sm_120" \
    org.opencontainers.image.version="$INPUT_HASH" \
    deepseek-v4-flash-sm120.environment="$ENVIRONMENT_HASH"
