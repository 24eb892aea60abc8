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
RUN --network=none --mount=type=bind,from=debs,target=/debs --mount=type=bind,source=rootfs.sh,target=/rootfs.sh \
    --mount=type=tmpfs,target=/tmp \
    sh /rootfs.sh

FROM scratch AS rootfs
COPY --from=rootfs-build /out/ /
ENV LC_ALL=C.UTF-8 TZ=UTC \
    CUDA_HOME=/opt/venv/lib/python3.11/site-packages/nvidia/cu13 \
    PATH=/opt/venv/bin:/opt/venv/lib/python3.11/site-packages/nvidia/cu13/bin:/usr/sbin:/usr/bin

# ---- torch, then engine: every locked wheel, with bytecode, in two layers, since PyTorch and its CUDA libraries stay
# when SGLang moves. Each layer is the tree itself: 11 GB are written once and never copied.
FROM rootfs AS torch
ARG SOURCE_DATE_EPOCH
RUN --mount=type=bind,source=uv,target=/run/uv --mount=type=bind,source=install_wheels.sh,target=/run/install_wheels.sh \
    --mount=type=bind,source=torch-environment,target=/run/environment --mount=type=tmpfs,target=/tmp \
    --mount=type=secret,id=ca,target=/run/ca.pem --mount=type=secret,id=keep_wheels,target=/run/keep_wheels \
    --mount=type=cache,id=deepseek-v4-flash-sm120-wheels,target=/run/wheels \
    sh /run/install_wheels.sh

FROM torch AS engine
ARG SOURCE_DATE_EPOCH
RUN --mount=type=bind,source=uv,target=/run/uv --mount=type=bind,source=install_wheels.sh,target=/run/install_wheels.sh \
    --mount=type=bind,source=engine-environment,target=/run/environment --mount=type=tmpfs,target=/tmp \
    --mount=type=secret,id=ca,target=/run/ca.pem --mount=type=secret,id=keep_wheels,target=/run/keep_wheels \
    --mount=type=cache,id=deepseek-v4-flash-sm120-wheels,target=/run/wheels \
    sh /run/install_wheels.sh

# ---- patched: the textual changes to SGLang
FROM engine AS patched
ARG SOURCE_DATE_EPOCH
RUN --network=none --mount=type=bind,source=patches,target=/run/patches \
    --mount=type=bind,source=apply_patches.py,target=/run/apply_patches.py --mount=type=tmpfs,target=/tmp \
    set -eu; umask 022; \
    python /run/apply_patches.py /run/patches /opt/venv/lib/python3.11/site-packages; \
    find /opt -depth -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

# ---- wheels: our own two packages
FROM rootfs AS wheels
RUN --network=none --mount=type=bind,source=uv,target=/run/uv --mount=type=bind,source=kernels,target=/run/kernels \
    --mount=type=bind,source=engine,target=/run/engine --mount=type=tmpfs,target=/tmp \
    set -eu; umask 022; \
    for package in kernels engine; do \
        cp -r "/run/$package" /tmp; \
        /run/uv build --wheel --offline --no-cache --python /usr/bin/python3 --out-dir /wheels "/tmp/$package"; \
    done

# ---- runtime: they lie on top, so that a changed kernel replaces this layer and no other
FROM patched AS runtime
ARG SOURCE_DATE_EPOCH
RUN --network=none --mount=type=bind,from=wheels,source=/wheels,target=/run/wheels \
    --mount=type=bind,source=engine/cpu_standins,target=/run/cpu_standins --mount=type=tmpfs,target=/tmp \
    set -eu; umask 022; site=/opt/venv/lib/python3.11/site-packages; \
    for wheel in /run/wheels/*.whl; do python -m zipfile --extract "$wheel" "$site"; done; \
    cp -r /run/cpu_standins /opt; \
    # Names that a linker asks for and CUDA's wheels lack; the driver's library itself is only there at run time.
    mkdir /opt/cuda-link; ln -s "$CUDA_HOME/lib/libcudart.so.13" /opt/cuda-link/libcudart.so; \
    gcc -shared -nostdlib -Wl,-soname,libcuda.so.1 -o /opt/cuda-link/libcuda.so -x c /dev/null; \
    python -m compileall -q --invalidation-mode unchecked-hash \
        "$site/sm120_kernels" "$site/engine_runtime" /opt/cpu_standins; \
    find /opt -depth -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

# nvcc looks for libraries in lib64, CUDA's wheels have lib. Bytecode is complete, and nobody may write more of it.
ENV LIBRARY_PATH=/opt/cuda-link:/opt/venv/lib/python3.11/site-packages/nvidia/cu13/lib \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /
ENTRYPOINT ["/usr/bin/tini", "--"]
ARG INPUT_HASH
ARG ENVIRONMENT_HASH
LABEL org.opencontainers.image.title="deepseek-v4-flash-sm120" \
    org.opencontainers.image.description="SGLang prefill, decode and router for DeepSeek-V4-Flash on sm_120" \
    org.opencontainers.image.version="$INPUT_HASH" \
    deepseek-v4-flash-sm120.environment="$ENVIRONMENT_HASH"
