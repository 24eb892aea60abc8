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
ENV LC_ALL=C.UTF-8 TZ=UTC PATH=/opt/venv/bin:/usr/sbin:/usr/bin

# ---- engine: every locked wheel, with bytecode. The layer is the tree itself: 11 GB are written once, never copied.
FROM rootfs AS engine
ARG SOURCE_DATE_EPOCH
# "keep" has BuildKit keep the downloaded wheels for the next build of this stage.
ARG WHEELS=discard
RUN --mount=type=bind,source=uv,target=/run/uv --mount=type=bind,source=engine-environment,target=/run/project \
    --mount=type=secret,id=ca,target=/run/ca.pem --mount=type=cache,id=deepseek-v4-flash-sm120-wheels,target=/run/wheels \
    --mount=type=tmpfs,target=/tmp \
    set -eu; umask 022; \
    export UV_PROJECT_ENVIRONMENT=/opt/venv UV_PYTHON=/usr/bin/python3 UV_PYTHON_DOWNLOADS=never UV_NO_BUILD=1 \
        UV_COMPILE_BYTECODE=1 PYC_INVALIDATION_MODE=UNCHECKED_HASH PYTHONHASHSEED=0; \
    if [ -s /run/ca.pem ]; then export SSL_CERT_FILE=/run/ca.pem; fi; \
    if [ "$WHEELS" = keep ]; then export UV_CACHE_DIR=/run/wheels UV_LINK_MODE=copy; \
    # On the same file system as the tree, so that wheels are linked into place and never copied.
    else export UV_CACHE_DIR=/opt/wheels UV_LINK_MODE=hardlink; fi; \
    cp -r /run/project /tmp/project; \
    /run/uv sync --frozen --only-group engine --no-install-project --directory /tmp/project; \
    rm -rf /opt/wheels /opt/venv/.lock /opt/venv/.gitignore; \
    # What a linker looks for when a kernel is compiled on the spot: the CUDA wheels carry neither of these names,
    # and the driver's library is only there at run time.
    mkdir -p /opt/cuda-link; \
    ln -s /opt/venv/lib/python3.11/site-packages/nvidia/cu13/lib/libcudart.so.13 /opt/cuda-link/libcudart.so; \
    gcc -shared -nostdlib -Wl,-soname,libcuda.so.1 -o /opt/cuda-link/libcuda.so -x c /dev/null; \
    find /opt -depth -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

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
    python -m compileall -q --invalidation-mode unchecked-hash \
        "$site/sm120_kernels" "$site/engine_runtime" /opt/cpu_standins; \
    find /opt -depth -newermt "@$SOURCE_DATE_EPOCH" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +

# Compilers find CUDA's wheels here. Bytecode is complete, and nobody may write more of it.
ENV CUDA_HOME=/opt/venv/lib/python3.11/site-packages/nvidia/cu13 \
    LIBRARY_PATH=/opt/cuda-link \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1
USER 65532:65532
WORKDIR /
ENTRYPOINT ["/usr/bin/tini", "--"]
ARG INPUT_HASH
LABEL org.opencontainers.image.title="deepseek-v4-flash-sm120" \
    org.opencontainers.image.description="SGLang prefill, decode and router for DeepSeek-V4-Flash on sm_120" \
    org.opencontainers.image.version="$INPUT_HASH"
