#!/bin/sh
# Brings /opt/venv to a locked environment and compiles what is new. Runs inside the image build.
#   /tmp/environment    pyproject.toml and uv.lock
#   /tmp/wheels         wheels kept from build to build, used only if /tmp/keep_wheels is there
#   /tmp/ca.pem         certificate authorities for the package index, if the image's own will not do
set -eu
umask 022
export UV_PROJECT_ENVIRONMENT=/opt/venv UV_PYTHON=/usr/bin/python3 UV_PYTHON_DOWNLOADS=never UV_NO_BUILD=1
if [ -s /tmp/ca.pem ]; then export SSL_CERT_FILE=/tmp/ca.pem; fi
if [ -e /tmp/keep_wheels ]; then
    export UV_CACHE_DIR=/tmp/wheels UV_LINK_MODE=copy
else
    # On the file system of the tree itself: wheels are unpacked once and linked into place.
    export UV_CACHE_DIR=/opt/wheels UV_LINK_MODE=hardlink
fi
/tmp/tools/uv sync --frozen --only-group engine --no-install-project --directory /tmp/environment
rm -rf /opt/wheels /opt/venv/.lock /opt/venv/.gitignore
/opt/venv/bin/python /tmp/tools/wheel_conflicts.py /opt/venv/lib/python3.11/site-packages

# Without bytecode each process would compile all it imports. Unchecked: nothing may depend on a file's time.
# A few wheels carry templates that are not Python, hence the disregard for the exit code.
changed="-newermt @$SOURCE_DATE_EPOCH"
# shellcheck disable=SC2086 # two words
find /opt/venv/lib -name '*.py' $changed > /tmp/sources
echo "Compiling $(wc -l < /tmp/sources) files"
/opt/venv/bin/python -W ignore -m compileall -f -qq -j 0 --invalidation-mode unchecked-hash -i /tmp/sources > /dev/null || true

# shellcheck disable=SC2086
find /opt -depth $changed -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
