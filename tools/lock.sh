#!/usr/bin/env bash
# Pins every dependency (and the development tools) with hashes into requirements.lock, and what each CUDA extra adds into
# a file of its own. Names no index.
set -euo pipefail
cd "$(dirname "$0")/.."
compile() {
    .venv/bin/pip-compile --quiet --strip-extras --allow-unsafe --generate-hashes --resolver=backtracking \
        --no-emit-index-url --no-emit-trusted-host --no-emit-find-links --no-emit-options --no-header "$@"
}
compile --extra dev "$@" --output-file requirements.lock pyproject.toml
for extra in cuda12 cuda13; do
    .venv/bin/python -c "import sys, tomllib
print(*tomllib.load(sys.stdin.buffer)['project']['optional-dependencies']['$extra'], sep='\n')" < pyproject.toml |
        compile --constraint requirements.lock "$@" --output-file "requirements-$extra.lock" -
done
