#!/usr/bin/env bash
# The whole acceptance on a machine with a GPU, in under eight minutes: tests marked gpu, a calibration, and planned by it
# a colocated run, and prefill and decode on one GPU. Everything ends up in one folder, with summary.txt and summary.json.
#
#   tools/gpu_check.sh [OUT_DIR]         exit status 0: all held; 1: something did not; 2: no GPU, or nothing to run it with
#
# PYTHON              the interpreter to use as it is (default: .venv, made with the CUDA extra if need be)
# PDEMU_CHECK_EXTRA   cuda12 (default) or cuda13
# PDEMU_CHECK_DEVICE  numpy: a dry run on this machine's cores, that goes the same way
# PDEMU_CHECK_CALIBRATE_S  how long to calibrate, 120
#
# Looks at the GPU and computes on it; clocks, power and modes stay as they are.
set -uo pipefail
cd "$(dirname "$0")/.."
device=${PDEMU_CHECK_DEVICE:-cuda}
extra=${PDEMU_CHECK_EXTRA:-cuda12}
calibrate_s=${PDEMU_CHECK_CALIBRATE_S:-120}
out=${1:-runs/gpu-check-$(date +%Y%m%d-%H%M%S)}
total_s=465

stop() { echo "gpu_check: $1" >&2; exit 2; }

case $device in
cuda)
    command -v nvidia-smi >/dev/null || stop "no GPU here: there is no nvidia-smi (PDEMU_CHECK_DEVICE=numpy for a dry run)"
    nvidia-smi -L 2>/dev/null | grep -q '^GPU' || stop "no GPU here: nvidia-smi -L lists none"
    ;;
numpy) ;;
*) stop "PDEMU_CHECK_DEVICE=$device: must be cuda or numpy" ;;
esac
mkdir -p "$out" 2>/dev/null || stop "$out: cannot be made; give another folder"
[ -z "$(ls -A "$out")" ] || stop "$out: is not empty; give a new folder"
out=$(cd "$out" && pwd)

child=
trap '[ -z "$child" ] || kill "$child" 2>/dev/null; wait; exit 130' INT TERM HUP

# last_line FILE...: the last line of the first file that has any; pytest says on standard output what went wrong.
last_line() {
    local file
    for file in "$@"; do
        if [ -s "$file" ]; then tail -n 1 "$file" | tr '\t' ' '; return; fi
    done
}

# step NAME SECONDS COMMAND...: run it within its time and what is left of all, its output in files, how it ended in steps.tsv.
# A background command would ignore SIGINT, by which pdemu ends.
step() {
    local name=$1 limit_s=$2 began_s=$SECONDS rc left_s=$((total_s - SECONDS))
    shift 2
    [ "$left_s" -ge "$limit_s" ] || limit_s=$left_s
    if [ "$limit_s" -lt 10 ]; then
        printf '%s\t\t0\tno time left\n' "$name" >>"$out/steps.tsv"
        return 1
    fi
    echo "gpu_check: $name (at most $limit_s s)" >&2
    env --default-signal=INT timeout --signal=INT --kill-after=10 "$limit_s" "$@" >"$out/$name.out" 2>"$out/$name.err" &
    child=$!
    wait "$child"
    rc=$?
    child=
    printf '%s\t%s\t%s\t%s\n' "$name" "$rc" "$((SECONDS - began_s))" "$(last_line "$out/$name.err" "$out/$name.out")" >>"$out/steps.tsv"
    return "$rc"
}

# The environment: an installation that fails (there may be no network) is no reason to stop if what is needed is there.
lock=requirements-$extra.lock
install() {
    [ -x .venv/bin/python ] || tools/setup.sh || return
    [ "$device" != cuda ] || .venv/bin/python -c 'import cupy' 2>/dev/null ||
        if [ -f "$lock" ]; then .venv/bin/python -m pip install --quiet --require-hashes -r "$lock"
        else .venv/bin/python -m pip install --quiet -e ".[$extra]"; fi
}
export -f install
export device extra lock
if [ -n "${PYTHON:-}" ]; then
    python=$PYTHON
else
    step environment 90 bash -c install || echo "gpu_check: installing failed, going on with what is there" >&2
    python=.venv/bin/python
    [ -x "$python" ] || python=python3
fi
needed="import msgspec, numpy, zmq, rich, typer, uvloop, pytest"
[ "$device" != cuda ] || needed="$needed; import cupy; assert cupy.cuda.is_available()"
problem=$("$python" -W ignore -c "$needed" 2>&1 | tail -n 1)
[ -z "$problem" ] || stop "$python cannot be used: $problem (see $out)"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}

[ "$device" != cuda ] || nvidia-smi >"$out/nvidia-smi.txt" 2>&1
# Collecting all tests takes longer than running these; tests/test_gpu_check.py sees to it that none is missing.
gpu_tests=(tests/live/test_backend.py tests/live/test_cuda_backend.py tests/live/test_cuda_gpu.py tests/live/test_cuda_kv.py)
if [ "$device" = cuda ]; then tests=(-m gpu "${gpu_tests[@]}"); else tests=(-m "not gpu" tests/live/test_backend.py); fi
step tests 110 "$python" -m pytest -q -rs --junitxml "$out/tests.xml" "${tests[@]}"
step calibrate $((calibrate_s + 25)) "$python" -m emulator calibrate --device "$device" --limit "${calibrate_s}s" --out "$out/calibration.toml"
on=(--device "$device")
[ ! -f "$out/calibration.toml" ] || on+=(--calibration "$out/calibration.toml")
step colocated 50 "$python" -m emulator run --deployment colocated "${on[@]}" topologies/one-gpu.toml \
    --json --out "$out/colocated"
lab=(topologies/one-gpu-shared.toml --json --out)
step simulated 25 "$python" -m emulator run --deployment 1P1D --launcher simulate "${lab[@]}" "$out/simulated"
step shared 50 "$python" -m emulator run --deployment 1P1D "${on[@]}" --allow-shared-gpu "${lab[@]}" "$out/shared"

"$python" tools/gpu_check_summary.py "$out" "$device" "$SECONDS"
