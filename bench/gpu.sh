#!/usr/bin/env bash
# Run all measurements on a GPU in steps of at most eight minutes: correctness first, the README's
# table and picture last.
#
#     bench/gpu.sh list            # the steps, what each does, its limit in seconds
#     bench/gpu.sh STEP ...        # some of them
#     bench/gpu.sh least           # those of a rented half hour: their limits sum to 28 minutes
#     bench/gpu.sh                 # all, in order; goes on after a failure, status 1 if there was one
#     bench/gpu.sh --dry [STEP]    # on any machine: tiny problems, peers stubbed
#
# Results go to $OUT (default bench/results) after every burst of calls; a step that is run again
# measures only the missing rows. On a machine that starts empty, EARLIER=FOLDER copies the JSON of an
# earlier run to $OUT first, where $OUT has none of that name. A step's own clock stops it before
# the limit does, which interrupts and kills late; LIMIT=SECONDS sets another one.
# Needs of python3 (or $PYTHON): torch, triton, tabulate; for the steps of those names pytest with
# pytest-timeout, pytest-xdist and hypothesis, transformers and tokenizers, matplotlib.
#
# Peers are measured where they are installed. Where there is no network, carry their wheels: here
#     pip download --no-deps --only-binary=:all: -d wheels liger-kernel cut-cross-entropy \
#         quack-kernels nvidia-cutlass-dsl ... (see Requires-Dist of each)
# and there WHEELS=wheels bench/gpu.sh peers, which unpacks them into $SITE for the other steps.
set -uo pipefail
cd "$(dirname "$0")/.."

dry=
if [[ ${1:-} == --dry ]]; then dry=1; shift; fi
PYTHON=${PYTHON:-python3}
OUT=${OUT:-bench/results}
SITE=${SITE:-${TMPDIR:-/tmp}/fusedce-peers}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
if [[ -n ${EARLIER:-} ]]; then
    cp --no-clobber "$EARLIER"/*.json "$OUT"/ || exit 2
fi
# Not the root itself: there the folder kernels/ would hide the Hugging Face package of that name.
lib=$(mktemp -d)
trap 'rm -rf "$lib"' EXIT
ln -s "$PWD/fusedce" "$lib/fusedce"
if [[ $dry ]]; then
    device=cpu tag=cpu workers=0
    stubs=$PWD/tests/bench/stubs
    export OMP_NUM_THREADS=1 TRITON_INTERPRET=1 PATH="$stubs/bin:$PATH" PYTHONPATH="$lib:$stubs${PYTHONPATH:+:$PYTHONPATH}"
else
    device=${DEVICE:-cuda} tag=${DEVICE:-cuda} workers=8
    export PYTHONPATH="$lib:$SITE${PYTHONPATH:+:$PYTHONPATH}"
fi

STEPS=(
    "peers         60  unpack the wheels of \$WHEELS, say which peers are there"
    "correct       120 tests of the device"
    "robust        200 100 runs bitwise, CUDA graph, second stream, memory against the plan"
    "variants      300 one GEMM against products and kernels, the forward kernel's blocks"
    "time          470 forward + backward and peak memory: every implementation, every shape"
    "forward       400 forward alone"
    "details       470 ignored labels, memory budgets"
    "options       470 what options and divergences cost"
    "head          300 a whole step of a model with the head replaced"
    "accumulation  470 SmolLM-135M's configuration in splits, a regime or two each time it is run"
    "memcheck      470 compute-sanitizer, bad accesses"
    "racecheck     470 compute-sanitizer, races"
    "report        60  tables and pictures"
)
LEAST=(peers correct robust variants time forward report)

limit() {  # SECONDS COMMAND ...: interrupted first, so that Python leaves what it has in order
    local seconds=$1
    shift
    timeout --signal=INT --kill-after=20 "$seconds" "$@"
}

loss() {  # SUITE ...
    local some=()
    # A dry run sees every adapter through once, and every suite's first problem.
    [[ $dry ]] && some=(--dry --quick --rounds "${ROUNDS:-1}" --calls 1)
    [[ $dry && $1 != time && $1 != ways ]] && some+=(--only fused_ce)
    limit "$seconds" "$PYTHON" bench/loss.py --device "$device" --suite "$@" --resume \
        --seconds $((seconds > 90 ? seconds - 60 : 30)) --timeout 120 \
        --out "$OUT/loss-$tag.json" "${some[@]}"
}

sanitizer() {  # TOOL
    if ! command -v compute-sanitizer >/dev/null; then
        echo "compute-sanitizer is not installed"
        return 0
    fi
    limit "$seconds" compute-sanitizer --tool "$1" --error-exitcode 9 "$PYTHON" bench/robust.py \
        --device "$device" --small --runs 1 --check repeat --out "$OUT/$1-$tag.json" \
        2>&1 | tee "$OUT/$1-$tag.txt" | tail -n 30
}

step_peers() {
    if [[ -n ${WHEELS:-} ]]; then
        "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$SITE" \
            "$WHEELS"/*.whl || return 1
    fi
    "$PYTHON" -c "
from importlib.util import find_spec
for name in ('liger_kernel', 'cut_cross_entropy', 'quack', 'cutlass'):
    print(f'{name}: {\"here\" if find_spec(name) else \"not installed\"}')"
}
step_correct() {
    # Not the root on sys.path, see above (-P needs Python 3.11); every result is on disk as soon as
    # it is known.
    local found
    mapfile -t found < <(grep -rlE 'mark\.gpu' tests --include='test_*.py')
    limit "$seconds" "$PYTHON" -c 'import sys; del sys.path[0]; import pytest; sys.exit(pytest.main())' \
        -m gpu -v -n "$workers" -p no:cacheprovider \
        "${found[@]}" 2>&1 | tee "$OUT/pytest-$tag.txt" | grep -vE ' (PASSED|SKIPPED) ' | tail -n 60
    [[ ${PIPESTATUS[0]} == 0 ]]
}
step_robust() {
    local some=(--device "$device")
    [[ $dry ]] && some+=(--small)
    limit "$seconds" "$PYTHON" bench/robust.py "${some[@]}" --out "$OUT/robust-$tag.json"
}
step_variants() { loss ways blocks; }
step_time() { loss time; }
step_forward() { loss forward; }
step_details() { loss masked budget; }
step_options() { loss options divergences; }
step_head() {
    # Its only sizes are those of the README, which a dry run has no time for.
    local some=(--device "$device" --dtype bfloat16)
    [[ $dry ]] && some=(--help)
    limit "$seconds" "$PYTHON" bench/head.py "${some[@]}"
}
step_accumulation() {
    local some=(--steps 10)
    [[ $dry ]] && some=(--dry --steps 1)
    limit "$seconds" "$PYTHON" bench/accumulation.py --device "$device" --resume \
        --seconds $((seconds / 2)) --out "$OUT/accumulation-$tag.json" "${some[@]}"
}
step_memcheck() { sanitizer memcheck; }
step_racecheck() { sanitizer racecheck; }
step_report() {  # needs no GPU: the results alone
    local json=$OUT/loss-$tag.json gaps=$OUT/accumulation-$tag.json
    local some=(--plots docs --readme docs/benchmarks.md)
    [[ $dry ]] && some=(--plots "$OUT")
    [[ -f $gaps ]] || gaps=bench/results/accumulation-cpu.json
    "$PYTHON" bench/report.py "$json" --overview "$gaps" "${some[@]}" &&
        "$PYTHON" bench/report.py "$json"
}

if [[ ${1:-} == list ]]; then
    printf '%s\n' "${STEPS[@]}"
    exit 0
fi
known=()
for step in "${STEPS[@]}"; do known+=("${step%% *}"); done
chosen=("$@")
(($#)) || chosen=("${known[@]}")
[[ ${1:-} == least ]] && chosen=("${LEAST[@]}" "${@:2}")
for name in "${chosen[@]}"; do
    if [[ " ${known[*]} " != *" $name "* ]]; then
        echo "no step '$name': one of ${known[*]}" >&2
        exit 2
    fi
done
failed=()
for name in "${chosen[@]}"; do
    for step in "${STEPS[@]}"; do
        read -r it seconds what <<<"$step"
        [[ $it == "$name" ]] && break
    done
    seconds=${LIMIT:-$seconds}
    echo "== $name: $what"
    begin=$SECONDS
    "step_$name" || failed+=("$name")
    echo "== $name: $((SECONDS - begin)) s"
done
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}"
    exit 1
fi
