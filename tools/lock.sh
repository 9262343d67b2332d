#!/usr/bin/env bash
# Pins every dependency (and the development tools) with hashes into requirements.lock. Names no index.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/pip-compile --quiet --extra dev --strip-extras --allow-unsafe --generate-hashes --resolver=backtracking \
    --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options --no-header \
    "$@" --output-file requirements.lock pyproject.toml
