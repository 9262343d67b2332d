#!/usr/bin/env bash
# Every test, in three stages that all always run: first those in virtual time, on all cores; then those with processes
# and sockets that wait for what comes about (mark live), on up to four cores, a file's one after the other; last, one by
# one, those that judge times or use what the machine has but once (marks alone, netns, compose, gpu). Arguments go to
# pytest, such as a file or -k NAME.
# Exits as the first stage that failed; a stage without any test for the arguments counts for nothing.
set -uo pipefail
cd "$(dirname "$0")/.."
trap 'exit 130' INT
unset PYTHONDONTWRITEBYTECODE # else every process of every test compiles the package anew

no_tests=5 # pytest's exit status
status=$no_tests
for stage in "virtual --numprocesses=auto --dist=worksteal" "live --numprocesses=auto --maxprocesses=4 --dist=loadfile" alone; do
    # shellcheck disable=SC2086 # a stage is several words
    .venv/bin/python -m pytest --stage=$stage "$@"
    ended=$?
    if [ $ended != $no_tests ] && { [ $status = 0 ] || [ $status = $no_tests ]; }; then status=$ended; fi
done
exit $status
