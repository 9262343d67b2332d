#!/usr/bin/env bash
# Every test, in two stages that both always run: first those in virtual time, on all cores; then, one after the other,
# those that keep real deadlines (marks live, netns, compose, gpu). Arguments go to pytest, such as a file or -k NAME.
# Exits as the first stage that failed; a stage without any test for the arguments counts for nothing.
set -uo pipefail
cd "$(dirname "$0")/.."
trap 'exit 130' INT

no_tests=5 # pytest's exit status
status=$no_tests
for stage in "virtual --numprocesses=auto --dist=worksteal" live; do
    # shellcheck disable=SC2086 # a stage is several words
    .venv/bin/python -m pytest --stage=$stage "$@"
    ended=$?
    if [ $ended != $no_tests ] && { [ $status = 0 ] || [ $status = $no_tests ]; }; then status=$ended; fi
done
exit $status
