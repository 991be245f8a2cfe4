"""Time, memory and accuracy of the loss, against its peers and the bare GEMMs.

    python bench/loss.py                               # all: bench/results/loss-cpu.json
    python bench/loss.py --suite time memory --shape 1024,576,49152   # any size, on this machine
    python bench/loss.py --suite time --shape 8192,4096,128256 --device cuda
    python bench/loss.py --suite eager --rounds 7      # over eager: bench/results/eager-cpu.json
    python bench/report.py bench/results/loss-cpu.json # tables and plots from the JSON

Calls take turns in one process, so that a drifting machine favours none, in processor time of one
thread (`--threads` above one: wall time, which needs a quiet machine). Errors are relative, of
gradients in the norm, against float64. The floor is the bare products on the valid rows in the same
dtype. The JSON is written after every problem; --resume leaves out those it holds for this code.
(`bench/gpu.py` measures what decides about the kernels.)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from lib.engine import failure, measure, median
from lib.losses import FLOOR
from lib.peaks import device_peak, peak_extra_bytes
from lib.problems import SUITES, Spec, errors, flops, gradient_bytes, make_call, problems, tiny
from lib.results import FOLDER, Results, device_name, problem
from lib.tables import mebibytes, milliseconds

_WITH_MEMORY = ("memory", "budget")  # a peak costs a process


def measured(suite: str, spec: Spec, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """A row for each implementation, the bare products first where times are measured."""
    timed = suite != "memory"
    key = {"suite": suite, **spec._asdict(), "flops": flops(spec)}
    rows = {name: {"name": name, **key} for name in ([FLOOR, *names] if timed else names)}
    calls = {}
    for name, row in rows.items():
        try:
            row["errors"] = errors(name, spec)
            calls[name] = make_call(name, spec)
            if suite in _WITH_MEMORY:
                row["extra_peak_bytes"] = _peak(name, calls[name], spec) - gradient_bytes(spec)
        except Exception as error:  # whatever a peer raises is its row
            calls.pop(name, None)
            row["failed"] = failure(error)
    if timed:
        burst = 1 if spec.device == "cpu" else 10
        for name, found in measure(calls, spec.device, rounds=rounds, burst=burst).items():
            rows[name] |= found
    return list(rows.values())


def _peak(name: str, call: Any, spec: Spec) -> int:
    if spec.device == "cpu":
        return peak_extra_bytes("lib.problems:make_call", {"name": name, "spec": list(spec)})
    return device_peak(call, spec.device)


def said(row: dict[str, Any]) -> str:
    """A row's figures in one line."""
    ms, mib = milliseconds(median(row)), mebibytes(row.get("extra_peak_bytes"))
    words = [row.get("failed", ""), ms and f"{ms:>8} ms", mib and f"{mib:>6} MiB"]
    return " ".join(word for word in words if word) or "checked"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog="suites: " + "; ".join(f"{name}: {what}" for name, what in SUITES.items()),
    )
    parser.add_argument("--suite", nargs="+", choices=list(SUITES), default=list(SUITES))
    parser.add_argument("--shape", nargs="+", default=[], help="N,H,V in place of a suite's own")
    parser.add_argument("--device", default="cpu", help="of torch (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, help="default 1")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default 3)")
    parser.add_argument("--resume", action="store_true", help="leave out what --out holds already")
    parser.add_argument("--dry", action="store_true", help="the suites at tiny sizes")
    parser.add_argument("--out", type=Path, help="JSON to write, added to problem by problem")
    args = parser.parse_args()
    shapes: Any = [tuple(map(int, shape.split(","))) for shape in args.shape]
    torch.set_num_threads(args.threads)
    # The table over eager has a file of its own: it may come from another machine.
    kind = "eager" if args.suite == ["eager"] else "loss"
    results = Results(args.out or FOLDER / f"{kind}-{args.device}.json", args.device)
    print(device_name(args.device), flush=True)
    for suite in args.suite:
        for spec, names in problems(suite, shapes, args.device):
            if args.dry:
                spec = tiny(spec)
            print(f"{suite}: {' '.join(f'{k}={v}' for k, v in spec._asdict().items())}", flush=True)
            if args.resume and results.has(problem({"suite": suite, **spec._asdict()})):
                print("    measured already")
                continue
            rows = measured(suite, spec, names, args.rounds)
            results.put(rows)
            for row in rows:
                print(f"    {row['name']:30} {said(row)}", flush=True)
    print(f"written: {results.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
