#!/usr/bin/env bash
# Makes .venv with the pinned dependencies and this package in it. Needs Python 3.11 or newer; PYTHON chooses one.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "setup: $python is $("$python" -V 2>&1); Python 3.11 or newer is needed (PYTHON=... chooses another)" >&2; exit 2; }

make_venv() { rm -rf .venv && "$python" -m venv .venv >/dev/null 2>&1 && .venv/bin/python -m pip --version >/dev/null 2>&1; }
if ! make_venv; then
    # Debian keeps venv's pip in a package of its own.
    package="python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        echo "setup: installing $package" >&2
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >/dev/null
        make_venv || { echo "setup: $python -m venv does not work even with $package" >&2; exit 2; }
    else
        echo "setup: $python -m venv does not work; install the package $package" >&2
        exit 2
    fi
fi

.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
touch .venv/.ready
