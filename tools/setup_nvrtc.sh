#!/usr/bin/env bash
# Adds CuPy and CUDA's run-time compiler to .venv, so that tests can compile the CUDA kernels; they need neither GPU nor driver.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(uname -s)" = Linux ]; then
    .venv/bin/python tools/lock_subset.py --lock requirements-cuda12.lock cupy-cuda12x nvidia-cuda-nvrtc-cu12 > .venv/nvrtc.lock
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r .venv/nvrtc.lock
else
    echo "setup: the CUDA kernels are compiled on Linux alone; their tests are skipped" >&2
fi
touch .venv/.nvrtc
