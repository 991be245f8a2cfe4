#!/usr/bin/env bash
# On a machine with a GPU: correctness first, then the numbers. Eight minutes; the results go to
# $OUT (default bench/results). Installs nothing: python must have torch, triton, pytest,
# hypothesis; peers are measured where they are installed.
set -uo pipefail
cd "$(dirname "$0")/.."
# Not the root itself: there the folder kernels/ would hide the Hugging Face package of that name.
lib=$(mktemp -d)
trap 'rm -rf "$lib"' EXIT
ln -s "$PWD/fusedce" "$lib/fusedce"
export PYTHONPATH="$lib${PYTHONPATH:+:$PYTHONPATH}"
OUT=${OUT:-bench/results}
mkdir -p "$OUT"
JSON=$OUT/loss-cuda.json
timeout 150 pytest -q -m gpu -p no:cacheprovider --import-mode=importlib tests/test_one_pass.py 2>&1 | tee "$OUT/pytest-gpu.txt" | tail -n 40
correct=${PIPESTATUS[0]}
timeout 120 python bench/loss.py --device cuda --suite forward --rounds 3 --timeout 60 --out "$JSON"
timeout 180 python bench/loss.py --device cuda --suite time frozen masked accuracy --rounds 3 --timeout 60 --out "$JSON"
timeout 120 python bench/loss.py --device cuda --suite budget scaling --rounds 2 --timeout 60 --out "$JSON"
python bench/report.py "$JSON" --plots "$OUT"
exit "$correct"
